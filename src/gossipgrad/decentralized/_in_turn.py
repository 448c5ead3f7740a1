"""One round after the other on a rank's own link."""

import time
from collections.abc import Callable, Sequence

from gossipgrad.comm import Ticket

__all__ = ["RoundBefore"]

_PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.0005


class RoundBefore:
    """What was sent in the round before, and leaves before this one does.

    Two rounds that leave at once share the link, the partner of the first waits longer, and soon
    everyone waits for someone. What a partner does not take in holds up the next round, and the
    words for other ranks behind it, for two seconds at most.

    Args:
        tickets: Of all messages of that round.
    """

    def __init__(self, tickets: Sequence[Ticket] = ()) -> None:
        self._pending = list(tickets)
        self._until_seconds: float | None = None

    def then(self, filled: Callable[[], None] | None) -> Callable[[], None] | None:
        """What a message of this round waits for: that round to leave, and its own buffer.

        Args:
            filled: Returns when the buffer is filled; None if it is.
        """
        if self._left():
            return filled

        def ready() -> None:
            if self._until_seconds is None:  # all messages of a round share one wait
                self._until_seconds = time.perf_counter() + _PATIENCE_SECONDS
            while not self._left() and time.perf_counter() < self._until_seconds:
                time.sleep(_LOOK_SECONDS)
            if filled is not None:
                filled()

        return ready

    def _left(self) -> bool:
        self._pending = [ticket for ticket in self._pending if not ticket.done]
        return not self._pending
