"""Permission to send: asked for by one end, granted when the receiver's link is free."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

from gossipgrad.comm._ledger import Ledger
from gossipgrad.comm._wire import Kind

__all__ = ["Grants"]

_LOOK_SECONDS = 0.1  # how often a wait looks whether it has become idle


class Grants:
    """Lets a part wait until its receiver has taken in the rounds before.

    Where an exchange takes longer than the compute, ranks that are out of step send into links on
    which the round before is still coming: both take longer, those that await them send later, and
    nobody ever gets back into step. So one that was held up asks before it sends, and gets a go
    when nothing is on its way to the receiver, or the receiver has come to that round itself.

    Args:
        changed: Of the channel; its lock is held by the caller, but for `turn`.
        ledgers: What stands between this rank and each peer.
        say: Tells a peer `ASK` or `GO` of the round at a place, unless that is of another era.
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
        self._free = -1  # up to this place nothing waits any more

    def turn(self, peer: int, at: int) -> Callable[[float], None]:
        """Asks and waits for leave to send, at most so many seconds; not for what is void."""
        return partial(self._wait, peer, at)

    def hear(self, kind: Kind, peer: int, at: int) -> None:
        """A peer asks, or grants what was asked.

        Who asks has come to that round itself: where the two send to each other, its grant would
        come behind all that it sends.
        """
        if kind is Kind.ASK:
            self._asked[peer] = at
        self._granted[peer] = max(self._granted[peer], at)

    def release(self, last: int) -> None:
        """What was posted up to a place waits no more: a word for others stands behind it."""
        self._free = max(self._free, last)
        self._changed.notify_all()

    def answer(self, last: int) -> None:
        """Grants what may be: rounds up to `last`, and the next one unless a part is awaited.

        Called whenever messages have come; so those that wait look at what they have.
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
        if at < self._last or at <= self._free:  # a later round, or a word, is behind it
            return False
        return max(self._granted[peer], to.latest) < at  # it sends that round itself

    def _is_busy(self) -> bool:
        return any(ledger.open for ledger in self._ledgers.values())
