"""When steps end with all-reduce: of gradients, plain or merged and sparse; of weights; or none."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gossipgrad.planning import (
    Method,
    PiecewiseCost,
    Plan,
    Profile,
    dense_all_reduce,
    mg_wfbp,
    plan,
    single,
    sparse_all_gather,
    wfbp,
)

from ._model import (
    Pace,
    Setting,
    Steps,
    Strategy,
    Times,
    by_layer,
    by_size,
    check_counts,
    synchronize,
)
from ._network import Network

__all__ = ["AllReduce", "CountCost", "Local", "Merged", "PeriodicAverage", "collective_cost"]

_RULES = ("omgs", "topk", "lags", "wfbp", "mg-wfbp")
_PAIR_BYTES = 8  # a float32 and its index


class _Group(NamedTuple):
    """Gradients that travel together.

    Attributes:
        ready_seconds: From the start of the step until a rank has them, when it computes alone.
        seconds: From when the last rank has them until all ranks have the result.
        moving_seconds: The part in which no other group can use the links.
    """

    ready_seconds: float
    seconds: float
    moving_seconds: float = 0.0


class _GroupedSteps(Steps):
    """Groups of gradients travel during backward; the update waits for the last of them.

    A group begins when the last rank has it and fewer than `at_once` are in flight.
    """

    def __init__(
        self,
        profile: Profile,
        groups: Sequence[_Group],
        *,
        step_bytes: float,
        at_once: int = 1,
    ) -> None:
        super().__init__()
        self._groups = groups
        self._step_bytes = step_bytes
        self._at_once = at_once
        self._optimizer_seconds = profile.optimizer_seconds
        computed = profile.compute_seconds - profile.optimizer_seconds
        self._computed_seconds = groups[-1].ready_seconds if groups else computed

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        # Of the last `at_once` groups; each ends after the one before.
        ends = deque([-math.inf] * self._at_once, maxlen=self._at_once)
        for group in self._groups:
            begin = max(float(pace.after(start, group.ready_seconds).max()), ends[0])
            ends.append(max(begin + group.seconds, ends[-1] + group.moving_seconds))
        self.bytes_sent += self._step_bytes
        computed = pace.after(start, self._computed_seconds)
        return np.maximum(computed, ends[-1]) + self._optimizer_seconds * pace.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(Strategy):
    """Gradients all-reduced in every step, behind the backward pass.

    An all-reduce begins when the last rank has its gradients and fewer than `at_once` are in
    flight. Their start-ups overlap, their bytes do not: each occupies the links for as long as its
    bytes need. The update waits for the last.

    Attributes:
        buckets: `"size"` as DistributedDataParallel deals them, or `"layer"`, one a module, as
            strategy agd does.
        bucket_bytes: Size of a full bucket; not used with layers.
        first_bucket_bytes: Size of the first one; None: as the others, as with a `bucket_cap_mb`
            of DistributedDataParallel.
        element_bytes: Of an element on the wire; None: as in the profile.
        at_once: All-reduces in flight at once: torch's Gloo has two threads for them.
    """

    name: str = "allreduce"
    buckets: str = "size"
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int | None = 1 << 20
    element_bytes: int | None = None
    at_once: int = 2

    def __post_init__(self) -> None:
        if self.buckets not in ("size", "layer"):
            raise ValueError(f"no buckets by {self.buckets!r}: choose size or layer")
        check_counts(self, "bucket_bytes", "first_bucket_bytes", "element_bytes", "at_once")

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        profile, network, p = setting.profile, setting.network, setting.world_size
        if self.buckets == "layer":
            buckets = by_layer(profile.names)
        else:
            # DistributedDataParallel deals by the size of the gradients, whatever travels.
            sizes = [count * profile.element_bytes for count in profile.elements]
            buckets = by_size(sizes, self.bucket_bytes, self.first_bucket_bytes)
        width = self.element_bytes or profile.element_bytes
        ready = profile.forward_seconds + np.cumsum(profile.backward_seconds)
        # A measured start-up may hide bytes: they occupy the links for as long as they need.
        start_up = network.all_reduce_seconds(0, p)
        wire = network.exchange.beta_seconds_per_byte
        groups, step_bytes = [], 0.0
        for bucket in buckets if p > 1 else ():
            size = width * sum(profile.elements[index] for index in bucket)
            seconds, sent = network.all_reduce_seconds(size, p), setting.ring_bytes(size)
            moving = min(seconds, max(seconds - start_up, wire * sent))
            groups.append(_Group(float(ready[bucket[-1]]), seconds, moving))
            step_bytes += sent
        return _GroupedSteps(profile, groups, step_bytes=step_bytes, at_once=self.at_once)


@dataclass(frozen=True, slots=True)
class CountCost:
    """A start-up time, and a time for each element or pair."""

    start_up_seconds: float
    each_seconds: float

    def __call__(self, count: Any) -> Any:
        """Seconds for so many."""
        return self.start_up_seconds + self.each_seconds * count


def collective_cost(
    seconds: Callable[[float], float], largest_bytes: int, network: Network
) -> PiecewiseCost:
    """The cost of a collective by its bytes, straight between sizes that double.

    Between measured sizes it is straight anyway, and of a plain ring everywhere.
    """
    doubled = (float(1 << power) for power in range(8, 2 * largest_bytes.bit_length()))
    knots = {0.0, 512.0, *(size for size in doubled if size <= 4 * largest_bytes)}
    if network.all_reduce is not None:
        knots |= set(network.all_reduce.sizes)
    sizes = sorted(knots)
    times = np.maximum.accumulate([seconds(size) for size in sizes])
    return PiecewiseCost(sizes=tuple(sizes), seconds=tuple(times.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged(Strategy):
    """Gradients in merged groups, each all-reduced or its largest elements gathered.

    Selection takes turns with backward on each rank; a group travels when the last rank has it and
    the group before has arrived; the update waits for the last group. The plan is that of
    `gossipgrad.planning` for ranks that compute as the profile says.

    Attributes:
        rule: Which groups: `"omgs"` (the plan that finishes first, sparse or dense), `"topk"` (one
            sparse group), `"lags"` (each tensor sparse), `"wfbp"` (each tensor dense) or
            `"mg-wfbp"`.
        density: The share of a sparse group that is sent, above 0 and at most 1.
        select: Seconds by elements of selecting and packing; by default of a GPU.
        decode: Seconds by pairs of adding up what arrives.
    """

    name: str = "omgs"
    rule: str = "omgs"
    density: float = 0.01
    select: Callable[[Any], Any] = CountCost(1e-4, 2e-9)
    decode: Callable[[Any], Any] = CountCost(0.0, 5e-9)

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise ValueError(f"no rule {self.rule!r}: choose among {', '.join(_RULES)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: give a share above 0 and at most 1")

    def plan(self, profile: Profile, network: Network, world_size: int) -> tuple[Plan, list]:
        """The groups, and the methods that they name: sparse, then dense."""
        gather, reduce = (
            collective_cost(partial(seconds, world_size=world_size), profile.size_bytes, network)
            for seconds in (network.all_gather_seconds, network.all_reduce_seconds)
        )
        sparse = sparse_all_gather(
            gather,
            density=self.density,
            world_size=world_size,
            select=self.select,
            pair_bytes=_PAIR_BYTES,
            scatter=self.decode,
        )
        dense = dense_all_reduce(reduce, element_bytes=profile.element_bytes)
        step = profile.backward_seconds, profile.elements
        rules: dict[str, Callable[[], Plan]] = {
            "omgs": lambda: plan(*step, [sparse, dense]),
            "topk": lambda: single(*step, sparse),
            "lags": lambda: wfbp(*step, sparse),
            "wfbp": lambda: wfbp(*step, dense),
            "mg-wfbp": lambda: mg_wfbp(*step, dense),
        }
        return rules[self.rule](), [sparse, dense]

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        profile, p = setting.profile, setting.world_size
        groups, step_bytes, ready = [], 0.0, profile.forward_seconds
        if p > 1:
            found, methods = self.plan(profile, setting.network, p)
            by_name: dict[str, Method] = {method.name: method for method in methods}
            for group in found.groups:
                elements = sum(profile.elements[group.start : group.stop])
                method = by_name[group.method]
                ready += sum(profile.backward_seconds[group.start : group.stop])
                ready += float(method.select_seconds(elements))
                groups.append(_Group(ready, float(method.communicate_seconds(elements))))
                if group.method == "dense":
                    step_bytes += setting.ring_bytes(profile.element_bytes * elements)
                else:
                    step_bytes += (p - 1) * _PAIR_BYTES * max(1, int(self.density * elements))
        return _GroupedSteps(profile, groups, step_bytes=step_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicAverage(Strategy):
    """Local steps; every so many of them all replicas become their exact average.

    All ranks wait for each other after the update, and nothing hides the average.

    Attributes:
        every: Steps between averages; `"log_p"` for `ceil(log2 p)`.
        state_copies: Tensors of optimizer state averaged with each parameter; None: as many as in
            the profile.
        bucket_bytes: Of one all-reduce.
    """

    name: str = "post-local-sgd"
    every: int | str = 16
    state_copies: int | None = 0
    bucket_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if isinstance(self.every, str) and self.every != "log_p":
            raise ValueError(f"every is {self.every!r}: give a number of steps, or 'log_p'")
        check_counts(self, "bucket_bytes", *(() if self.every == "log_p" else ("every",)))
        check_counts(self, "state_copies", least=0)

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        profile = setting.profile
        sizes = [count * profile.element_bytes for count in profile.elements]
        buckets = [
            float(sum(sizes[index] for index in bucket))
            for bucket in by_size(sizes, self.bucket_bytes)
        ]
        copies = profile.state_copies if self.state_copies is None else self.state_copies
        buckets *= 1 + copies
        every = self.every
        if isinstance(every, str):
            every = max(1, (setting.world_size - 1).bit_length())
        return _LocalSteps(
            profile, every, setting.average_seconds(buckets), setting.ring_bytes(sum(buckets))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Strategy):
    """No communication: the upper bound of all others."""

    name: str = "local"

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        return _LocalSteps(setting.profile)


class _LocalSteps(Steps):
    """Steps of compute; an average every so many of them, or none for 0."""

    def __init__(
        self,
        profile: Profile,
        average_every: int = 0,
        average_seconds: float = 0.0,
        average_bytes: float = 0.0,
    ) -> None:
        super().__init__()
        self.cycle = average_every or 1
        self._compute_seconds = profile.compute_seconds
        self._average_every = average_every
        self._average_seconds = average_seconds
        self._average_bytes = average_bytes

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        end = pace.after(start, self._compute_seconds)
        if self._average_every and (number + 1) % self._average_every == 0:
            end = synchronize(end, self._average_seconds)
            self.bytes_sent += self._average_bytes
        return end
