"""A plan against a dense one, in real steps."""

import statistics

from gossipgrad.comm import Group

__all__ = ["Comparison"]

_SETTLE_ROUNDS = 1  # of a plan in the comparison, before rounds count
_COMPARED_ROUNDS = 3
_TURNS = 4  # of the plan, of dense, of the plan, of dense
_FAR_SLOWER = 2.0  # times the step of the plan: dense is not tried, or only for one step


class Comparison:
    """A plan and a dense one, in turns of a few steps; all ranks decide alike.

    What counts is the median time from the end of a round to the end of the next: what a step takes
    its user. Ranks wait for each other, so the median over them is what all of them took.

    Attributes:
        seconds: Of a step, by name, once it is over; without `"dense"` where that is far slower.
        over: Whether it is.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._turn = self._round = 0
        self._periods: dict[str, list[float]] = {"plan": [], "dense": []}
        self.seconds: dict[str, float] = {}
        self.over = False

    @property
    def dense_next(self) -> bool:
        """Whether the next round is dense."""
        return self._turn % 2 == 1

    def note(self, period_seconds: float, later_seconds: float) -> None:
        """Takes in a round, and how much longer dense is predicted to take; at times collective."""
        name = "dense" if self.dense_next else "plan"
        self._round += 1
        if self._round > _SETTLE_ROUNDS:
            self._periods[name].append(period_seconds)
        elif self._turn == 1:
            # The first dense step.
            usual = self._agreed(statistics.median(self._periods["plan"]))
            if self._agreed(period_seconds) > 2 * _FAR_SLOWER * usual:
                self.seconds, self.over = {"plan": usual}, True
        if self._round < _SETTLE_ROUNDS + _COMPARED_ROUNDS:
            return
        if self._turn == 0:
            usual = self._agreed(statistics.median(self._periods["plan"]))
            if later_seconds > (_FAR_SLOWER - 1) * usual:
                self.seconds, self.over = {"plan": usual}, True
        self._turn, self._round = self._turn + 1, 0
        if self._turn == _TURNS:
            self.seconds = {n: self._agreed(statistics.median(p)) for n, p in self._periods.items()}
            self.over = True

    def _agreed(self, seconds: float) -> float:
        return statistics.median(self._group.all_gather_object(seconds))
