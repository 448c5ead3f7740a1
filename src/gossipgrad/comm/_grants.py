"""Permission to send: requested by one end, granted when the receiver's link is free."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

from gossipgrad.comm._ledger import Ledger
from gossipgrad.comm._wire import Kind

__all__ = ["Grants"]

_LOOK_SECONDS = 0.1  # how often a wait checks whether the link is idle


class Grants:
    """Delays a part until its receiver has received the rounds before.

    Where an exchange takes longer than the compute, ranks that are out of step send into links that
    still carry the round before. Both transfers then take longer, their receivers send later, and
    the ranks never get back into step. So a delayed rank asks before it sends. The receiver grants
    it when nothing is in flight to it, or when it has reached that round itself.

    Args:
        changed: The channel's condition; the caller holds its lock, except in `turn`.
        ledgers: The state of the link to each peer.
        say: Sends a peer `ASK` or `GO` for the round at a position, unless that is of another era.
    """

    def __init__(
        self,
        changed: threading.Condition,
        ledgers: Mapping[int, Ledger],
        say: Callable[[Kind, int, int], None],
    ) -> None:
        self._changed = changed
        self._ledgers = ledgers
        self._say = say
        self._asked: dict[int, int] = {}
        self._granted: defaultdict[int, int] = defaultdict(lambda: -1)
        self._last = -1
        self._free = -1  # up to this position no part waits

    def turn(self, peer: int, at: int) -> Callable[[float], None]:
        """Return a function that asks for permission and waits for it; not for a void round."""
        return partial(self._wait, peer, at)

    def hear(self, kind: Kind, peer: int, at: int) -> None:
        """Handle a peer's request or grant.

        A peer that asks has reached that round itself: where the two send to each other, its grant
        would arrive behind its own part.
        """
        if kind is Kind.ASK:
            self._asked[peer] = at
        self._granted[peer] = max(self._granted[peer], at)

    def release(self, last: int) -> None:
        """Let all parts up to a position leave: a message to peers waits behind them."""
        self._free = max(self._free, last)
        self._changed.notify_all()

    def answer(self, last: int) -> None:
        """Grant requests for rounds up to `last`, and for the next one if no part is awaited.

        Called after messages arrived; waiting parts then check their grants.
        """
        self._last = last
        self._changed.notify_all()
        for peer, at in list(self._asked.items()):
            if at <= last or (at == last + 1 and not self._is_busy()):
                del self._asked[peer]
                self._say(Kind.GO, peer, at)

    def _wait(self, peer: int, at: int, timeout_seconds: float) -> None:
        deadline = time.perf_counter() + timeout_seconds
        with self._changed:
            if timeout_seconds > 0 and self._must_wait(peer, at):
                self._say(Kind.ASK, peer, at)
            while (left := deadline - time.perf_counter()) > 0 and self._must_wait(peer, at):
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _must_wait(self, peer: int, at: int) -> bool:
        to = self._ledgers[peer]
        if to.gone is not None or at < to.past:
            return False
        if at < self._last or at <= self._free:  # a later round or a message waits behind it
            return False
        return max(self._granted[peer], to.latest) < at  # it sends that round itself

    def _is_busy(self) -> bool:
        return any(ledger.open for ledger in self._ledgers.values())
