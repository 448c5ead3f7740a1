"""Faults by script: drop, delay or kill at a rank and round, over any transport."""

import threading
from dataclasses import dataclass, field

from torch import Tensor

from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind
from gossipgrad.errors import GossipError

__all__ = ["Faults", "FaultyTransport", "ScriptedDeathError"]


class ScriptedDeathError(GossipError):
    """The script killed this rank; to the others it looks like a process that died."""


@dataclass
class Faults:
    """A script of faults, the same object on all ranks.

    Example:
        >>> faults = Faults().drop(rank=1, round=3).delay(rank=2, round=4, seconds=0.5)
        >>> faults = faults.kill(rank=0, round=7)
    """

    drops: set[tuple[int, int]] = field(default_factory=set)
    delays: dict[tuple[int, int], float] = field(default_factory=dict)
    kills: dict[int, int] = field(default_factory=dict)

    def drop(self, *, rank: int, round: int) -> "Faults":
        """What `rank` sends in `round` never arrives."""
        self.drops.add((rank, round))
        return self

    def delay(self, *, rank: int, round: int, seconds: float) -> "Faults":
        """What `rank` sends in `round` arrives `seconds` later; the rank itself goes on."""
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        self.delays[rank, round] = seconds
        return self

    def kill(self, *, rank: int, round: int) -> "Faults":
        """`rank` dies when it would send its part of `round`, without a word."""
        self.kills[rank] = round
        return self


class FaultyTransport:
    """Wraps a transport and lets `Faults` happen to what this rank sends."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._inner = inner
        self._faults = faults
        self._timers: list[threading.Timer] = []
        self._dead = False

    def open(self, peer: int) -> None:
        """Opens the link, unless this rank is dead."""
        if not self._dead:
            self._inner.open(peer)

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """Sends, later or not at all, as the script says.

        Raises:
            ScriptedDeathError: If the script kills this rank now.
        """
        if self._dead:
            return Sent()
        what = Header.unpack(header)
        if what.kind is not Kind.DATA:
            return self._inner.send(peer, header, payload)
        if what.round >= self._faults.kills.get(self.rank, what.round + 1):
            self._dead = True
            self._inner.close(0.0)
            raise ScriptedDeathError(f"rank {self.rank} was killed by script in round {what.round}")
        if (self.rank, what.round) in self._faults.drops:
            return Sent()
        seconds = self._faults.delays.get((self.rank, what.round), 0.0)
        if seconds > 0:
            body = None if payload is None else payload.clone()
            timer = threading.Timer(seconds, self._inner.send, (peer, header, body))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()
            return Sent()
        return self._inner.send(peer, header, payload)

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """What has come; nothing any more once this rank is dead."""
        return [] if self._dead else self._inner.receive(timeout_seconds)

    def forget(self, peer: int) -> None:
        """Drops the link to a rank that is gone."""
        if not self._dead:
            self._inner.forget(peer)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes; what is still delayed is sent first if there is time, else lost."""
        for timer in self._timers:
            timer.join(linger_seconds)
            timer.cancel()
        if not self._dead:
            self._dead = True
            self._inner.close(linger_seconds)
