"""Which plan a session follows: the one asked for, or one measured in its first steps."""

import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from gossipgrad.comm import Group
from gossipgrad.errors import GossipError
from gossipgrad.planning import (
    LEAST_SAVING,
    Merge,
    Method,
    Plan,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    threshold,
    wfbp,
)
from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._comparison import Comparison
from gossipgrad.sparsification._costs import CostMeasurement, Costs
from gossipgrad.sparsification._density import final_density
from gossipgrad.sparsification._settings import MEASURED_RULES, Settings, check_plan_fits

__all__ = ["Planner"]

logger = logging.getLogger("gossipgrad")

_WARM_ROUNDS = 2  # take memory, start threads, fill caches
_TIMED_ROUNDS = 5
_ALIKE = 1.5  # densities by less than that factor apart: a plan is for both
_ALTERNATIVES = ("layerwise", "single", "mg-wfbp", "greedy")
_RULES: dict[str, Callable[..., Plan]] = {
    "optimal": plan,
    "greedy": omgs_greedy,
    "mg-wfbp": mg_wfbp,
    "layerwise": wfbp,
    "wfbp": wfbp,
    "single": single,
}


class Planner:
    """The plan of a session, agreed on by all ranks.

    A plan that needs measurements begins as one group: selection comes after the last gradient
    then, and the times of gradients are those of backward alone. What follows is done after steps,
    and takes of each no longer than about another step:

    1. Backward is timed.
    2. The ranks measure selection and collectives together, at the density that training goes on
       with after a `Warmup`.
    3. Rank 0 computes the plan from medians over rounds and ranks, on a thread of its own; all
       change to it between two rounds.
    4. `"optimal"` alone, once the density is that of the plan: the plan and the best one that sends
       all are used in turn for some steps, and the faster stays. One that compresses has to save
       `LEAST_SAVING` of a step: what it leaves for later rounds costs accuracy.

    Args:
        settings: Of the session.
        sizes_bytes: Of the parameters, in the order in which backward is expected to finish them.
        group: Whose ranks agree.

    Attributes:
        first_merges: The groups to begin with.
        plan: The one that was computed or given; None for a rule that needs no times, and until
            then.
        alternatives: Predicted seconds of the rules, by name and method.
        compared_seconds: Of a step with the plan and with dense; empty before both were used.
        backward_seconds: Of each tensor, as measured, in the order of the plan.
        costs: Of each method, as measured.
        refused: Why nothing is compressed, None if something is or nobody asked.
    """

    def __init__(self, settings: Settings, sizes_bytes: Sequence[int], group: Group) -> None:
        self.plan: Plan | None = settings.plan if isinstance(settings.plan, Plan) else None
        self.first_merges = _first_merges(settings, sizes_bytes)
        self.alternatives: dict[str, float] = {}
        self.compared_seconds: dict[str, float] = {}
        self.refused: str | None = None
        self._settings = settings
        self._group = group
        self._ended_seconds = perf_counter()  # when the last round and all that followed had ended
        self._start()

    def _start(self) -> None:
        self.backward_seconds: list[float] = []
        self.costs: list[Costs] = []
        self._rounds = 0
        self._stamps: list[dict[str, float]] = []
        self._periods: list[float] = []
        self._measurement: CostMeasurement | None = None
        self._computation: _Computation | None = None
        self._comparison: Comparison | None = None
        self._density = 0.0  # that the plan is for
        self._dense: Plan | None = None  # what the plan is yet to be compared with

    @property
    def decided(self) -> bool:
        """Whether there is a plan, and nothing that it is yet to be compared with."""
        return self.plan is not None and self._dense is None

    def restart(self, aggregation: Aggregation) -> None:
        """Measures and plans anew in the steps to come, with one group until then; a collective.

        Raises:
            ValueError: The plan is not one that is measured.
            GossipError: The ranks are not at the same step.
        """
        if not self._settings.measures:
            raise ValueError(
                f"plan={self._settings.plan!r} measures nothing, so there is nothing to plan anew: "
                "replan() is for 'optimal', 'greedy' and 'mg-wfbp'"
            )
        rounds = self._group.all_gather_object(aggregation.rounds)
        if len(set(rounds)) > 1:
            raise GossipError(f"replan() after {rounds} rounds: call it after the same step on all")
        self._start()
        self.plan, self.refused = None, None
        self.compared_seconds = {}
        aggregation.regroup(self.first_merges)

    def after_round(self, aggregation: Aggregation) -> None:
        """Notes what a round took, and goes on with the plan; a collective at times."""
        if not self._settings.measures:
            return
        period_seconds = perf_counter() - self._ended_seconds
        if self._comparison is not None:
            self._compare(aggregation, period_seconds)
        elif self.plan is not None:
            if self._dense is not None and aggregation.density <= _ALIKE * self._density:
                self._comparison = Comparison(self._group)
        elif self._computation is not None:
            self._take_computed(aggregation)
        elif self._measurement is not None:
            if (costs := self._measurement.advance()) is not None:
                self.costs = costs
                self._compute(aggregation)
        else:
            self._time_backward(aggregation, period_seconds)
        self._ended_seconds = perf_counter()

    def state(self) -> dict[str, Any]:
        """For a session's state: plain values, the same on all ranks."""
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "dense": None if self._dense is None else self._dense.to_json(),
            "density": self._density,
            "alternatives": self.alternatives,
            "compared_seconds": self.compared_seconds,
            "refused": self.refused,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave; a measurement or comparison under way begins anew."""
        self._start()
        self.plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        self._dense = None if state["dense"] is None else Plan.from_json(state["dense"])
        self._density = state["density"]
        self.alternatives, self.refused = dict(state["alternatives"]), state["refused"]
        self.compared_seconds = dict(state["compared_seconds"])

    def _time_backward(self, aggregation: Aggregation, period_seconds: float) -> None:
        self._rounds += 1
        if self._rounds > _WARM_ROUNDS:
            self._stamps.append(aggregation.stamps())
            self._periods.append(period_seconds)
        if len(self._stamps) < _TIMED_ROUNDS:
            return
        mine = [_medians(self._stamps), statistics.median(self._periods)]
        of_ranks = self._group.all_gather_object(mine)
        names, self.backward_seconds = backward_of(
            [stamps for stamps, _ in of_ranks], aggregation.names
        )
        aggregation.regroup(self.first_merges, names=names)
        self._density = aggregation.average(
            final_density(self._settings.density, names, aggregation.rounds)
        )
        self._measurement = CostMeasurement(
            self._settings,
            self._group,
            aggregation.device,
            aggregation.dtype,
            elements=sum(aggregation.sizes),
            tensors=len(aggregation.sizes),
            density=self._density,
            step_seconds=statistics.median(period for _, period in of_ranks),
        )

    def _compute(self, aggregation: Aggregation) -> None:
        self._measurement = None
        self._computation = _Computation()
        if self._group.rank == 0:
            self._computation.start(
                partial(
                    _computed,
                    self._settings,
                    self.backward_seconds,
                    aggregation.sizes,
                    tuple(aggregation.names),
                    [each.method() for each in self.costs],
                )
            )

    def _take_computed(self, aggregation: Aggregation) -> None:
        """What rank 0 has computed, on all ranks, if it is done.

        Processors of two kinds round differently: what each rank computed for itself would be two
        plans.
        """
        assert self._computation is not None
        found = self._group.broadcast_object(self._computation.poll())
        if found is None:
            return
        self._computation = None
        self.alternatives = dict(found["alternatives"])
        self.plan = Plan.from_json(found["plan"])
        if found["dense"] is not None and is_sparse(self.plan):
            self._dense = Plan.from_json(found["dense"])
        elif found["dense"] is not None:
            self._refuse(
                f"gradients are predicted to be together after {_ms(self.plan.finish_seconds)} ms, "
                f"with every group sparse after {_ms(found['sparse_seconds'])} ms at best"
            )
        aggregation.regroup(self.plan.groups)

    def _compare(self, aggregation: Aggregation, period_seconds: float) -> None:
        assert self._comparison is not None
        assert self._dense is not None
        assert self.plan is not None
        comparison, dense, own = self._comparison, self._dense, self.plan
        later_seconds = dense.finish_seconds - own.finish_seconds
        comparison.note(period_seconds, later_seconds)
        if not comparison.over:
            groups = dense.groups if comparison.dense_next else own.groups
            if groups != aggregation.merges:
                aggregation.regroup(groups)
            return
        self._comparison = self._dense = None
        self.compared_seconds = comparison.seconds
        with_plan, with_dense = comparison.seconds["plan"], comparison.seconds.get("dense")
        if with_dense is not None and with_plan > (1 - LEAST_SAVING) * with_dense:
            self.plan = dense
            self._refuse(
                f"measured in the run, a step takes {_ms(with_dense)} ms so, and "
                f"{_ms(with_plan)} ms with compression"
            )
        if self.plan.groups != aggregation.merges:
            aggregation.regroup(self.plan.groups)

    def _refuse(self, why: str) -> None:
        self.refused = f"nothing is compressed: {why}"
        if self._group.rank == 0:
            logger.warning("%s", self.refused)


class _Computation:
    """Something that is computed on a thread, while training goes on."""

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []
        self._error: Exception | None = None

    def start(self, compute: Callable[[], dict[str, Any]]) -> None:
        threading.Thread(
            target=self._run, args=(compute,), name="gossipgrad plan", daemon=True
        ).start()

    def poll(self) -> dict[str, Any] | None:
        """What came out; None until then."""
        if self._error is not None:
            raise self._error
        return self._found[0] if self._found else None

    def _run(self, compute: Callable[[], dict[str, Any]]) -> None:
        try:
            self._found.append(compute())
        except Exception as error:
            self._error = error


def backward_of(
    of_ranks: Sequence[Mapping[str, float]], names: Sequence[str]
) -> tuple[list[str], list[float]]:
    """The order of gradients, and how long backward takes for each after the one before.

    The order is rank 0's; where that has no gradient of a parameter, it comes last. Times are
    medians over the ranks that have one.

    Args:
        of_ranks: Of each rank, seconds from the first gradient to each, by name.
        names: Of all parameters.
    """
    first = of_ranks[0]
    ordered = sorted(first, key=lambda name: first[name])
    ordered += [name for name in names if name not in first]
    ready = _medians(of_ranks)
    backward, before = [], ready.get(ordered[0], 0.0)
    for name in ordered:
        at = ready.get(name, before)
        backward.append(max(0.0, at - before))
        before = max(before, at)
    return ordered, backward


def is_sparse(plan: Plan) -> bool:
    """Whether less than all is sent of some group."""
    return any(merge.method == "sparse" for merge in plan.groups)


def _medians(stamps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, over those in which it had a gradient."""
    return {
        name: statistics.median(times[name] for times in stamps if name in times)
        for name in dict.fromkeys(name for times in stamps for name in times)
    }


def _computed(
    settings: Settings,
    backward: Sequence[float],
    sizes: Sequence[int],
    names: tuple[str, ...],
    methods: Sequence[Method],
) -> dict[str, Any]:
    """The plan that was asked for; the best that sends all, if that is to be compared with it."""
    assert isinstance(settings.plan, str)
    optimal = settings.plan == "optimal"
    made = _RULES[settings.plan](backward, sizes, methods if optimal else methods[0])
    others = {
        f"{name}, {method.name}": _RULES[name](backward, sizes, method).finish_seconds
        for method in methods
        for name in _ALTERNATIVES
    }
    found: dict[str, Any] = {
        "plan": replace(made, names=names).to_json(),
        "dense": None,
        "alternatives": others,
    }
    dense = [method for method in methods if method.name != "sparse"]
    if optimal and dense and len(dense) < len(methods):
        found["dense"] = replace(plan(backward, sizes, dense), names=names).to_json()
        found["sparse_seconds"] = min(others[f"{name}, sparse"] for name in _ALTERNATIVES)
    return found


def _first_merges(settings: Settings, sizes_bytes: Sequence[int]) -> tuple[Merge, ...]:
    """The groups that a session begins with: those asked for, or one until times are known."""
    rule = settings.plan
    if isinstance(rule, Plan):
        check_plan_fits(rule, len(sizes_bytes), settings.methods)
        return rule.groups
    if isinstance(rule, int):
        make: Callable[..., Plan] = partial(threshold, size_bytes=rule, element_bytes=1)
    else:
        make = single if rule in MEASURED_RULES else _RULES[rule]
    free = Method(settings.methods[0], lambda size: 0.0, lambda size: 0.0)
    return make([0.0] * len(sizes_bytes), sizes_bytes, free).groups


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
