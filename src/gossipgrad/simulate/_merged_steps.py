"""When steps end with gradients that are merged, and compressed where that pays."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

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

from ._network import Network
from ._setting import Setting, Steps, Strategy
from ._workers import Pace

__all__ = ["CountCost", "Merged", "collective_cost"]

Times = Float[np.ndarray, " rank"]
_RULES = ("omgs", "topk", "lags", "wfbp", "mg-wfbp")
_PAIR_BYTES = 8  # a float32 and the place it belongs to


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
    """What a collective takes by its bytes, straight between sizes that double.

    Between measured sizes it is straight anyway, and of a plain ring everywhere.
    """
    sizes = {0.0, *(float(1 << power) for power in range(8, 2 * largest_bytes.bit_length()))}
    sizes = {size for size in sizes if size <= 4 * largest_bytes} | {512.0}
    if network.all_reduce is not None:
        sizes |= set(network.all_reduce.sizes)
    knots = sorted(sizes)
    times = np.maximum.accumulate([seconds(size) for size in knots])
    return PiecewiseCost(sizes=tuple(knots), seconds=tuple(times.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged(Strategy):
    """Gradients in merged groups, each all-reduced or its largest elements gathered.

    Selection takes turns with backward on each rank; a group travels when the last rank has it and
    the group before is through; the update waits for the last group. The plan is that of
    `gossipgrad.planning` for ranks that compute as the profile says.

    Attributes:
        rule: Which groups: `"omgs"` (the plan that finishes first, sparse or dense), `"topk"` (one
            sparse group), `"lags"` (each tensor sparse), `"wfbp"` (each tensor dense) or
            `"mg-wfbp"`.
        density: The share of a sparse group that is sent.
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
            raise ValueError(
                f"density is {self.density}: the share that is sent is above 0 and at most 1"
            )

    def begin(self, setting: Setting) -> "MergedSteps":
        """See `Strategy.begin`."""
        return MergedSteps(self, setting)

    def plan(self, profile: Profile, network: Network, world_size: int) -> tuple[Plan, list]:
        """The groups, and the methods that they name: sparse, then dense."""
        largest = profile.size_bytes
        costs = [
            collective_cost(partial(seconds, world_size=world_size), largest, network)
            for seconds in (network.all_gather_seconds, network.all_reduce_seconds)
        ]
        sparse = sparse_all_gather(
            costs[0],
            density=self.density,
            world_size=world_size,
            select=self.select,
            pair_bytes=_PAIR_BYTES,
            scatter=self.decode,
        )
        dense = dense_all_reduce(costs[1], element_bytes=profile.element_bytes)
        step = profile.backward_seconds, profile.elements
        rules: dict[str, Callable[[], Plan]] = {
            "omgs": lambda: plan(*step, [sparse, dense]),
            "topk": lambda: single(*step, sparse),
            "lags": lambda: wfbp(*step, sparse),
            "wfbp": lambda: wfbp(*step, dense),
            "mg-wfbp": lambda: mg_wfbp(*step, dense),
        }
        return rules[self.rule](), [sparse, dense]


class MergedSteps(Steps):
    """See `Merged`."""

    def __init__(self, options: Merged, setting: Setting) -> None:
        super().__init__()
        profile, p = setting.profile, setting.world_size
        self._profile = profile
        self._alone = p == 1
        self._groups: list[tuple[float, float, float]] = []
        self._step_bytes = 0.0
        if self._alone:
            return
        found, methods = options.plan(profile, setting.network, p)
        by_name: dict[str, Method] = {method.name: method for method in methods}
        for group in found.groups:
            elements = sum(profile.elements[group.start : group.stop])
            method = by_name[group.method]
            backward = sum(profile.backward_seconds[group.start : group.stop])
            select = float(method.select_seconds(elements))
            self._groups.append((backward, select, float(method.communicate_seconds(elements))))
            if group.method == "dense":
                self._step_bytes += setting.ring_bytes(profile.element_bytes * elements)
            else:
                pairs = max(1, int(options.density * elements))
                self._step_bytes += (p - 1) * _PAIR_BYTES * pairs

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        if self._alone:
            return pace.after(start, self._profile.compute_seconds)
        now = pace.after(start, self._profile.forward_seconds)
        arrived = -math.inf
        for backward, select, communicate in self._groups:
            now = now + (backward + select) * pace.factor
            arrived = max(arrived, float(now.max())) + communicate
        self.bytes_sent += self._step_bytes
        return np.maximum(now, arrived) + self._profile.optimizer_seconds * pace.factor
