"""Pacing of consecutive rounds on a rank's own link."""

import threading
import time
from collections.abc import Callable, Sequence

from gossipgrad.comm import Ticket

__all__ = ["RoundBefore"]

_PATIENCE_SECONDS = 2.0
_MOST_PATIENCE_SECONDS = 30.0
_HELD_UP_SECONDS = 0.005  # longer than delays from shared processors
_ROUNDS = 16  # a late rank does not wait itself, and would collide with ranks that do


class RoundBefore:
    """The messages of a round, which must be sent before the next round's.

    Two rounds that are sent together share the link, the partner of the first waits longer, and
    soon every rank waits for another. The same happens where two rounds arrive together: so a rank
    that was delayed by its links, in this round or a few before it, asks its next partner before it
    sends. Each wait ends after two seconds, or twice the duration of the round before if that is
    longer, and never lasts more than thirty.

    Args:
        tickets: The tickets of all messages of that round.
        before: The round before it.
    """

    def __init__(self, tickets: Sequence[Ticket] = (), before: "RoundBefore | None" = None) -> None:
        self._pending = list(tickets)
        self._lock = threading.Lock()  # of `_pending`
        self._begun_seconds = time.perf_counter()
        self._patience_seconds = _PATIENCE_SECONDS
        self._until_seconds: float | None = None
        self._asks_rounds = 0 if before is None else before._asks_rounds

    def end(self, waited_seconds: float) -> None:
        """End that round; this rank waited `waited_seconds` for it after its compute."""
        took = time.perf_counter() - self._begun_seconds
        self._patience_seconds = min(max(_PATIENCE_SECONDS, 2 * took), _MOST_PATIENCE_SECONDS)
        held_up = waited_seconds > _HELD_UP_SECONDS
        self._asks_rounds = _ROUNDS if held_up else max(0, self._asks_rounds - 1)

    def then(
        self,
        filled: Callable[[], None] | None,
        turn: Callable[[float], None] | None = None,
    ) -> Callable[[], None] | None:
        """Return a function that waits for that round's messages, the turn, and the buffer.

        Args:
            filled: Returns when the buffer is filled; None if it is.
            turn: Returns when the partner's link is free, or after so many seconds.
        """
        asks = turn is not None and self._asks_rounds > 0
        if self._last_pending() is None and not asks:
            return filled

        def ready() -> None:  # in the link's thread
            if self._until_seconds is None:  # all messages of a round share one wait
                self._until_seconds = time.perf_counter() + self._patience_seconds
            while (ticket := self._last_pending()) is not None:
                left = self._until_seconds - time.perf_counter()
                if left <= 0 or not ticket.wait(left):
                    break
            if turn is not None and asks:
                turn(self._until_seconds - time.perf_counter())
            if filled is not None:
                filled()

        return ready

    def _last_pending(self) -> Ticket | None:
        """Return the last message that has not left, None if all have; from any thread."""
        with self._lock:
            while self._pending and self._pending[-1].done:
                self._pending.pop()
            return self._pending[-1] if self._pending else None
