"""What the model of step times is made of: the case, how fast ranks compute, strategies, steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from jaxtyping import Float

from gossipgrad.planning import Profile

from ._network import Network

__all__ = [
    "INSIDE_BITS_PER_SECOND",
    "Setting",
    "Steps",
    "Strategy",
    "Times",
    "Workers",
    "by_size",
    "check_counts",
    "count_messages",
]

Times = Float[np.ndarray, " rank"]

INSIDE_BITS_PER_SECOND = 1e11  # about what PCIe gives


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """How long compute takes on each rank.

    The time of a step is drawn by step and rank, so that all strategies get the same draws.

    Attributes:
        jitter: Standard deviation of the logarithm of a step's compute time, from 0 to 3 (0.1 is
            10 %); the mean does not change.
        stragglers: How many ranks are slow in every step; `seed` says which.
        straggler_factor: How many times longer they compute.
        seed: Of the draws.

    Raises:
        ValueError: A value is out of range.
    """

    jitter: float = 0.0
    stragglers: int = 0
    straggler_factor: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_valid, rule in (
            ("jitter", 0 <= self.jitter <= 3, "from 0 to 3, relative to a step (0.1 is 10 %)"),
            ("stragglers", self.stragglers >= 0, "a number of ranks, 0 or more"),
            (
                "straggler_factor",
                0 < self.straggler_factor < math.inf,
                "how many times longer a straggler computes, above 0",
            ),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ):
            if not is_valid:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be {rule}")

    def constant(self, world_size: int) -> Times:
        """The factor of each rank that is the same in all steps.

        Raises:
            ValueError: There are more stragglers than ranks.
        """
        if self.stragglers > world_size:
            raise ValueError(
                f"{self.stragglers} stragglers among {world_size} ranks: give at most {world_size}"
            )
        factor = np.ones(world_size)
        chosen = np.random.default_rng((self.seed, 0)).permutation(world_size)
        factor[chosen[: self.stragglers]] = self.straggler_factor
        return factor

    def pace(self, constant: Times, step: int) -> Times:
        """How many times longer each rank computes in step number `step`.

        Args:
            constant: What `constant()` returned, shape `(world_size,)`.
            step: The number of the step.
        """
        if not self.jitter:
            return constant
        normal = np.random.default_rng((self.seed, 1, step)).standard_normal(constant.size)
        return constant * np.exp(self.jitter * normal - self.jitter**2 / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One case: a model's compute, a network, a number of ranks.

    Attributes:
        profile: Compute of a step, and the tensors that travel.
        network: Cost of messages between nodes.
        world_size: The number of ranks.
        island: Ranks of a node, which share its link. Replicas that gossip are then islands.
        inside: Cost of messages inside a node.
    """

    profile: Profile
    network: Network
    world_size: int
    island: int = 1
    inside: Network = Network.from_rate(INSIDE_BITS_PER_SECOND)  # noqa: RUF009  (it is frozen)


class Steps(ABC):
    """The steps of all ranks under one strategy, with the messages in flight between them.

    Attributes:
        cycle: Steps after which what is sent repeats.
        bytes_sent: By each rank so far, on average.
    """

    def __init__(self) -> None:
        self.cycle = 1
        self.bytes_sent = 0.0

    @abstractmethod
    def step(self, number: int, start: Times, pace: Times) -> Times:
        """When each rank ends step `number`.

        Args:
            number: Of the step; steps come in order, from 0.
            start: When each rank begins it, shape `(world_size,)`.
            pace: How many times longer each rank computes in it, shape `(world_size,)`.
        """


class Strategy(ABC):
    """A way to keep replicas together, as far as time is concerned: a frozen value."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in tables."""

    @abstractmethod
    def begin(self, setting: Setting) -> Steps:
        """Its steps in that case, from the first."""


def check_counts(strategy: Strategy, *names: str, least: int = 1) -> None:
    """Raises unless these settings are whole numbers from `least` on, or None."""
    for name in names:
        value = getattr(strategy, name)
        if value is not None and not (isinstance(value, Integral) and int(value) >= least):
            raise ValueError(f"{name} is {value}, but must be a whole number, {least} or more")


def by_size(
    size_bytes: Sequence[int], limit_bytes: int, first_limit_bytes: int | None = None
) -> list[list[int]]:
    """Indices of tensors in buckets, in their order; a bucket is full once it holds its limit."""
    buckets: list[list[int]] = []
    filled = limit = 0
    for index, size in enumerate(size_bytes):
        if filled >= limit:
            limit = first_limit_bytes if first_limit_bytes and not buckets else limit_bytes
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def count_messages(size_bytes: Sequence[int], limit_bytes: int) -> int:
    """How many messages gossip makes of tensors: as `by_size`, but larger tensors are cut."""
    cut: list[int] = []
    for size in size_bytes:
        whole, rest = divmod(size, limit_bytes)
        cut += [limit_bytes] * whole + [rest] * (rest > 0)
    return max(1, len(by_size(cut, limit_bytes)))
