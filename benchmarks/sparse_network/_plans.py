"""The plans of all contestants, from what one session has measured in a place."""

from typing import Any

from gossipgrad.planning import (
    Method,
    PiecewiseCost,
    Plan,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    threshold,
    wfbp,
)

from ._kinds import KINDS, OPTIMAL, Kind
from ._selection import OURS, Curve, cost_of

_RULES = {"wfbp": wfbp, "mg_wfbp": mg_wfbp, "omgs_greedy": omgs_greedy, "single": single}

Measured = dict[str, Any]


class Plans:
    """Reckons with the costs that a session of ours has measured, our selection among them.

    Args:
        measured: What `Measuring.told` gave.
        curves: Selection at full size, by name.
        time_factor: Of the replay.
        size_factor: Of the replay.
        buckets_bytes: Of DistributedDataParallel: the first, and the others.
    """

    def __init__(
        self,
        measured: Measured,
        curves: dict[str, Curve],
        *,
        time_factor: float,
        size_factor: float,
        buckets_bytes: tuple[int, int],
    ) -> None:
        self._measured = measured
        self._curves = curves
        self._time_factor = time_factor
        self._size_factor = size_factor
        self._buckets_bytes = buckets_bytes

    def of(self, name: str) -> Plan | None:
        """Groups of a contestant, and when they are predicted to have arrived."""
        if name == OPTIMAL:
            return Plan.from_json(self._measured["plan"])
        kind = KINDS[name]
        if kind.rule is None:
            return None
        backward, sizes = self._measured["backward_seconds"], self._measured["sizes"]
        methods = [self._method(method, kind) for method in kind.methods]
        if kind.rule == "optimal":
            return plan(backward, sizes, methods)
        if kind.rule == "ddp":
            first, others = self._buckets_bytes
            return threshold(backward, sizes, methods[0], size_bytes=others, first_size_bytes=first)
        return _RULES[kind.rule](backward, sizes, methods[0])

    def _method(self, name: str, kind: Kind) -> Method:
        costs = self._measured["costs"][name]
        select = PiecewiseCost.fit(costs["elements"], costs["select_seconds"])
        if name == "sparse" and kind.selection != OURS:
            ours, other = cost_of(self._curves[OURS]), cost_of(self._curves[kind.selection])
            at_full_size = [elements / self._size_factor for elements in costs["elements"]]
            select = PiecewiseCost.fit(
                costs["elements"],
                [
                    max(1e-9, seconds + self._time_factor * float(other(n) - ours(n)))
                    for n, seconds in zip(at_full_size, costs["select_seconds"], strict=True)
                ],
            )
        communicate = PiecewiseCost.fit(costs["elements"], costs["communicate_seconds"])
        return Method(name=name, select_seconds=select, communicate_seconds=communicate)
