"""What a strategy is asked for in the time model, and what it gets to know."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from jaxtyping import Float

from gossipgrad.planning import Profile

from ._network import Network
from ._workers import Pace

__all__ = ["Setting", "Steps", "Strategy", "check_counts", "together"]

Times = Float[np.ndarray, " rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One case: a model's compute, a network, so many ranks."""

    profile: Profile
    network: Network
    world_size: int

    def average_seconds(self, buckets_bytes: Sequence[float | int]) -> float:
        """An exact average, once all ranks are there: they meet, then all-reduce the buckets."""
        if self.world_size == 1:
            return 0.0
        network, p = self.network, self.world_size
        meeting = 2 * network.meeting_seconds(p)  # how much each says, then what
        by_size = {size: network.all_reduce_seconds(size, p) for size in set(buckets_bytes)}
        return meeting + sum(by_size[size] for size in buckets_bytes)

    def ring_bytes(self, size_bytes: float | int) -> float:
        """What each rank sends in an all-reduce of `size_bytes`."""
        return 2 * (self.world_size - 1) / self.world_size * size_bytes


def together(end: Times, seconds: float) -> Times:
    """When all ranks are through something that begins when the last of them comes."""
    return np.full_like(end, end.max() + seconds)


def check_counts(strategy: "Strategy", *names: str, least: int = 1) -> None:
    """Raise unless these settings are whole numbers from `least` on, or None."""
    for name in names:
        value = getattr(strategy, name)
        if value is not None and not (isinstance(value, Integral) and int(value) >= least):
            raise ValueError(f"{name} is {value}: it must be {least} or more, a whole number")


class Steps(ABC):
    """The steps of all ranks under one strategy, and whatever is under way between them.

    Attributes:
        cycle: Steps after which what is sent repeats.
        rotation: Cycles after which the partners do, too.
        bytes_sent: By each rank so far, in the mean.
    """

    def __init__(self) -> None:
        self.cycle = 1
        self.rotation = 1
        self.bytes_sent = 0.0

    @abstractmethod
    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """When each rank ends step `number`, which it begins at `start`.

        Args:
            number: Of the step; they come in order, from 0.
            start: When each rank begins it, shape `(world_size,)`.
            pace: How fast each rank computes in it.
        """

    def seldom(self, end: Times) -> tuple[float, float]:
        """What comes so seldom that it is in no cycle: its share of each step, none by default.

        Args:
            end: When each rank ended the last step, shape `(world_size,)`.

        Returns:
            Seconds, and bytes sent by each rank, in the mean.
        """
        return 0.0, 0.0


class Strategy(ABC):
    """A way to keep replicas together, as far as time is concerned: a frozen value.

    To add one, derive from this and from `Steps`, which says when each rank ends a step.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What tables call it."""

    @abstractmethod
    def begin(self, setting: Setting) -> Steps:
        """Its steps in that case, from the first."""
