"""One round after the other on a rank's own link."""

import time
from collections.abc import Callable, Sequence

from gossipgrad.comm import Ticket

__all__ = ["in_turn"]

_PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.0005


def in_turn(
    filled: Callable[[], None] | None, before: Sequence[Ticket]
) -> Callable[[], None] | None:
    """What a message waits for: its buffer, and the messages of the round before.

    Two rounds that leave at once share the link, the partner of the first waits longer, and soon
    everyone waits for someone. What a partner does not take in holds up the next round for two
    seconds at most.

    Args:
        filled: Returns when the buffer is filled; None if it is.
        before: What was sent in the round before.
    """
    pending = [ticket for ticket in before if not ticket.done]
    if not pending:
        return filled

    def ready() -> None:
        deadline = time.perf_counter() + _PATIENCE_SECONDS
        while not all(ticket.done for ticket in pending) and time.perf_counter() < deadline:
            time.sleep(_LOOK_SECONDS)
        if filled is not None:
            filled()

    return ready
