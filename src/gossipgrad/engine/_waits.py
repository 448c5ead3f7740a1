"""How long a step waits for each partner, by recent arrivals."""

from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median

from gossipgrad.comm import Exchange, Outcome

__all__ = ["Deadlines", "Patience"]

_REMEMBERED = 32  # arrivals per link, and of all
_ENOUGH = 5  # arrivals before the wait adapts
_MAD_TO_DEVIATION = 1.4826  # for a normal distribution


class Deadlines:
    """Waits that adapt to each link: median + `deviations` x MAD of its recent arrivals.

    MAD is the median absolute deviation from the median, scaled to the standard deviation of a
    normal distribution. Unlike the standard deviation, it does not grow with a few very late
    arrivals. So a slow link gets the time that it needs, and a prompt link that falls silent does
    not block a step for long. Partners rotate, so a link with fewer than five arrivals takes those
    of all links.

    Args:
        floor_seconds: The shortest wait.
        ceiling_seconds: The longest wait, and the wait before five parts have arrived.
        deviations: How many MAD beyond the median a step waits.

    Example:
        >>> deadlines = Deadlines(floor_seconds=0.1, ceiling_seconds=60.0, deviations=6.0)
        >>> deadlines.of(1)
        60.0
        >>> for seconds in (2.0, 2.1, 1.9, 2.0, 30.0):
        ...     deadlines.note(1, seconds)
        >>> round(deadlines.of(1), 2)
        2.89
    """

    def __init__(self, *, floor_seconds: float, ceiling_seconds: float, deviations: float) -> None:
        self.ceiling_seconds = ceiling_seconds
        self._floor_seconds = floor_seconds
        self._deviations = deviations
        self._of_all: deque[float] = deque(maxlen=_REMEMBERED)
        self._arrivals: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )

    def note(self, peer: int, seconds: float) -> None:
        """Record how long after this rank's own part a peer's arrived, 0 if it was earlier."""
        self._arrivals[peer].append(seconds)
        self._of_all.append(seconds)

    def note_all(self, peer: int | None, exchanges: Iterable[Exchange]) -> None:
        """Record the delay of the last of a round's parts, if any arrived."""
        taken = [
            (each.finished_seconds or each.posted_seconds) - each.posted_seconds
            for each in exchanges
            if each.outcome is Outcome.DELIVERED
        ]
        if peer is not None and taken:
            self.note(peer, max(taken))

    def of(self, peer: int | None) -> float:
        """Return how long to wait for a peer now, in seconds."""
        arrivals = () if peer is None else self._arrivals[peer]
        if len(arrivals) < _ENOUGH:
            arrivals = self._of_all
        if len(arrivals) < _ENOUGH:
            return self.ceiling_seconds
        usual = median(arrivals)
        deviation = _MAD_TO_DEVIATION * median(abs(each - usual) for each in arrivals)
        wait = max(self._floor_seconds, usual + self._deviations * deviation)
        return min(self.ceiling_seconds, wait)


class Patience:
    """A budget for the waits of a step: unsuccessful waits together last as long as the longest.

    A wait that ended with the part is normal for the link, and does not reduce the next one.

    Example:
        >>> patience = Patience()
        >>> patience.spend(4.0)
        >>> patience.left(10.0), patience.left(3.0)
        (6.0, 0.0)
        >>> patience.renew()
        >>> patience.left(10.0)
        10.0
    """

    def __init__(self) -> None:
        self._spent_seconds = 0.0

    def renew(self) -> None:
        """Reset the budget for the next step."""
        self._spent_seconds = 0.0

    def left(self, seconds: float) -> float:
        """Return how much of a wait of so many seconds is left."""
        return max(0.0, seconds - self._spent_seconds)

    def spend(self, seconds: float) -> None:
        """Record an unsuccessful wait of this step."""
        self._spent_seconds += seconds
