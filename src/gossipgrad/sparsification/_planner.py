"""Which plan a session follows: the one asked for, or one measured in its first steps."""

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gossipgrad.comm import Group
from gossipgrad.planning import Group as Merge
from gossipgrad.planning import Plan
from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._costs import Costs, measure_costs
from gossipgrad.sparsification._drift import DensityWatch, Drift
from gossipgrad.sparsification._rules import alternatives, merges_without_times, planned
from gossipgrad.sparsification._settings import Settings, check_plan_fits

__all__ = ["Planner"]

logger = logging.getLogger("gossipgrad")

_WARM_ROUNDS = 2  # take memory, start threads, fill caches
_MEASURED_ROUNDS = 5
_OTHER_DENSITY = 1.5  # by what factor it must change for costs to be others
_REMEMBERED_ROUNDS = 100  # whose times a look at drift compares


class Planner:
    """The plan of a session, agreed on by all ranks.

    A plan that needs measurements begins as one group: selection comes after the last gradient
    then, and the times of gradients are those of backward alone. After a few rounds of that, the
    ranks measure selection and collectives together, rank 0 computes the plan from medians over
    rounds and ranks, and all change to it between two rounds.

    Args:
        settings: Of the session.
        sizes_bytes: Of the parameters, in the order in which backward is expected to finish them.
        group: Whose ranks agree.

    Attributes:
        merges: The groups to begin with.
        plan: What was computed or given; None for a rule that needs no times, and until then.
        alternatives: Predicted seconds of the rules, by name and method.
        refused: Why nothing is compressed, None if something is or nobody asked.
        replans: How often the plan was changed for another.
    """

    def __init__(self, settings: Settings, sizes_bytes: Sequence[int], group: Group) -> None:
        self.plan: Plan | None = settings.plan if isinstance(settings.plan, Plan) else None
        self.merges = _first_merges(settings, sizes_bytes)
        self.alternatives: dict[str, float] = {}
        self.refused: str | None = None
        self.replans = 0
        self._settings = settings
        self._group = group
        self._stamps: list[dict[str, float]] = []
        self._rounds = 0
        self._backward: list[float] | None = None  # in the order of the plan
        self._costs: list[Costs] = []
        self._density = 0.0  # that of these costs
        self._known: dict[float, list[Costs]] = {}
        self._times: deque[list[float]] = deque(maxlen=_REMEMBERED_ROUNDS)
        replan, optimal = settings.replan, settings.plan == "optimal"
        self._drift = Drift(replan) if replan is not None and optimal else None
        used = settings.methods if optimal else settings.methods[:1]
        self._watch = DensityWatch() if replan is not None and "sparse" in used else None

    @property
    def measuring(self) -> bool:
        """Whether a plan is asked for that is not there yet."""
        return self._settings.measures and self.plan is None

    def after_round(self, aggregation: Aggregation) -> None:
        """Notes what a round took, and changes the plan when it is time to; a collective then."""
        if not self._settings.measures:
            return
        self._rounds += 1
        if self.plan is None:
            if self._rounds > _WARM_ROUNDS:
                self._stamps.append(aggregation.stamps())
            if len(self._stamps) == _MEASURED_ROUNDS:
                self._begin(aggregation)
            return
        away = self._watch is not None and not _alike(aggregation.density, self._density)
        if self._watch is not None and self._watch.look_due(away=away):
            self._watch.looked()
            self._again(aggregation)
        elif self._drift is not None and not away:
            self._times.append([made.timing.communicate_seconds for made in aggregation.groups])
            if self._drift.due(self._rounds) and self._drifted(aggregation.sizes):
                self._drift.measured_anew(self._rounds)
                self._known.clear()
                self._again(aggregation)

    def state(self) -> dict[str, Any]:
        """For a session's state: plain values."""
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "backward_seconds": self._backward,
            "stamps": list(self._stamps),  # of which more come
            "rounds": self._rounds,
            "density": self._density,
            "at_once_bytes": self._group.at_once_bytes,
            "alternatives": self.alternatives,
            "refused": self.refused,
            "replans": self.replans,
            "drift": None if self._drift is None else self._drift.state(),
            "watch": None if self._watch is None else self._watch.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave, the same on all ranks but for stamps.

        Costs are measured anew at the next look. Until then messages go the way that was faster.
        """
        self.plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        self._backward, self._stamps = state["backward_seconds"], list(state["stamps"])
        self._rounds, self._density = state["rounds"], state["density"]
        self.alternatives, self.refused = dict(state["alternatives"]), state["refused"]
        self.replans = state["replans"]
        self._costs, self._known = [], {}
        self._group.at_once_bytes = state["at_once_bytes"]
        self._times.clear()
        if self._drift is not None and state["drift"] is not None:
            self._drift.load(state["drift"])
        if self._watch is not None and state["watch"] is not None:
            self._watch.load(state["watch"])

    def _begin(self, aggregation: Aggregation) -> None:
        """The first plan: the order of gradients, their times, and all costs."""
        told = self._group.all_gather_object(_medians(self._stamps))
        self._stamps = []
        first = told[0]  # rank 0's order; where it has no gradient of a parameter, that comes last
        names = sorted(first, key=lambda name: first[name])
        names += [name for name in aggregation.names if name not in first]
        ready = [
            statistics.median(times[name] for times in told if name in times)
            if any(name in times for times in told)
            else 0.0
            for name in names
        ]
        backward, before = [], ready[0]
        for at in ready:
            backward.append(max(0.0, at - before))
            before = max(before, at)
        self._backward = backward
        aggregation.regroup(self.merges, names=names)
        self._measure(aggregation)
        self._take(self._computed(aggregation), aggregation)

    def _again(self, aggregation: Aggregation) -> None:
        """Costs are others than those of the plan: another plan, if it gains enough."""
        assert self.plan is not None
        assert self._backward is not None
        replan = self._settings.replan
        assert replan is not None
        self._measure(aggregation)
        told = self._computed(aggregation)
        methods = [costs.method() for costs in self._costs]
        spans = self.plan.timeline(self._backward, aggregation.sizes, methods)
        now_seconds = max(span.end_seconds for span in spans)
        new = Plan.from_json(told["plan"])
        needed_seconds = (1 - replan.gain) * now_seconds
        if new.groups != self.plan.groups and new.finish_seconds < needed_seconds:
            self.replans += 1
            self._take(told, aggregation)

    def _measure(self, aggregation: Aggregation) -> None:
        """The costs at this density, measured unless they are known; a collective then."""
        self._times.clear()
        now = aggregation.density
        known = next((density for density in self._known if _alike(density, now)), None)
        if known is None:
            known = now
            self._known[now] = measure_costs(
                self._settings,
                self._group,
                aggregation.device,
                aggregation.dtype,
                elements=sum(aggregation.sizes),
                tensors=len(aggregation.sizes),
                density=now,
                known=[costs for measured in self._known.values() for costs in measured],
            )
        self._density, self._costs = known, self._known[known]
        for costs in self._costs:
            if costs.at_once_bytes is not None:
                self._group.at_once_bytes = costs.at_once_bytes

    def _computed(self, aggregation: Aggregation) -> dict[str, Any]:
        """What rank 0 computes, on all ranks."""
        told: dict[str, Any] = {}
        if self._group.rank == 0:
            assert self._backward is not None
            sizes, methods = aggregation.sizes, [costs.method() for costs in self._costs]
            assert isinstance(self._settings.plan, str)
            found = planned(self._settings.plan, self._backward, sizes, methods)
            told = {
                "plan": replace(found, names=tuple(aggregation.names)).to_json(),
                "alternatives": alternatives(self._backward, sizes, methods),
            }
        return self._group.broadcast_object(told)

    def _take(self, told: dict[str, Any], aggregation: Aggregation) -> None:
        self.plan = Plan.from_json(told["plan"])
        self.alternatives = dict(told["alternatives"])
        aggregation.regroup(self.plan.groups)
        refused = self.refused
        self.refused = None
        asked = self._settings.plan == "optimal" and "sparse" in self._settings.methods
        if asked and all(merge.method != "sparse" for merge in self.plan.groups):
            single_seconds = self.alternatives["single, sparse"]
            self.refused = (
                f"nothing is compressed: gradients are predicted to be together after "
                f"{1e3 * self.plan.finish_seconds:.3g} ms, with every group sparse after "
                f"{1e3 * min(single_seconds, self.alternatives['greedy, sparse']):.3g} ms at best"
            )
            if refused is None and self._group.rank == 0:
                logger.warning("%s", self.refused)

    def _drifted(self, sizes: Sequence[int]) -> bool:
        """Whether what groups took in the last rounds is not what was predicted; a collective."""
        assert self._drift is not None
        assert self.plan is not None
        mine = [statistics.median(each) for each in zip(*self._times, strict=True)]
        told = self._group.all_gather_object([mine, bool(self._costs)])
        self._times.clear()
        if not all(known for _, known in told):
            return True  # predictions were lost in a resume
        # Who comes last does not wait: its times are those of the network.
        measured = [min(each) for each in zip(*(times for times, _ in told), strict=True)]
        methods = {costs.name: costs.method() for costs in self._costs}
        predicted = [
            float(methods[merge.method].communicate_seconds(sum(sizes[merge.start : merge.stop])))
            for merge in self.plan.groups
        ]
        return self._drift.look(self._rounds, measured, predicted)


def _alike(density: float, other: float) -> bool:
    """Whether what is sent at one costs about as much as at the other."""
    return max(density, other) <= _OTHER_DENSITY * min(density, other)


def _first_merges(settings: Settings, sizes_bytes: Sequence[int]) -> tuple[Merge, ...]:
    """The groups that a session begins with: those asked for, or one until times are known."""
    if isinstance(settings.plan, Plan):
        check_plan_fits(settings.plan, len(sizes_bytes), settings.methods)
        return settings.plan.groups
    return merges_without_times(settings.plan, sizes_bytes, settings.methods[0])


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the rounds in which a parameter had a gradient, if there were any."""
    names = dict.fromkeys(name for stamps in rounds for name in stamps)
    return {
        name: statistics.median(stamps[name] for stamps in rounds if name in stamps)
        for name in names
    }
