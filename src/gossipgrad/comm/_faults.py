"""Scripted faults: drop, delay or kill at a rank and round, over any transport."""

import re
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from gossipgrad.comm._transport import Lost, Received, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind
from gossipgrad.errors import GossipError

__all__ = ["Faults", "FaultyTransport", "ScriptedDeathError"]

_FAULT = re.compile(
    r"(?:(?P<drop>drop)|(?P<kill>kill)|delay) rank=(?P<rank>\d+)"
    r" (?:round=(?P<round>\d+)|rounds=(?P<first>\d+)-(?P<last>\d+))"
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
        """Drop the parts that `rank` sends in `round`."""
        self.drops.add((rank, round))
        return self

    def delay(self, *, rank: int, round: int, seconds: float) -> "Faults":
        """Deliver the parts that `rank` sends in `round` `seconds` later; it does not wait."""
        self.delays[rank, round] = seconds
        return self

    def kill(self, *, rank: int, round: int) -> "Faults":
        """Kill `rank` just before it says READY for `round`; it notifies nobody."""
        self.kills[rank] = min(round, self.kills.get(rank, round))
        return self

    @property
    def ranks(self) -> set[int]:
        """The ranks that the script names."""
        return {rank for rank, _ in [*self.drops, *self.delays]} | {*self.kills}

    @classmethod
    def parse(cls, script: str) -> "Faults":
        """Parse a script of faults, separated by `;` or new lines.

        Args:
            script: `delay rank=R round=N seconds=S`, `drop rank=R round=N`, `kill rank=R round=N`;
                `rounds=N-M` instead of `round=N` for all from N to M.

        Raises:
            ValueError: A fault is none of these.

        Example:
            >>> Faults.parse("delay rank=2 rounds=4-5 seconds=0.5; kill rank=0 round=7").delays
            {(2, 4): 0.5, (2, 5): 0.5}
        """
        faults = cls()
        for words in filter(None, map(str.split, script.replace(";", "\n").splitlines())):
            match = _FAULT.fullmatch(" ".join(words))
            delays = match is not None and not match["drop"] and not match["kill"]
            if match is None or delays != (match["seconds"] is not None):
                raise ValueError(
                    f"{' '.join(words)!r} is no fault; write `delay rank=1 rounds=20-29 "
                    "seconds=0.05`, `drop rank=1 round=20` or `kill rank=1 round=20`, with `;` "
                    "between several."
                )
            first, last = (
                int(match["round"] or match["first"]),
                int(match["round"] or match["last"]),
            )
            if not first <= last < first + _MAX_ROUNDS:
                raise ValueError(
                    f"rounds={first}-{last} must count upwards, and {_MAX_ROUNDS:,} rounds at most."
                )
            for round in range(first, last + 1):
                at = {"rank": int(match["rank"]), "round": round}
                if match["drop"]:
                    faults.drop(**at)
                elif match["kill"]:
                    faults.kill(**at)
                else:
                    faults.delay(**at, seconds=float(match["seconds"]))
        return faults


class _Delayed(NamedTuple):
    """A message that leaves later, or behind another one."""

    due_seconds: float
    header: bytes
    payload: Tensor | None
    ticket: Ticket


class FaultyTransport:
    """A wrapper around a transport that applies `Faults` to the messages this rank sends.

    Later messages on the same link wait behind a delayed one: order is kept.
    """

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._inner = inner
        self._faults = faults
        self._changed = threading.Condition(threading.RLock())
        self._delayed: defaultdict[int, deque[_Delayed]] = defaultdict(deque)
        self._thread: threading.Thread | None = None
        self._receiving = threading.Lock()
        self._dead = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, peer: int) -> None:
        """Opens the link, unless this rank is dead."""
        if not self._dead.is_set():
            self._inner.open(peer)

    def send(
        self,
        peer: int,
        header: bytes,
        payload: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """Send now, later or not at all, as the script says.

        Raises:
            ScriptedDeathError: If the script kills this rank now.
        """
        ticket = ticket or Ticket()
        if self._dead.is_set():
            ticket.done = True
            return
        what, due_seconds = Header.unpack(header), 0.0
        at = self.rank, what.round
        kill = self._faults.kills.get(self.rank, what.round + 1)
        if what.kind in (Kind.READY, Kind.DATA) and what.round >= kill:
            self._end(0.0)
            raise ScriptedDeathError(f"rank {at[0]} was killed by script in round {at[1]}")
        if what.kind is Kind.DATA:
            if at in self._faults.drops:  # TCP loses no part alone: so its receiver is notified
                lost = replace(what, kind=Kind.WITHDRAW, dtype=None, size_bytes=0)
                header, payload, ticket.done = lost.pack(), None, True
            elif at in self._faults.delays:
                due_seconds = time.monotonic() + self._faults.delays[at]
        with self._changed:
            if not due_seconds and not self._delayed[peer]:
                self._inner.send(peer, header, payload, ticket)
                return
            self._delayed[peer].append(_Delayed(due_seconds, header, payload, ticket))
            if self._thread is None:
                name = "gossipgrad-faults"
                self._thread = threading.Thread(target=self._send_delayed, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Return the received messages; none after this rank is dead."""
        with self._receiving:
            if not self._dead.is_set():
                return self._inner.receive(timeout_seconds)
        time.sleep(timeout_seconds)  # as long as a link on which nothing comes
        return []

    def wake(self) -> None:
        """Let `receive` return early."""
        self._inner.wake()

    def forget(self, peer: int) -> None:
        """Drops the link to a rank that is gone."""
        if not self._dead.is_set():
            with self._changed:
                for each in self._delayed.pop(peer, ()):
                    each.ticket.done = True
            self._inner.forget(peer)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close; delayed messages are sent first if there is time, otherwise lost."""
        if not self._dead.is_set():
            if self._thread is not threading.current_thread():
                with self._changed:
                    self._changed.wait_for(lambda: not any(self._delayed.values()), linger_seconds)
            self._end(linger_seconds)

    def _send_delayed(self) -> None:
        with self._changed:
            while not self._dead.is_set():
                first = [
                    (queue[0].due_seconds, peer) for peer, queue in self._delayed.items() if queue
                ]
                due_seconds, peer = min(first, default=(None, -1))
                wait = None if due_seconds is None else due_seconds - time.monotonic()
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                each = self._delayed[peer].popleft()
                self._inner.send(peer, each.header, each.payload, each.ticket)
                self._changed.notify_all()

    def _end(self, linger_seconds: float) -> None:
        with self._changed:
            self._dead.set()
            for each in (each for queue in self._delayed.values() for each in queue):
                each.ticket.done = True
            self._changed.notify_all()
        with self._receiving:
            self._inner.close(linger_seconds)
