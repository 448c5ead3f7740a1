"""When steps end with all-reduce of gradients, with sparse gradients, or without communication."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gossipgrad.planning import (
    Method,
    Plan,
    Profile,
    dense_all_reduce,
    plan,
    sparse_all_gather,
)

from ._model import Setting, Steps, Strategy, Times, by_size, check_counts
from ._network import Network

__all__ = ["AllReduce", "Local", "Sparse"]

_PAIR_BYTES = 8  # a float32 and its index
_GATHERING_RANKS = 8  # with more, gg.sparsify splits and reduces


class _Group(NamedTuple):
    """Gradients that travel together."""

    ready_seconds: float  # from the start of the step until a rank has them, when it computes alone
    seconds: float  # from when the last rank has them until all ranks have the result


class _GroupedSteps(Steps):
    """Groups of gradients travel one after another; the update waits for the last."""

    def __init__(self, profile: Profile, groups: Sequence[_Group], step_bytes: float) -> None:
        super().__init__()
        self._groups = groups
        self._step_bytes = step_bytes
        self._optimizer_seconds = profile.optimizer_seconds
        computed = profile.compute_seconds - profile.optimizer_seconds
        self._computed_seconds = groups[-1].ready_seconds if groups else computed

    def step(self, number: int, start: Times, pace: Times) -> Times:
        """See `Steps.step`."""
        arrived = -np.inf
        for group in self._groups:
            ready = float((start + group.ready_seconds * pace).max())
            arrived = max(ready, arrived) + group.seconds
        self.bytes_sent += self._step_bytes
        computed = start + self._computed_seconds * pace
        return np.maximum(computed, arrived) + self._optimizer_seconds * pace


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(Strategy):
    """Gradients all-reduced in every step by a ring, behind the backward pass.

    Attributes:
        bucket_bytes: Size of a full bucket.
        first_bucket_bytes: Size of the first one; None: as the others, as with a `bucket_cap_mb`
            of DistributedDataParallel.
        element_bytes: Of an element on the wire; None: as in the profile.
    """

    name: str = "allreduce"
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int | None = 1 << 20
    element_bytes: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, "bucket_bytes", "first_bucket_bytes", "element_bytes")

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        profile, p = setting.profile, setting.world_size
        # DistributedDataParallel makes buckets by the size of the gradients, whatever travels.
        sizes = [count * profile.element_bytes for count in profile.elements]
        width = self.element_bytes or profile.element_bytes
        ready = profile.forward_seconds + np.cumsum(profile.backward_seconds)
        groups = []
        buckets = by_size(sizes, self.bucket_bytes, self.first_bucket_bytes)
        for bucket in buckets if p > 1 else ():
            size = width * sum(profile.elements[index] for index in bucket)
            seconds = setting.network.all_reduce(p)(size)
            groups.append(_Group(float(ready[bucket[-1]]), seconds))
        return _GroupedSteps(profile, groups, 2 * (p - 1) / p * width * sum(profile.elements))


def _select(elements: Any) -> Any:
    """Seconds of selecting and packing, of a GPU."""
    return 1e-4 + 2e-9 * elements


def _decode(pairs: Any) -> Any:
    """Seconds of adding up values and indices that arrive, of a GPU."""
    return 5e-9 * pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse(Strategy):
    """Gradients in merged groups, of each all elements all-reduced or the largest exchanged.

    Up to 8 ranks all gather the elements of all. With more, each rank adds up those of a p-th of
    the coordinates, and all gather the largest sums, as many as each has sent.

    Selection takes turns with backward on each rank; a group travels when the last rank has it and
    the group before has arrived; the update waits for the last group. The plan of groups is that of
    `gossipgrad.planning.plan` for ranks that compute as the profile says.

    Attributes:
        density: The share of a sparse group that is sent, above 0 and at most 1.
    """

    name: str = "sparse"
    density: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: give a share above 0 and at most 1")

    def plan(
        self, profile: Profile, network: Network, world_size: int
    ) -> tuple[Plan, list[Method]]:
        """The groups, and the methods that they name: sparse, then dense."""
        gather = network.all_gather(world_size)
        sparse = sparse_all_gather(
            gather,
            density=self.density,
            world_size=world_size,
            select=_select,
            pair_bytes=_PAIR_BYTES,
            scatter=_decode,
        )
        if world_size > _GATHERING_RANKS:

            def split_and_reduce(elements: Any) -> Any:
                # Parts go to their owners as bytes go in an all-gather of such parts.
                pairs = np.maximum(np.floor(self.density * elements), 1.0)
                return 2 * (gather(_PAIR_BYTES * np.ceil(pairs / world_size)) + _decode(pairs))

            sparse = Method("sparse", _select, split_and_reduce)
        reduce = network.all_reduce(world_size)
        methods = [sparse, dense_all_reduce(reduce, element_bytes=profile.element_bytes)]
        found = plan(profile.backward_seconds, profile.elements, methods)
        return replace(found, names=profile.names), methods

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        profile, p = setting.profile, setting.world_size
        groups, step_bytes, ready = [], 0.0, profile.forward_seconds
        if p > 1:
            found, methods = self.plan(profile, setting.network, p)
            by_name = {method.name: method for method in methods}
            for group in found.groups:
                elements = sum(profile.elements[group.start : group.stop])
                method = by_name[group.method]
                ready += sum(profile.backward_seconds[group.start : group.stop])
                ready += float(method.select_seconds(elements))
                groups.append(_Group(ready, float(method.communicate_seconds(elements))))
                if group.method == "dense":
                    step_bytes += 2 * (p - 1) / p * profile.element_bytes * elements
                    continue
                pairs = max(1, int(self.density * elements))
                sent = pairs if p <= _GATHERING_RANKS else 2 * math.ceil(pairs / p)
                step_bytes += (p - 1) * _PAIR_BYTES * sent
        return _GroupedSteps(profile, groups, step_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Strategy):
    """No communication: the bound of all others."""

    name: str = "local"

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        return _GroupedSteps(setting.profile, (), 0.0)
