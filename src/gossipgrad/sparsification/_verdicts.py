"""What came of plans that competed, and what is said of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from gossipgrad.planning import Plan

__all__ = ["Verdict", "compresses", "kind_of", "refusal_by_prediction"]


def kind_of(plan: Plan) -> str:
    """`"sparse"` if all groups are, `"dense"` if none is, else `"mixed"`.

    Where there is one group alone, with `"one "` before it.
    """
    sparse = {group.method == "sparse" for group in plan.groups}
    kind = "mixed" if len(sparse) > 1 else "sparse" if True in sparse else "dense"
    return f"one {kind}" if len(plan.groups) == 1 else kind


def compresses(plan: Plan) -> bool:
    """Whether less than all is sent of some group."""
    return any(group.method == "sparse" for group in plan.groups)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a contest.

    Attributes:
        plans: That competed, as they were predicted before it.
        seconds: Of a step with each.
        winner: The place of the one that stays.
    """

    plans: tuple[Plan, ...]
    seconds: tuple[float, ...]
    winner: int

    @property
    def plan(self) -> Plan:
        """The one that stays."""
        return self.plans[self.winner]

    @property
    def predicted(self) -> bool:
        """Whether it is the one that was predicted to be the fastest."""
        return self.plan is min(self.plans, key=lambda plan: plan.finish_seconds)

    @property
    def refusal(self) -> str | None:
        """Why nothing is compressed; None if something is, or no plan would have."""
        compress = [at for at, plan in enumerate(self.plans) if compresses(plan)]
        if not compress or compresses(self.plan):
            return None
        best = min(compress, key=lambda at: self.seconds[at])
        close = self.seconds[best] < self.seconds[self.winner]
        return (
            f"nothing is compressed: measured in the run, a step takes "
            f"{_ms(self.seconds[self.winner])} ms so, and {_ms(self.seconds[best])} ms at best "
            f"with compression{', which gains too little' if close else ''} (gradients were "
            f"predicted to be together after {_ms(self.plan.finish_seconds)} and "
            f"{_ms(self.plans[best].finish_seconds)} ms)"
        )

    def __str__(self) -> str:
        """Of all plans, what a step takes and what was predicted."""
        return "; ".join(
            f"{_told(plan)}, {_ms(taken)} ms a step, gradients "
            f"predicted to be together after {_ms(plan.finish_seconds)} ms"
            for plan, taken in zip(self.plans, self.seconds, strict=True)
        )


def refusal_by_prediction(dense: Plan, alternatives: Mapping[str, float]) -> str:
    """Why nothing is compressed where no plans competed."""
    sparse_seconds = min(alternatives["single, sparse"], alternatives["greedy, sparse"])
    return (
        f"nothing is compressed: gradients are predicted to be together after "
        f"{_ms(dense.finish_seconds)} ms, with every group sparse after {_ms(sparse_seconds)} ms "
        "at best"
    )


def _told(plan: Plan) -> str:
    kind, count = kind_of(plan), len(plan.groups)
    return f"{kind} group" if count == 1 else f"{kind}, {count} groups"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
