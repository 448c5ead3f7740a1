"""Carries out, from outside, what workers cannot do to themselves, and takes it back in time."""

import heapq
import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from benchmarks.network import Network

from ._inside import Events
from ._script import Fault, Script

__all__ = ["Director", "story"]

_POLL_SECONDS = 0.004
_BEGIN_SECONDS = 30.0


class Director:
    """Listens to the events of a script's workers for as long as the block.

    Leaving it takes back what lasts: those stopped go on, links are as they were.

    Args:
        script: What is to happen.
        events: Where workers tell of themselves.
        network: Whose links are slowed or cut, if there is one.
        rate_bits_per_second: Of its links.
        join: Has the others come in that a fault of this number tells of.
    """

    def __init__(
        self,
        script: Script,
        events: Events,
        network: Network | None,
        rate_bits_per_second: float,
        join: Callable[[int], None] | None = None,
    ) -> None:
        self._join = join
        self._script = script
        self._events = events
        self._network = network
        self._rate = rate_bits_per_second
        self._handles: dict[int, int] = {}
        self._seen = 0
        self._undo: list[tuple[float, int, Fault]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._direct, name="director", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        for _, _, fault in self._undo:
            self._take_back(fault)
        for handle in self._handles.values():
            os.close(handle)

    def _direct(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            for event in self._events.read(self._seen):
                self._seen += 1
                if event["what"] == "begins":
                    self._meet(event["rank"], event["pid"])
                elif event["what"] == "fault":
                    self._begin(event["fault"])
            while self._undo and self._undo[0][0] <= time.monotonic():
                _, number, fault = heapq.heappop(self._undo)
                self._take_back(fault)
                self._events.tell("over", fault=number)

    def _meet(self, rank: int, pid: int) -> None:
        if rank in self._handles:  # of an earlier start
            os.close(self._handles.pop(rank))
        try:
            self._handles[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            return

    def _begin(self, number: int) -> None:
        fault = self._script.faults[number]
        act: dict[str, Callable[[], None]] = {
            "kill": lambda: self._signal(fault.ranks[1:], signal.SIGKILL),
            "pause": lambda: self._signal(fault.ranks[1:], signal.SIGSTOP),
            "slow": lambda: self._net.set_rate(fault.ranks[0], fault.bits_per_second),
            "cut": lambda: self._net.cut(*fault.ranks),
            "off": lambda: self._net.cut_off(fault.ranks[0]),
            "join": lambda: None if self._join is None else self._join(number),
        }
        act[fault.kind]()
        if fault.kind not in ("kill", "join"):
            heapq.heappush(self._undo, (time.monotonic() + fault.seconds, number, fault))

    def _take_back(self, fault: Fault) -> None:
        act: dict[str, Callable[[], None]] = {
            "pause": lambda: self._signal(fault.ranks, signal.SIGCONT),
            "slow": lambda: self._net.set_rate(fault.ranks[0], self._rate),
            "cut": lambda: self._net.heal(*fault.ranks),
            "off": lambda: self._net.reconnect(fault.ranks[0]),
        }
        act[fault.kind]()

    def _signal(self, ranks: tuple[int, ...], number: signal.Signals) -> None:
        for rank in ranks:
            handle = self._handle(rank)
            if handle is None:
                continue
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                continue
            self._events.tell(number.name, rank=rank)

    def _handle(self, rank: int) -> int | None:
        """Of a rank's process; one that has not told of itself yet is awaited."""
        deadline = time.monotonic() + _BEGIN_SECONDS
        while rank not in self._handles and time.monotonic() < deadline and not self._over.is_set():
            for event in self._events.read():
                if event["what"] == "begins" and event["rank"] == rank:
                    self._meet(rank, event["pid"])
                    return self._handles.get(rank)
            time.sleep(_POLL_SECONDS)
        return self._handles.get(rank)

    @property
    def _net(self) -> Network:
        assert self._network is not None, "a script with faults of links runs on hosts"
        return self._network


def story(events: list[dict[str, Any]], script: Script) -> list[str]:
    """What happened and when, in seconds since the first worker began."""
    if not events:
        return ["no worker began"]
    start = min(event["at"] for event in events)
    lines = []
    for event in sorted(events, key=lambda event: event["at"]):
        words = {
            "begins": lambda e: f"rank {e['rank']} begins (process {e['pid']})",
            "fault": lambda e: f"fault: {script.faults[e['fault']]}",
            "over": lambda e: f"over: {script.faults[e['fault']]}",
            "joins": lambda e: f"those of fault {e['fault']} come",
            "ends": lambda e: f"rank {e['rank']} ends: {e['how']}",
        }
        said = words.get(event["what"], lambda e: f"{e['what']} to rank {e.get('rank')}")(event)
        lines.append(f"{event['at'] - start:7.3f} s  {said}")
    return lines
