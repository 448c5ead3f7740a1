"""What the model of step times is made of: the case, how fast ranks compute, strategies, steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Integral

import numpy as np
from jaxtyping import Float

from gossipgrad.planning import Profile

from ._network import Network

__all__ = [
    "Pace",
    "Setting",
    "Steps",
    "Strategy",
    "Times",
    "Workers",
    "by_layer",
    "by_size",
    "check_counts",
    "count_messages",
    "synchronize",
]

Times = Float[np.ndarray, " rank"]


@dataclass(frozen=True, slots=True)
class Pace:
    """One step of every rank: how many times longer compute takes, and stalls at its start.

    Attributes:
        factor: Shape `(world_size,)`.
        stall_seconds: Shape `(world_size,)`.
    """

    factor: Times
    stall_seconds: Times

    def after(self, start: Times, seconds: float) -> Times:
        """When each rank has computed what takes `seconds` on a plain rank, stall included."""
        return start + self.stall_seconds + seconds * self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """How long compute takes on each rank.

    The time of a step is drawn by step and rank, so that all strategies get the same draws.

    Attributes:
        jitter: Standard deviation of the logarithm of a step's compute time, from 0 to 3 (0.1 is
            10 %); the mean does not change.
        stragglers: How many ranks are slow in every step; `seed` says which.
        straggler_factor: How many times longer they compute.
        stall_probability: Of a rank to stall at the start of a step.
        stall_seconds: How long a stall is.
        seed: Of the draws.

    Raises:
        ValueError: A value is out of range.
    """

    jitter: float = 0.0
    stragglers: int = 0
    straggler_factor: float = 1.0
    stall_probability: float = 0.0
    stall_seconds: float = 0.0
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
            ("stall_probability", 0 <= self.stall_probability <= 1, "a probability, from 0 to 1"),
            ("stall_seconds", 0 <= self.stall_seconds < math.inf, "a time, 0 or more"),
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

    def pace(self, constant: Times, step: int) -> Pace:
        """All ranks in step number `step`; `constant` is what `constant()` returned."""
        generator = np.random.default_rng((self.seed, 1, step))
        factor, stall = constant, np.zeros_like(constant)
        if self.jitter:
            normal = generator.standard_normal(constant.size)
            factor = constant * np.exp(self.jitter * normal - self.jitter**2 / 2)
        if self.stall_probability and self.stall_seconds:
            stall[generator.random(constant.size) < self.stall_probability] = self.stall_seconds
        return Pace(factor, stall)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One case: a model's compute, a network, a number of ranks."""

    profile: Profile
    network: Network
    world_size: int

    def average_seconds(self, buckets_bytes: Sequence[float | int]) -> float:
        """An exact average, from when all ranks wait for it: two gathers, then the buckets."""
        if self.world_size == 1:
            return 0.0
        network, p = self.network, self.world_size
        by_size = {size: network.all_reduce_seconds(size, p) for size in set(buckets_bytes)}
        return 2 * network.meeting_seconds(p) + sum(by_size[size] for size in buckets_bytes)

    def ring_bytes(self, size_bytes: float | int) -> float:
        """Bytes that each rank sends in an all-reduce of `size_bytes`."""
        return 2 * (self.world_size - 1) / self.world_size * size_bytes


class Steps(ABC):
    """The steps of all ranks under one strategy, with the messages in flight between them.

    Attributes:
        cycle: Steps after which what is sent repeats.
        rotation: Cycles after which the partners repeat, too.
        bytes_sent: By each rank so far, on average.
    """

    def __init__(self) -> None:
        self.cycle = 1
        self.rotation = 1
        self.bytes_sent = 0.0

    @abstractmethod
    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """When each rank ends step `number`.

        Args:
            number: Of the step; steps come in order, from 0.
            start: When each rank begins it, shape `(world_size,)`.
            pace: How fast each rank computes in it.
        """

    def seldom(self, end: Times) -> tuple[float, float]:
        """Each step's share of what is too rare to be in a cycle; nothing by default.

        Args:
            end: When each rank ended the last step, shape `(world_size,)`.

        Returns:
            Seconds, and bytes sent by each rank, on average.
        """
        return 0.0, 0.0


class Strategy(ABC):
    """A way to keep replicas together, as far as time is concerned: a frozen value.

    To add one, derive from this and from `Steps`, which says when each rank ends a step.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in tables."""

    @abstractmethod
    def begin(self, setting: Setting) -> Steps:
        """Its steps in that case, from the first."""


def synchronize(end: Times, seconds: float) -> Times:
    """When all ranks end a collective that begins when the last of them is ready."""
    return np.full_like(end, end.max() + seconds)


def check_counts(strategy: Strategy, *names: str, least: int = 1) -> None:
    """Raises unless these settings are whole numbers from `least` on, or None."""
    for name in names:
        value = getattr(strategy, name)
        if value is not None and not (isinstance(value, Integral) and int(value) >= least):
            raise ValueError(f"{name} is {value}, but must be a whole number, {least} or more")


def by_size(
    size_bytes: Sequence[int], limit_bytes: int, first_limit_bytes: int | None = None
) -> list[list[int]]:
    """Tensors dealt in their order into buckets; a bucket is full once it holds its limit.

    Args:
        size_bytes: Of each tensor, in the order in which backward finishes them.
        limit_bytes: Of a bucket.
        first_limit_bytes: Of the first one, if it differs: DistributedDataParallel begins with a
            small one.

    Returns:
        For each bucket the indices of its tensors.

    Example:
        >>> by_size([4, 4, 4, 4], 8, first_limit_bytes=1)
        [[0], [1, 2], [3]]
    """
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


def by_layer(names: Sequence[str]) -> list[list[int]]:
    """Tensors of one module together: all but the last part of their names is the same.

    Example:
        >>> by_layer(["b.bias", "b.weight", "a.weight"])
        [[0, 1], [2]]
    """
    of_module = groupby(range(len(names)), key=lambda index: names[index].rpartition(".")[0])
    return [list(indices) for _, indices in of_module]


def count_messages(size_bytes: Sequence[int], limit_bytes: int) -> int:
    """How many messages gossip makes of tensors: as `by_size`, but larger tensors are cut.

    Example:
        >>> count_messages([4, 4, 40], 8)
        6
    """
    cut: list[int] = []
    for size in size_bytes:
        whole, rest = divmod(size, limit_bytes)
        cut += [limit_bytes] * whole + [rest] * (rest > 0)
    return max(1, len(by_size(cut, limit_bytes)))
