"""Connections that have not shown yet who they are: how many may wait, how long, and who goes."""

import contextlib
import random
from dataclasses import dataclass

from gossipgrad.comm._tcp import Peer, close_connection, peer_of, traffic

try:
    import resource
except ImportError:  # Windows
    resource = None

__all__ = ["HANDSHAKE_SECONDS", "Waiting", "most_waiting"]

HANDSHAKE_SECONDS = 15.0  # for one that knows the secret, on a machine that is very busy
_LEAST_WAITING, _MOST_WAITING = 128, 1024
_HANDLES = 1024  # where the system does not say how many a process may have
_MOST_HEARD_BYTES = 4096  # a whole handshake has less than 1024
# What one gets of ours: a greeting; a welcome of 10 if it has shown a good word, or of 170 with
# CURVE if it knows the key of the socket; then 28 at least if it is let in, 13 at most if not.
_GREETING_BYTES = 64
_WELCOMED_BYTES = {False: _GREETING_BYTES + 10, True: _GREETING_BYTES + 170}
_REFUSAL_BYTES = 14


def most_waiting(expected: int) -> int:
    """How many connections may wait: two for each of those that are expected, and strangers.

    They are file handles, of which half is left to others.
    """
    handles = _HANDLES
    if resource is not None:
        with contextlib.suppress(ValueError, OSError):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            handles = _HANDLES if limit == resource.RLIM_INFINITY else limit
    wanted = max(2 * expected, min(handles // 4, _MOST_WAITING))
    return max(_LEAST_WAITING, min(wanted, handles // 2))


@dataclass(slots=True)
class _Waiter:
    since_seconds: float
    peer: Peer | None


class Waiting:
    """Connections that a listening socket has accepted and, as far as is known, not let in.

    Where too many wait, those stay that have shown that they know something, and those go first
    that come from hosts where no member listens; else it is left to chance, as one that takes long
    may be an honest one from far away.

    Args:
        encrypt: Whether the mechanism is CURVE.
        most: How many may wait.

    Attributes:
        port: Where they were accepted; None while that is not known.
        friends: Hosts where members listen.
    """

    def __init__(self, *, encrypt: bool, most: int) -> None:
        self.port: int | None = None
        self.friends: set[str] = set()
        self.most = most
        self._welcomed_bytes = _WELCOMED_BYTES[encrypt]
        self._let_in_bytes = self._welcomed_bytes + _REFUSAL_BYTES
        self._waiters: dict[int, _Waiter] = {}  # by file descriptor
        self._choice = random.Random()

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, descriptor: int, now_seconds: float) -> None:
        """One was accepted; what had its descriptor before has been closed."""
        peer = None if self.port is None else peer_of(descriptor, self.port)
        self._waiters[descriptor] = _Waiter(now_seconds, peer)

    def remove(self, descriptor: int) -> Peer | None:
        """One was closed, or let in; who it was, if it waited."""
        waiter = self._waiters.pop(descriptor, None)
        return None if waiter is None else waiter.peer

    def make_room(self) -> list[Peer]:
        """Sends some away if too many wait; who they were."""
        if len(self._waiters) <= self.most:
            return []
        order = [*self._waiters]
        self._choice.shuffle(order)
        order.sort(key=self._is_friend)
        sent_away: list[Peer] = []
        for may_be_welcome in (False, True):
            for descriptor in order:
                if len(self._waiters) <= self.most:
                    return sent_away
                if descriptor in self._waiters:
                    sent_away += self._send_away(descriptor, may_be_welcome)
        return sent_away

    def look(self, now_seconds: float) -> list[Peer]:
        """Strikes off who was let in; sends away who was refused or says too much: who they were.

        Only where the system tells what went over a connection.
        """
        sent_away: list[Peer] = []
        for descriptor, waiter in list(self._waiters.items()):
            went = None if self.port is None else traffic(descriptor, self.port)
            # ZeroMQ sends away by itself who says nothing: one that is still there was let in.
            if now_seconds - waiter.since_seconds > HANDSHAKE_SECONDS + 1 or (
                went is not None and went.taken_bytes > self._let_in_bytes
            ):
                del self._waiters[descriptor]
            elif went is not None and (
                went.taken_bytes > self._welcomed_bytes or went.heard_bytes > _MOST_HEARD_BYTES
            ):
                sent_away += self._send_away(descriptor, may_be_welcome=True)
        return sent_away

    def _is_friend(self, descriptor: int) -> bool:
        peer = self._waiters[descriptor].peer
        return peer is not None and peer.host in self.friends

    def _send_away(self, descriptor: int, may_be_welcome: bool) -> list[Peer]:
        """Ends a connection, if it was not let in, nor welcomed; who it was, if it did."""
        peer = self._waiters[descriptor].peer
        went = None if self.port is None else traffic(descriptor, self.port)
        knows = went is not None and _GREETING_BYTES < went.taken_bytes <= self._welcomed_bytes
        if knows and not may_be_welcome:
            return []
        del self._waiters[descriptor]
        if self.port is None or peer is None:
            return []
        if went is not None and went.taken_bytes > self._let_in_bytes:
            return []
        closed = close_connection(descriptor, self.port, peer.host, peer.port)
        return [peer] if closed else []
