"""A contest of plans in real rounds: what costs measured one by one cannot tell."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

__all__ = ["Contest", "Told"]

_SETTLE_ROUNDS = 1  # take memory and fill caches after a change of groups
_MEASURED_ROUNDS = 2
_SWEEPS = 4
_ALL_SWEEPS = 2  # that have all plans, and the others those that are close
_CLEARLY = 1.25  # a plan that takes longer by this after these needs no other
_RIVALS = 2  # that go on then
_FAR = 2.0  # a rival whose first round takes longer by this goes no further

Told = list[list[float | None]]
"""Of each plan, the median seconds of its rounds and of its periods; None where there are none."""


class Contest:
    """Which plan is used in the next round, and which is the fastest in the end.

    Plans are used in turn: a round to settle, then two that are measured. Four sweeps go from the
    first plan to the last and back, so that a plan at the end has four in a row. What changes
    steadily meanwhile, in the network or in the machine, is the same for all, and what disturbs
    some rounds on end, as other programs do, is seldom all that was measured of one plan: of bursts
    of ten rounds, turns as short as these halve the wrong verdicts that turns of four have.

    A rival whose first round takes over twice as long as those of the first plan is dropped at
    once; after the second sweep all that take over a quarter longer than the fastest, and all but
    the two fastest rivals, or the fastest and one that is not lossy where else all would be. So two
    plans share at most 21 rounds, three 33 and five 45. A rival that is dropped at once costs that
    round, however long it is. One that loses later costs the time of about eight rounds at most,
    six that take up to twice as long and six that take up to a quarter longer, if its rounds are
    about as long as its first.

    The time of a plan is the median of its periods, from the end of one round to the end of the
    next: what a step takes its user, with all that collectives and selection take away from the
    rest of it. Pauses for evaluation are few, and leave a median as it is. Over ranks it is the
    median, too: they wait for each other in each round, so all measure the same time, and the one
    in the middle has the least noise. A first round is judged without the rest of the step, and by
    the rank with the shortest, which came last and did not wait: one pause drops no plan.

    The first plan has to be beaten by the gain, and a lossy one has to beat those that are not by
    as much: what it leaves for later rounds costs accuracy.

    All ranks go through the same rounds, and agree on what these took: so they go on alike.

    Args:
        plans: How many there are, two or more.
        gain: Share of the time of a plan that another must save to beat it.
        lossy: Places of the plans that do not send all.

    Attributes:
        running: The plan for the next round.
        winner: The fastest; None until it is known.
        seconds: What a step takes with each plan, None before that is known; of one that was
            dropped at once, by its first round.
    """

    def __init__(
        self, plans: int, *, gain: float | int, lossy: Collection[int] = frozenset()
    ) -> None:
        self.running = 0
        self.winner: int | None = None
        self.seconds: list[float | None] = [None] * plans
        self._gain, self._lossy = gain, lossy
        self._rounds: list[list[float]] = [[] for _ in range(plans)]
        self._periods: list[list[float]] = [[] for _ in range(plans)]
        self._living = list(range(plans))
        self._to_come = self._living[1:]  # in this sweep
        self._sweeps = 1
        self._settling = _SETTLE_ROUNDS
        self._measured = 0  # rounds of the plan that runs, in this sweep

    @staticmethod
    def most_rounds(plans: int) -> int:
        """How many rounds a contest of so many plans takes at most."""
        turn = _SETTLE_ROUNDS + _MEASURED_ROUNDS
        last = _SWEEPS - _ALL_SWEEPS
        turns = _ALL_SWEEPS * plans + last * min(plans, 1 + _RIVALS)
        return turns * turn - (_SWEEPS - 1) * _SETTLE_ROUNDS

    def round_over(self, round_seconds: float | int, period_seconds: float | int) -> bool:
        """Takes in a round of the plan that runs; whether the ranks are to agree now.

        Args:
            round_seconds: From its first gradient to its end.
            period_seconds: From the end of the round before to its end.
        """
        at = self.running
        if self._settling:
            self._settling -= 1
            if at == 0 or self._rounds[at]:
                return False
            self._rounds[at].append(round_seconds)
            return True
        if at == 0:
            self._rounds[0].append(round_seconds)
        self._periods[at].append(period_seconds)
        self._measured += 1
        if self._measured < _MEASURED_ROUNDS:
            return False
        if not self._to_come:
            return True
        self._turn_to(self._to_come.pop(0))
        return False

    def told(self) -> Told:
        """What this rank has measured, for the others."""
        return [
            [statistics.median(each) if each else None for each in of_plan]
            for of_plan in zip(self._rounds, self._periods, strict=True)
        ]

    def agree(self, told: Sequence[Told]) -> None:
        """Goes on by what `told` gave on each rank: a plan is dropped, a sweep begins, or ends."""
        at = self.running
        if not self._measured:
            first, usual = (_over(min, told, place, 0) for place in (at, 0))
            assert first is not None
            assert usual is not None
            if first <= _FAR * usual:
                return
            period = _over(statistics.median, told, 0, 1)
            assert period is not None
            self.seconds[at] = period + first - usual
            self._living.remove(at)
            if self._to_come:
                self._turn_to(self._to_come.pop(0))
                return
        self._end_sweep(told)

    def _end_sweep(self, told: Sequence[Told]) -> None:
        seconds = {}
        for at in self._living:
            taken = self.seconds[at] = _over(statistics.median, told, at, 1)
            assert taken is not None
            seconds[at] = taken
        best = min(seconds, key=lambda at: seconds[at])
        if self._sweeps >= _ALL_SWEEPS:
            self._living = self._close(seconds, seconds[best])
        if len(self._living) == 1 or self._sweeps == _SWEEPS:
            self.winner = self.running = self._choice(seconds, best)
            return
        self._sweeps += 1
        self._living.reverse()
        self._to_come = self._living[1:]
        self._turn_to(self._living[0])

    def _close(self, seconds: Mapping[int, float], best_seconds: float) -> list[int]:
        """Those that may still win, in their order."""
        most_seconds = max(_CLEARLY, 1 / (1 - self._gain)) * best_seconds
        close = [at for at in self._living if seconds[at] <= most_seconds]
        rivals = sorted((at for at in close if at), key=lambda at: seconds[at])
        kept = rivals[:_RIVALS]
        whole = [at for at in rivals if at not in self._lossy]
        if whole and {0, *kept} <= {*self._lossy}:
            kept[-1] = whole[0]
        return [at for at in close if at in {0, *kept}]

    def _choice(self, seconds: Mapping[int, float], best: int) -> int:
        """The fastest, if it beats those that it has to."""

        def beats(at: int, other: int) -> bool:
            return seconds[at] < (1 - self._gain) * seconds[other]

        choice = best if 0 not in seconds or beats(best, 0) else 0
        whole = [at for at in seconds if at not in self._lossy]
        if choice in self._lossy and whole:
            other = min(whole, key=lambda at: seconds[at])
            return choice if beats(choice, other) else other
        return choice

    def _turn_to(self, at: int) -> None:
        self._settling = 0 if at == self.running else _SETTLE_ROUNDS
        self.running, self._measured = at, 0


def _over(
    how: Callable[[Iterable[float]], float], told: Sequence[Told], at: int, which: int
) -> float | None:
    """A time of a plan over the ranks that have one."""
    times = [of[at][which] for of in told]
    known = [each for each in times if each is not None]
    return how(known) if known else None
