"""Faults by script: drop, delay or kill at a rank and round, over any transport."""

import heapq
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind
from gossipgrad.errors import GossipError

__all__ = ["Faults", "FaultyTransport", "ScriptedDeathError"]

_FAULT = re.compile(
    r"(?P<kind>drop|delay|kill) rank=(?P<rank>\d+) rounds?=(?P<first>\d+)(?:-(?P<last>\d+))?"
    r"(?: seconds=(?P<seconds>\d+(?:\.\d+)?))?"
)
_MAX_ROUNDS = 1_000_000


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

    @property
    def ranks(self) -> set[int]:
        """The ranks that the script names."""
        return {rank for rank, _ in [*self.drops, *self.delays]} | {*self.kills}

    @property
    def last_round(self) -> int:
        """The last round that the script names, -1 if it names none."""
        return max([*(round for _, round in [*self.drops, *self.delays]), *self.kills.values(), -1])

    @classmethod
    def parse(cls, script: str) -> "Faults":
        """The faults of a script in words, one after the other with `;` or a new line between.

        Args:
            script: `delay rank=R round=N seconds=S`, `drop rank=R round=N`, `kill rank=R round=N`;
                `rounds=N-M` in place of `round=N` for all from N to M.

        Raises:
            ValueError: A fault is none of these, or kills a rank again.

        Example:
            >>> Faults.parse("delay rank=2 rounds=4-5 seconds=0.5; kill rank=0 round=7").delays
            {(2, 4): 0.5, (2, 5): 0.5}
        """
        faults = cls()
        for words in filter(None, map(str.split, script.replace(";", "\n").splitlines())):
            match = _FAULT.fullmatch(" ".join(words))
            if match is None or not _makes_sense(**match.groupdict()):
                raise ValueError(
                    f"{' '.join(words)!r} is no fault; write `delay rank=1 rounds=20-29 "
                    "seconds=0.05`, `drop rank=1 round=20` or `kill rank=1 round=20`, with `;` "
                    "between several."
                )
            first, last = int(match["first"]), int(match["last"] or match["first"])
            if not first <= last < first + _MAX_ROUNDS:
                raise ValueError(
                    f"rounds={first}-{last} must count upwards, and {_MAX_ROUNDS:,} rounds at most."
                )
            rank = int(match["rank"])
            for round in range(first, last + 1):
                if match["kind"] == "delay":
                    faults.delay(rank=rank, round=round, seconds=float(match["seconds"]))
                elif match["kind"] == "drop":
                    faults.drop(rank=rank, round=round)
                elif rank in faults.kills:
                    raise ValueError(
                        f"{' '.join(words)!r} has no effect: rank {rank} is killed in round "
                        f"{faults.kills[rank]} already; leave one of the two out."
                    )
                else:
                    faults.kill(rank=rank, round=round)
        return faults


def _makes_sense(kind: str, rank: str, first: str, last: str | None, seconds: str | None) -> bool:
    """Whether a fault has what its kind takes and nothing else: a rank dies once."""
    return (kind == "delay") == (seconds is not None) and not (kind == "kill" and last)


@dataclass(order=True)
class _Delayed:
    due_seconds: float
    number: int
    peer: int = field(compare=False)
    header: bytes = field(compare=False)
    payload: Tensor | None = field(compare=False)
    done: bool = field(default=False, compare=False)

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until it has left, at most so long; whether it has."""
        deadline = time.monotonic() + timeout_seconds
        while not self.done and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.done


class FaultyTransport:
    """Wraps a transport and lets `Faults` happen to what this rank sends.

    What comes behind a delayed message on the same link waits with it: order is kept.
    """

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._inner = inner
        self._faults = faults
        self._changed = threading.Condition()
        self._waiting: list[_Delayed] = []
        self._count = 0
        self._thread: threading.Thread | None = None
        self._receiving = threading.Lock()
        self._dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

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
        seconds = 0.0
        if what.kind is Kind.DATA:
            if what.round >= self._faults.kills.get(self.rank, what.round + 1):
                self._end(0.0)
                raise ScriptedDeathError(
                    f"rank {self.rank} was killed by script in round {what.round}"
                )
            if (self.rank, what.round) in self._faults.drops:
                return Sent()
            seconds = self._faults.delays.get((self.rank, what.round), 0.0)
        with self._changed:
            ahead = [d.due_seconds for d in self._waiting if d.peer == peer]
            if seconds == 0 and not ahead:
                return self._inner.send(peer, header, payload)
            due_seconds = max([time.monotonic() + seconds, *ahead])
            delayed = _Delayed(due_seconds, self._count, peer, header, payload)
            self._count += 1
            heapq.heappush(self._waiting, delayed)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._send_delayed, name="gossipgrad-delayed", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            return delayed

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """What has come; nothing any more once this rank is dead."""
        with self._receiving:
            return [] if self._dead else self._inner.receive(timeout_seconds)

    def forget(self, peer: int) -> None:
        """Drops the link to a rank that is gone."""
        if self._dead:
            return
        with self._changed:
            for delayed in self._waiting:
                delayed.done |= delayed.peer == peer
            self._waiting = [d for d in self._waiting if d.peer != peer]
            heapq.heapify(self._waiting)
        self._inner.forget(peer)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes; what is still delayed is sent first if there is time, else lost."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, linger_seconds)
        if not self._dead:
            self._end(linger_seconds)

    def _end(self, linger_seconds: float) -> None:
        with self._changed:
            self._dead = True
            for delayed in self._waiting:
                delayed.done = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._receiving:
            self._inner.close(linger_seconds)

    def _send_delayed(self) -> None:
        with self._changed:
            while not self._dead:
                left = self._waiting[0].due_seconds - time.monotonic() if self._waiting else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                delayed = heapq.heappop(self._waiting)
                # The buffer is the sender's again at once: what is delayed here is short.
                body = None if delayed.payload is None else delayed.payload.clone()
                self._inner.send(delayed.peer, delayed.header, body)
                delayed.done = True
                self._changed.notify_all()
