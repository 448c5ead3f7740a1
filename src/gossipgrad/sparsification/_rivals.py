"""Plans that may be faster than the one that is predicted to be, and how they compete."""

from collections.abc import Sequence
from typing import Any

from gossipgrad.comm import Group
from gossipgrad.planning import Method, Plan, plan, single
from gossipgrad.sparsification._contest import Contest
from gossipgrad.sparsification._settings import Replan
from gossipgrad.sparsification._verdicts import Verdict, compresses, kind_of

__all__ = ["Rivals", "rivals_of"]

_NEAR = 3.0  # times the predicted time, within which one may still be the faster


def rivals_of(
    planned: Plan,
    backward_seconds: Sequence[float | int],
    sizes: Sequence[int],
    methods: Sequence[Method],
) -> list[Plan]:
    """The best plans without selection and with nothing else, and those of one group.

    What was measured of methods one by one may be wrong for one of them more than for the other
    where all go on at once. Where ranks share processors, the thread that sends takes its time from
    backward, so that nothing is gained by sending meanwhile, and each group costs.

    Returns:
        No two with the same groups, and none with those that are planned; none where there is no
        choice of methods.
    """
    found = {planned.groups: planned}
    for sparse in (False, True):
        some = [method for method in methods if (method.name == "sparse") is sparse]
        if some and len(some) < len(methods):
            ones = [single(backward_seconds, sizes, method) for method in some]
            one = min(ones, key=lambda each: each.finish_seconds)
            for rival in (plan(backward_seconds, sizes, some), one):
                found.setdefault(rival.groups, rival)
    return list(found.values())[1:]


class Rivals:
    """The contests of a session, and what is expected of plans since.

    A step takes longer than gradients are predicted to take: by the rest of the step, which is the
    same for all plans, and by what was not in the costs, what selection, sums and collectives take
    from each other and from backward. That is another time for each kind of plan, and is known of
    those that have competed. A kind that never has is expected to take as little beyond what is
    predicted as any: it gets its chance. So a plan that has lost is not taken, and does not compete
    again, before predictions change by more than they were wrong.

    Args:
        replan: Of the session; None: no plans compete.

    Attributes:
        undecided: Whether there is a contest to come, once the density lasts for as long.
        seconds: Of a step with the plans of the last contest, by their kind.
    """

    def __init__(self, replan: Replan | None) -> None:
        self.undecided = False
        self.seconds: dict[str, float] = {}
        self._replan = replan
        self._contest: Contest | None = None
        self._plans: list[Plan] = []
        self._extra_seconds: dict[str, float] = {}

    @property
    def compete(self) -> bool:
        """Whether a contest is under way."""
        return self._contest is not None

    @property
    def running(self) -> Plan:
        """The plan for the next round of the contest."""
        assert self._contest is not None
        return self._plans[self._contest.running]

    @property
    def first(self) -> Plan | None:
        """The plan that has to be beaten in the contest that is under way, if one is."""
        return self._plans[0] if self._plans else None

    def near(self, plans: Sequence[Plan]) -> list[Plan]:
        """Those that are expected to be the fastest, that one first, or may be nevertheless."""
        ordered = sorted(plans, key=self._expected_seconds)
        most_seconds = _NEAR * self._expected_seconds(ordered[0])
        return [each for each in ordered if self._expected_seconds(each) <= most_seconds]

    def better(self, now: Plan, plans: Sequence[Plan], gain: float) -> list[Plan]:
        """Those that are expected to save so much of the time of a step, the fastest first."""
        needed_seconds = (1 - gain) * self._expected_seconds(now)
        found = [
            each
            for each in plans
            if each.groups != now.groups and self._expected_seconds(each) < needed_seconds
        ]
        return sorted(found, key=self._expected_seconds)

    def hold(self, plans: Sequence[Plan]) -> None:
        """Begins a contest, in which the first plan has to be beaten."""
        assert self._replan is not None
        self.undecided = False
        self._plans = list(plans)
        lossy = {at for at, plan in enumerate(plans) if compresses(plan)}
        self._contest = Contest(len(plans), gain=self._replan.gain, lossy=lossy)

    def break_off(self) -> None:
        """Ends a contest in which nobody has won yet, if there is one: it is to be held anew."""
        self.undecided = self.undecided or self.compete
        self._contest, self._plans = None, []

    def after_round(
        self, round_seconds: float, period_seconds: float, group: Group
    ) -> Verdict | None:
        """Takes in a round; the verdict, if that was the last. A collective at times."""
        contest = self._contest
        assert contest is not None
        if contest.round_over(round_seconds, period_seconds):
            contest.agree(group.all_gather_object(contest.told()))
        if contest.winner is None:
            return None
        seconds = tuple(each for each in contest.seconds if each is not None)
        verdict = Verdict(tuple(self._plans), seconds, contest.winner)
        self.seconds = {}
        # Of two of a kind the one that won counts, and else the last.
        for at in sorted(range(len(seconds)), key=lambda at: at == contest.winner):
            kind = kind_of(self._plans[at])
            self.seconds[kind] = seconds[at]
            self._extra_seconds[kind] = seconds[at] - self._plans[at].finish_seconds
        self._contest, self._plans = None, []
        return verdict

    def forget(self) -> None:
        """What steps took beyond what was predicted is another time now."""
        self._extra_seconds = {}

    def state(self) -> dict[str, Any]:
        """For a session's state: plain values. A contest begins anew where they are loaded."""
        return {
            "plans": [each.to_json() for each in self._plans],
            "undecided": self.undecided,
            "seconds": self.seconds,
            "extra_seconds": self._extra_seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave."""
        self.undecided, self.seconds = state["undecided"], dict(state["seconds"])
        self._extra_seconds = dict(state["extra_seconds"])
        self._contest, self._plans = None, []
        if state["plans"] and self._replan is not None:
            self.hold([Plan.from_json(each) for each in state["plans"]])

    def _expected_seconds(self, plan: Plan) -> float:
        """Of a step; before the first contest, until its gradients are together."""
        known = self._extra_seconds
        return plan.finish_seconds + known.get(kind_of(plan), min(known.values(), default=0.0))
