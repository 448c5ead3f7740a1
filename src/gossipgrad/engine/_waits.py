"""How long a step waits for its partners."""

import math
import time
from collections import deque

from gossipgrad.comm import Channel, Exchange, Outcome

__all__ = ["Waits"]

_REMEMBERED = 32  # durations of transfers
_ENOUGH = 5  # of them, before a wait for a part depends on them
_UNKNOWN_SECONDS = 300.0  # until then


class Waits:
    """Waits of a step: for a partner that is not ready, and for parts that are on the way.

    All waits of a step for partners that are not ready take at most `patience_seconds` together.
    After that the partner is silent, and this rank tells the others so: no step of any rank waits
    for it until a message of it arrives. A partner that is ready is not late: its parts get the
    longest time that parts took recently, on any link, and `patience_seconds` more.

    1. Rank 3 sleeps for a minute. Rank 0 waits for it for a second, and goes to its next round.
    2. In that, rank 1 waits for rank 0, which comes a second late, and in the one after for rank 3.
    3. If rank 0 had told nobody, each rank would wait for rank 3, one after the other, and those
       who wait would hold up the others.
    """

    def __init__(self, channel: Channel, patience_seconds: float) -> None:
        self._channel = channel
        self._patience_seconds = patience_seconds
        self._since_seconds: float | None = None  # when this step began to wait
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)

    def begin_step(self) -> None:
        """Begin a step, which has not waited yet."""
        self._since_seconds = None

    @property
    def transfer_seconds(self) -> float:
        """How long a part may be on the way."""
        known = len(self._durations) >= _ENOUGH
        return (max(self._durations) if known else _UNKNOWN_SECONDS) + self._patience_seconds

    def take(self, exchange: Exchange) -> Outcome:
        """Wait for a part as long as this step may."""
        if self._since_seconds is None:
            self._since_seconds = time.perf_counter()
        outcome = self._channel.take(exchange, 0.0)
        while outcome is Outcome.LATE and (left := self._left_seconds(exchange)) > 0:
            outcome = self._channel.take(exchange, left)
        if outcome is Outcome.LATE and exchange.agreed_seconds is None:
            assert exchange.peer is not None
            self._channel.report_silent(exchange.peer)
        if outcome is Outcome.DELIVERED and exchange.agreed_seconds is not None:
            assert exchange.finished_seconds is not None
            self._durations.append(exchange.finished_seconds - exchange.agreed_seconds)
        return outcome

    def _left_seconds(self, exchange: Exchange) -> float:
        now = time.perf_counter()
        if exchange.agreed_seconds is not None:
            return exchange.agreed_seconds + self.transfer_seconds - now
        if exchange.peer in self._channel.silent:
            return -math.inf
        assert self._since_seconds is not None
        return self._since_seconds + self._patience_seconds - now
