"""What is done to a script's workers from outside, who joins them, and what they leave behind."""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.network import Network
from benchmarks.network._namespaces import namespaces
from gossipgrad import data
from gossipgrad.errors import GossipError
from gossipgrad.train import JoinConfig, join_run

from ._inside import Events
from ._script import Fault, Script
from ._training import load_subset

_POLL_SECONDS = 0.004
_BEGIN_SECONDS = 30.0
_END_SECONDS = 60.0  # after the run: by then those who join know that it is over
_GRACE_SECONDS = 5.0
_LISTENING = "0A"


class Director:
    """Carries out what workers cannot do to themselves, for as long as the block.

    Leaving it takes back what lasts: those stopped go on, links are as they were.
    """

    def __init__(
        self,
        script: Script,
        events: Events,
        network: Network | None = None,
        join: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._script = script
        self._events = events
        self._network = network
        self._join = join
        self._handles: dict[int, int] = {}
        self._undo: list[tuple[float, Fault]] = []
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
        for _, fault in self._undo:
            self._take_back(fault)
        for handle in self._handles.values():
            os.close(handle)

    def _direct(self) -> None:
        seen = 0
        while not self._over.wait(_POLL_SECONDS):
            for event in self._events.read(seen):
                seen += 1
                if event["what"] == "begins":
                    self._meet(event["rank"], event["pid"])
                elif event["what"] == "fault":
                    self._begin(event["fault"])
            for due in [one for one in self._undo if one[0] <= time.monotonic()]:
                self._undo.remove(due)
                self._take_back(due[1])
                self._events.tell("over", fault=self._script.faults.index(due[1]))

    def _meet(self, rank: int, pid: int) -> None:
        if rank in self._handles:  # of an earlier start
            os.close(self._handles.pop(rank))
        with contextlib.suppress(ProcessLookupError):
            self._handles[rank] = os.pidfd_open(pid)

    def _begin(self, number: int) -> None:
        fault, network = self._script.faults[number], self._network
        if fault.kind == "join":
            self._join(number)
            return
        if fault.kind in ("kill", "pause"):  # its first rank has done it to itself
            self._signal(
                fault.ranks[1:], signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            )
        elif network is not None:
            if fault.kind == "slow":
                network.set_rate(fault.ranks[0], fault.bits_per_second)
            elif fault.kind == "cut":
                network.cut(*fault.ranks)
            else:
                network.cut_off(fault.ranks[0])
        if fault.kind != "kill":
            self._undo.append((time.monotonic() + fault.seconds, fault))

    def _take_back(self, fault: Fault) -> None:
        network = self._network
        if fault.kind == "pause":
            self._signal(fault.ranks, signal.SIGCONT)
        elif network is not None:
            if fault.kind == "slow":
                network.set_rate(fault.ranks[0], network.rates[-1])  # the store's is never slowed
            elif fault.kind == "cut":
                network.heal(*fault.ranks)
            else:
                network.reconnect(fault.ranks[0])

    def _signal(self, ranks: tuple[int, ...], number: signal.Signals) -> None:
        for rank in ranks:
            self._await(rank)
            if rank in self._handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handles[rank], number)
                    self._events.tell(number.name, rank=rank)

    def _await(self, rank: int) -> None:
        """Until the rank's process has begun, for a bounded time."""
        deadline = time.monotonic() + _BEGIN_SECONDS
        while rank not in self._handles and time.monotonic() < deadline and not self._over.is_set():
            for event in self._events.read():
                if event["what"] == "begins" and event["rank"] == rank:
                    self._meet(rank, event["pid"])
                    return
            time.sleep(_POLL_SECONDS)


class Joiners:
    """Processes that join the run at the moment of a fault, for as long as the block."""

    def __init__(self, script: Script, folder: Path, subset: Path) -> None:
        self._script, self._folder, self._subset = script, folder, subset
        self._processes: dict[int, list[Any]] = {}
        self._outcomes: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for number, processes in self._processes.items():
            found = []
            for one, process in enumerate(processes):
                process.join(_END_SECONDS)
                end = self._end(number, one)
                if process.is_alive():
                    process.kill()
                    process.join()
                    found.append({"error": f"hang: was not over {_END_SECONDS:g} s after the run"})
                elif end.exists():
                    found.append(json.loads(end.read_text()))
                else:
                    found.append({"error": f"ended with exit code {process.exitcode} alone"})
                process.close()
            self._outcomes[number] = min(found, key=lambda each: "error" not in each)

    def let_in(self, number: int) -> None:
        """The moment of a fault has come."""
        context = multiprocessing.get_context("forkserver")
        Events(self._folder).tell("joins", fault=number)
        self._processes[number] = []
        for one in range(self._script.faults[number].count):
            arguments = (self._folder, self._subset, self._end(number, one))
            self._processes[number].append(context.Process(target=_join, args=arguments))
            self._processes[number][-1].start()

    def outcomes(self) -> dict[int, dict[str, Any]]:
        """By fault, how the worst of its joins ended; after the block."""
        return self._outcomes

    def _end(self, number: int, one: int) -> Path:
        return self._folder / f"join{number}-{one}.json"


def _join(folder: Path, subset: Path, end: Path) -> None:
    """As `gossipgrad train --join`, for which torch is loaded already."""
    redirect(folder / f"rank-joining-{end.stem}.log")
    data.load = functools.partial(load_subset, subset)
    data.prepare = lambda *_, **__: None
    try:
        found = {"exit_code": join_run(JoinConfig(run=folder / "run", quiet=True)).exit_code}
    except (GossipError, ValueError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    except BaseException:
        found = {"error": traceback.format_exc()}
    end.write_text(json.dumps(found))


def redirect(log: Path) -> None:
    """What this process prints goes into a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)


def load(modules: list[str]) -> None:
    """Starts this process's fork server and waits until it has loaded the modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    first = context.Process(target=int)  # waits until all is loaded
    first.start()
    first.join()


class Traces:
    """What this session has now: processes, ports, threads, namespaces, temporary files."""

    def __init__(self) -> None:
        self._before = {what: look() for what, look in _LOOKS.items()}

    def left(self) -> list[str]:
        """What has come since and does not go within a few seconds, in words."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            more = {what: look() - self._before[what] for what, look in _LOOKS.items()}
            left = [
                f"{what} left: {', '.join(sorted(found))}" for what, found in more.items() if found
            ]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)


def processes_of(session: int) -> dict[int, str]:
    """Processes of a session by number, with their command, with any parent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            if fields[0] not in "ZX" and int(fields[3]) == session:
                found[int(folder.name)] = name
    return found


def _ports() -> set[str]:
    """On which processes of this session listen, in this network namespace."""
    ours = set()
    for pid in processes_of(os.getsid(0)):
        with contextlib.suppress(OSError):
            ours |= {str(handle.readlink()) for handle in Path(f"/proc/{pid}/fd").iterdir()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in ours:
                ports.add(str(int(fields[1].rpartition(":")[2], 16)))
    return ports


_LOOKS: dict[str, Callable[[], set[str]]] = {
    "processes": lambda: {f"{p} ({name})" for p, name in processes_of(os.getsid(0)).items()},
    "ports": _ports,
    "threads": lambda: {thread.name for thread in threading.enumerate()},
    "namespaces": lambda: {name for name in namespaces() if f"-{os.getpid()}-" in name},
    "temporary files": lambda: {path.name for path in Path(tempfile.gettempdir()).iterdir()},
}
