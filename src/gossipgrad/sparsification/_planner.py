"""Which plan a session follows: the one asked for, or one measured in its first steps."""

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from gossipgrad.comm import Group
from gossipgrad.planning import Group as Merge
from gossipgrad.planning import Plan
from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._backward import backward_of, medians
from gossipgrad.sparsification._contest import Contest
from gossipgrad.sparsification._costs import Costs, measure_costs
from gossipgrad.sparsification._drift import DensityWatch, Drift
from gossipgrad.sparsification._rivals import Rivals, rivals_of
from gossipgrad.sparsification._rules import alternatives, merges_without_times, planned
from gossipgrad.sparsification._settings import Settings, check_plan_fits
from gossipgrad.sparsification._verdicts import compresses, refusal_by_prediction

__all__ = ["Planner"]

logger = logging.getLogger("gossipgrad")

_WARM_ROUNDS = 2  # take memory, start threads, fill caches
_MEASURED_ROUNDS = 5
_OTHER_DENSITY = 1.5  # by what factor it must change for costs to be others
_REMEMBERED_ROUNDS = 100  # whose times a look at drift compares
_BEFORE_CONTESTS = {"rivals": Rivals(None).state(), "usual": None, "learns_usual": False}


class Planner:
    """The plan of a session, agreed on by all ranks.

    A plan that needs measurements begins as one group: selection comes after the last gradient
    then, and the times of gradients are those of backward alone. After a few rounds of that, the
    ranks measure selection and collectives together, rank 0 computes the plan from medians over
    rounds and ranks, and all change to it between two rounds.

    The optimal plan has rivals then: the best that sends all and the best whose groups are all
    sparse, and those of one group, if they are predicted to take up to three times as long. All are
    used in turn, and the fastest stays: see `Contest`. It is put off where the density will be
    another before the end. A plan that follows, after drift or at another density, has to be
    expected to gain, by what is predicted and what steps took beyond that in contests before; then
    it competes with the one that is there. A look in the middle of a contest ends it, and another
    begins.

    Args:
        settings: Of the session.
        sizes_bytes: Of the parameters, in the order in which backward is expected to finish them.
        group: Whose ranks agree.

    Attributes:
        merges: The groups to begin with.
        plan: The one in use, which was computed or given; None for a rule that needs no times, and
            until then.
        alternatives: Predicted seconds of the rules, by name and method.
        rivals: What competes with it, or has.
        refused: Why nothing is compressed, None if something is or nobody asked; during a contest,
            as it was before.
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
        self._contests = optimal and replan is not None and replan.contest
        self.rivals = Rivals(replan if self._contests else None)
        self._decided: Plan | None = None  # the last that was meant to stay
        self._usual: list[float] | None = None  # what groups take that had won a contest
        self._learns_usual = False
        self._ended_seconds = perf_counter()  # when the last round and all that followed had ended

    @property
    def measuring(self) -> bool:
        """Whether a plan is asked for that is not there yet."""
        return self._settings.measures and self.plan is None

    @property
    def lasting(self) -> Plan | None:
        """What a state goes on with: the plan in use, or the first of those that compete."""
        return self.rivals.first or self.plan

    def after_round(self, aggregation: Aggregation) -> None:
        """Notes what a round took, and changes the plan when it is time to; a collective then."""
        if not self._settings.measures:
            return
        took = _took(aggregation, self._ended_seconds)
        self._rounds += 1
        if self.plan is None:
            if self._rounds > _WARM_ROUNDS:
                self._stamps.append(aggregation.stamps())
            if len(self._stamps) == _MEASURED_ROUNDS:
                self._begin(aggregation)
        else:
            self._look(aggregation, took)
        self._ended_seconds = perf_counter()

    def state(self) -> dict[str, Any]:
        """For a session's state: plain values."""
        return {
            "plan": None if self.lasting is None else self.lasting.to_json(),
            "decided": None if self._decided is None else self._decided.to_json(),
            "backward_seconds": self._backward,
            "stamps": list(self._stamps),  # of which more come
            "rounds": self._rounds,
            "density": self._density,
            "at_once_bytes": self._group.at_once_bytes,
            "alternatives": self.alternatives,
            "rivals": self.rivals.state(),
            "usual": self._usual,
            "learns_usual": self._learns_usual,
            "refused": self.refused,
            "replans": self.replans,
            "drift": None if self._drift is None else self._drift.state(),
            "watch": None if self._watch is None else self._watch.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave, the same on all ranks but for stamps.

        Costs are measured anew at the next look. Until then messages go the way that was faster. A
        contest that was under way begins anew, with the groups of its first plan. States of before
        there were contests know of none.
        """
        state = {**_BEFORE_CONTESTS, "decided": state["plan"], **state}
        self.plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        self._decided = None if state["decided"] is None else Plan.from_json(state["decided"])
        self._backward, self._stamps = state["backward_seconds"], list(state["stamps"])
        self._rounds, self._density = state["rounds"], state["density"]
        self.alternatives, self.refused = dict(state["alternatives"]), state["refused"]
        self.replans = state["replans"]
        self._costs, self._known = [], {}
        self._group.at_once_bytes = state["at_once_bytes"]
        self._usual, self._learns_usual = state["usual"], state["learns_usual"]
        self._times.clear()
        if self._drift is not None and state["drift"] is not None:
            self._drift.load(state["drift"])
        if self._watch is not None and state["watch"] is not None:
            self._watch.load(state["watch"])
        self.rivals.load(state["rivals"])
        if state["rivals"]["plans"] and not self.rivals.compete:  # nobody does here
            assert self.plan is not None
            self._usual, self._learns_usual = None, False
            self._decide(self.plan)

    def _look(self, aggregation: Aggregation, took: tuple[float, float]) -> None:
        """Whether the plan is to be another, after a round that took this."""
        away = self._watch is not None and not _alike(aggregation.density, self._density)
        if self._watch is not None and self._watch.look_due(away=away):
            self._watch.looked()
            self._again(aggregation)
        elif away:
            pass  # it is for another density, and its times are
        elif self.rivals.compete:
            self._compete(aggregation, took)
        elif self._drift is not None:
            self._times.append(_travelled(aggregation))
            if self._drift.due(self._rounds) and self._drifted(aggregation.sizes):
                self._drift.measured_anew(self._rounds)
                self._known.clear()
                self.rivals.forget()
                self._learns_usual = self._usual is not None
                self._again(aggregation)

    def _begin(self, aggregation: Aggregation) -> None:
        """The first plan: the order of gradients, their times, and all costs."""
        told = self._group.all_gather_object(medians(self._stamps))
        self._stamps = []
        names, self._backward = backward_of(told, aggregation.names)
        aggregation.regroup(self.merges, names=names)
        self._measure(aggregation)
        plans, _ = self._computed(aggregation)
        near = self.rivals.near(plans)
        self._take(near, near[0], aggregation)

    def _again(self, aggregation: Aggregation) -> None:
        """Costs are others than those of the plan: another plan, if it gains enough."""
        assert self.plan is not None
        replan = self._settings.replan
        assert replan is not None
        self.rivals.break_off()
        self._measure(aggregation)
        plans, seconds = self._computed(aggregation)
        if self.rivals.undecided:
            near = self.rivals.near(plans)
            self._take(near, near[0], aggregation)
            return
        bound_seconds = min(plans[0].lower_bound_seconds, seconds)
        now = replace(self.plan, finish_seconds=seconds, lower_bound_seconds=bound_seconds)
        if better := self.rivals.better(now, plans, replan.gain):
            self._take([now, *better], better[0], aggregation)

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

    def _computed(self, aggregation: Aggregation) -> tuple[list[Plan], float]:
        """What rank 0 computes, on all ranks: the plan that was asked for, and its rivals.

        And how long the one in use takes; 0 where there is none. Processors of two kinds round
        differently, and what each rank computed for itself would be two numbers.
        """
        told: dict[str, Any] = {}
        if self._group.rank == 0:
            assert self._backward is not None
            sizes, methods = aggregation.sizes, [costs.method() for costs in self._costs]
            assert isinstance(self._settings.plan, str)
            plans = [planned(self._settings.plan, self._backward, sizes, methods)]
            if self._contests:
                plans += rivals_of(plans[0], self._backward, sizes, methods)
            now = () if self.plan is None else self.plan.timeline(self._backward, sizes, methods)
            names = tuple(aggregation.names)
            told = {
                "plans": [replace(plan, names=names).to_json() for plan in plans],
                "seconds": max((span.end_seconds for span in now), default=0.0),
                "alternatives": alternatives(self._backward, sizes, methods),
            }
        told = self._group.broadcast_object(told)
        self.alternatives = dict(told["alternatives"])
        return [Plan.from_json(plan) for plan in told["plans"]], told["seconds"]

    def _take(self, plans: Sequence[Plan], favourite: Plan, aggregation: Aggregation) -> None:
        """Lets plans compete; takes the favourite where there is nothing to, or no time."""
        competes = self._contests and len(plans) > 1
        ends = aggregation.density_after(Contest.most_rounds(len(plans)))
        if competes and (ends is None or _alike(ends, self._density)):
            self.rivals.hold(plans)
            self._use(plans[0], aggregation)
            return
        self.rivals.undecided = competes
        self._usual, self._learns_usual = None, False
        self._decide(favourite)
        self._use(favourite, aggregation)

    def _compete(self, aggregation: Aggregation, took: tuple[float, float]) -> None:
        """Goes on with the contest after a round that took this; a collective at times."""
        verdict = self.rivals.after_round(*took, self._group)
        if verdict is None:
            self._use(self.rivals.running, aggregation)
            return
        self._usual, self._learns_usual = None, True
        if self._drift is not None:
            self._drift.begin_anew(self._rounds)
        if not verdict.predicted and self._group.rank == 0:
            logger.info("plans were not as fast as predicted: %s", verdict)
        self._decide(verdict.plan, verdict.refusal or self.refused)
        self._use(verdict.plan, aggregation)

    def _decide(self, plan: Plan, refusal: str | None = None) -> None:
        """This plan stays, until there is reason for another.

        If it compresses nothing though something might be, for the reason given, or by prediction.
        """
        self.replans += self._decided is not None and self._decided.groups != plan.groups
        self._decided = plan
        before, self.refused = self.refused, None
        might = self._settings.plan == "optimal" and "sparse" in self._settings.methods
        if might and not compresses(plan):
            self.refused = refusal or refusal_by_prediction(plan, self.alternatives)
            if before is None and self._group.rank == 0:
                logger.warning("%s", self.refused)

    def _use(self, plan: Plan, aggregation: Aggregation) -> None:
        """Comes last: where memory for groups is short on one rank, all know the same."""
        self.plan = plan
        if plan.groups != aggregation.merges:
            aggregation.regroup(plan.groups)

    def _drifted(self, sizes: Sequence[int]) -> bool:
        """Whether what groups took in the last rounds is not what was expected; a collective.

        That is what was predicted, or what they took in the first look after a contest: who wins
        one does so because, or although, predictions are wrong.
        """
        assert self._drift is not None
        assert self.plan is not None
        mine = [statistics.median(each) for each in zip(*self._times, strict=True)]
        told = self._group.all_gather_object([mine, self._predicted(sizes)])
        self._times.clear()
        # Who comes last does not wait: its times are those of the network.
        measured = [min(each) for each in zip(*(times for times, _ in told), strict=True)]
        if self._learns_usual:
            self._usual, self._learns_usual = measured, False
        expected = self._usual or told[0][1]
        if expected is None:
            return True  # predictions were lost in a resume
        return self._drift.look(self._rounds, measured, expected)

    def _predicted(self, sizes: Sequence[int]) -> list[float] | None:
        """Seconds of the collective of each group, and of adding up; None after a resume."""
        assert self.plan is not None
        methods = {costs.name: costs.method() for costs in self._costs}
        if not methods:
            return None
        return [
            float(methods[merge.method].communicate_seconds(sum(sizes[merge.start : merge.stop])))
            for merge in self.plan.groups
        ]


def _took(aggregation: Aggregation, since_seconds: float) -> tuple[float, float]:
    """Seconds of the round that has just ended, and since the end of the one before."""
    return aggregation.last_seconds, perf_counter() - since_seconds


def _travelled(aggregation: Aggregation) -> list[float]:
    """Seconds of the collective of each group in the last round, and of adding up."""
    return [made.timing.communicate_seconds for made in aggregation.groups]


def _alike(density: float, other: float) -> bool:
    """Whether what is sent at one costs about as much as at the other."""
    return max(density, other) <= _OTHER_DENSITY * min(density, other)


def _first_merges(settings: Settings, sizes_bytes: Sequence[int]) -> tuple[Merge, ...]:
    """The groups that a session begins with: those asked for, or one until times are known."""
    if isinstance(settings.plan, Plan):
        check_plan_fits(settings.plan, len(sizes_bytes), settings.methods)
        return settings.plan.groups
    return merges_without_times(settings.plan, sizes_bytes, settings.methods[0])
