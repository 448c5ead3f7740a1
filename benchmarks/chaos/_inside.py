"""What runs inside a worker of a fault script: sets faults off at their moment, writes down.

The faults of a rank's own process (kill, pause) it does to itself, where the moment is exact; of
links it only tells. Everything that happens goes into one file a script, a line each.
"""

import faulthandler
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gossipgrad import data
from gossipgrad.comm import Channel
from gossipgrad.decentralized import GossipSession
from gossipgrad.train import _worker
from gossipgrad.train._loop import Loop
from gossipgrad.train._worker import worker_main

from ._script import Fault, Script
from ._training import load_subset


class Events:
    """The file that all processes of a script write to; one line is written at once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"

    def tell(self, what: str, **details: Any) -> None:
        """Adds a line."""
        line = json.dumps({"at": time.monotonic(), "what": what, **details}) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def read(self, skip: int = 0) -> list[dict[str, Any]]:
        """All lines but the first `skip`."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().split("\n")[:-1]  # the last one may not be whole yet
        return [json.loads(line) for line in lines[skip:]]


@dataclass
class _Trigger:
    """Sets one fault off, once."""

    fault: Fault
    number: int
    rank: int
    events: Events
    done: bool = False
    begun: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fire(self) -> None:
        with self.lock:
            if self.done:
                return
            self.done = True
        kind = self.fault.kind
        self.events.tell("fault", fault=self.number, rank=self.rank, pid=os.getpid())
        if kind in ("kill", "pause"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def fire_later(self) -> None:
        if self.begun:
            return
        self.begun = True
        timer = threading.Timer(self.fault.seconds_in, self.fire)
        timer.daemon = True
        timer.start()


def worker(script: Script, start: int, folder: Path, subset: Path) -> int:
    """A worker of the launcher, with the faults of this start of the run armed."""
    arm(script, folder, subset, int(os.environ["RANK"]), start=start)
    return worker_main()


def arm(script: Script, folder: Path, subset: Path, rank: int, *, start: int = 1) -> None:
    """Wraps what the moments of the faults stand by, in this process and for good."""
    faulthandler.register(signal.SIGUSR1, (folder / f"stacks-rank{rank}.txt").open("w"))
    events = Events(folder)
    events.tell("begins", rank=rank, pid=os.getpid())
    _worker.train_rank = _keeping_result(_worker.train_rank, folder, rank)
    data.load = functools.partial(load_subset, subset)
    triggers = [
        _Trigger(fault, number, rank, events)
        for number, fault in enumerate(script.faults)
        if fault.ranks[0] == rank and fault.start == start
    ]
    _arm_steps([t for t in triggers if t.fault.moment in ("between", "exchange", "anytime")])
    _arm_consensus([t for t in triggers if t.fault.moment == "consensus"])


def _arm_steps(triggers: list[_Trigger]) -> None:
    """At the step that the run has come to: in mode stale ranks jump over some of them."""
    begun = 0
    inner_step, inner_post = Loop._step, Channel.post

    @functools.wraps(inner_step)
    def step(loop: Loop, *arguments: Any, **named: Any) -> Any:
        nonlocal begun
        begun = loop.strategy.position(loop.metrics.steps) + 1
        for trigger in triggers:
            if trigger.fault.number <= begun and trigger.fault.moment == "between":
                trigger.fire()
            elif trigger.fault.number <= begun and trigger.fault.moment == "anytime":
                trigger.fire_later()
        return inner_step(loop, *arguments, **named)

    @functools.wraps(inner_post)
    def post(*arguments: Any, **named: Any) -> Any:
        exchange = inner_post(*arguments, **named)
        for trigger in triggers:
            # In a round that is void nothing is posted: then in the next one that is.
            if trigger.fault.number <= begun and trigger.fault.moment == "exchange":
                trigger.fire()
        return exchange

    if triggers:
        Loop._step, Channel.post = step, post


def _arm_consensus(triggers: list[_Trigger]) -> None:
    entered = 0
    inner = GossipSession.consensus

    @functools.wraps(inner)
    def consensus(self: GossipSession) -> Any:
        nonlocal entered
        entered += 1
        for trigger in triggers:
            if trigger.fault.number == entered:
                trigger.fire_later()
        return inner(self)

    if triggers:
        GossipSession.consensus = consensus


def _keeping_result(train_rank: Callable[..., Any], folder: Path, rank: int) -> Callable[..., Any]:
    """Whoever is to put the run together may be dead: results are kept here, too."""

    @functools.wraps(train_rank)
    def keeping(*arguments: Any, **named: Any) -> Any:
        result = train_rank(*arguments, **named)
        partial = folder / f"result-rank{rank}.partial"
        partial.write_text(json.dumps(asdict(result)))
        partial.replace(folder / f"result-rank{rank}.json")
        return result

    return keeping
