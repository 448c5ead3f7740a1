"""Links that keep what is sent until a test lets it go."""

import threading

from gossipgrad.comm import Header, Kind, Sent

__all__ = ["Dam"]


class Dam:
    """Holds up what a rank sends from a round on, in order, until it is let go."""

    def __init__(self, inner, round):
        self._inner, self._round = inner, round
        self._held, self._lock, self._open = [], threading.Lock(), False

    def send(self, peer, header, payload=None):
        what = Header.unpack(header)
        with self._lock:
            first = what.kind is Kind.DATA and what.round == self._round
            if not self._open and (first or self._held):
                self._held.append((peer, header, None if payload is None else payload.clone()))
                return Sent()
            return self._inner.send(peer, header, payload)

    def let_go(self):
        with self._lock:
            self._open = True
            for message in self._held:
                self._inner.send(*message)

    def __getattr__(self, name):
        return getattr(self._inner, name)
