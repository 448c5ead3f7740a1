"""Those who join a script's run: ready from the start, let in when their moment has come."""

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gossipgrad import data
from gossipgrad.errors import GossipError
from gossipgrad.train import JoinConfig, join_run

from ._inside import Events
from ._script import Script
from ._training import load_subset

__all__ = ["Joiners"]

_END_SECONDS = 60.0  # after the run: by then they know that it is over


class Joiners:
    """A process for each fault that brings others in, for as long as the block.

    `gossipgrad train --join` needs seconds to load torch; here it is loaded before.
    """

    def __init__(self, script: Script, folder: Path, subset: Path) -> None:
        self._script = script
        self._folder = folder
        self._subset = subset
        self._words: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}
        self._let_in: set[int] = set()
        self._ends: dict[int, str] = {}

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("forkserver")
        for number in self._script.joins:
            ours, theirs = context.Pipe()
            count = self._script.faults[number].count
            process = context.Process(
                target=_join, args=(theirs, number, count, self._folder, self._subset)
            )
            process.start()
            theirs.close()
            ours.recv()
            self._words[number], self._processes[number] = ours, process
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in self._words.values():
            pipe.close()  # whose moment has not come ends
        for number, process in self._processes.items():
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
                self._ends[number] = f"hang: was not over {_END_SECONDS:g} s after the run"
            elif not self._told(number).exists():
                self._ends[number] = f"ended without a word, with exit code {process.exitcode}"
            process.close()

    def let_in(self, number: int) -> None:
        """The moment of a fault has come."""
        self._let_in.add(number)
        with contextlib.suppress(OSError):  # one that has crashed is told of at the end
            self._words[number].send("join")

    def outcomes(self) -> dict[int, dict[str, Any]]:
        """How it went for those whose moment had come; behind the block."""
        return {
            number: {"error": self._ends[number]}
            if number in self._ends
            else json.loads(self._told(number).read_text())
            for number in sorted(self._let_in)
        }

    def _told(self, number: int) -> Path:
        return _result(self._folder, number)


def _join(pipe: Connection, number: int, count: int, folder: Path, subset: Path) -> None:
    with (folder / f"rank-joining{number}.log").open("w", buffering=1) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gossipgrad.train", "torch._dynamo", __name__])
        first = context.Process(target=_nothing)  # waits until the fork server has loaded it all
        first.start()
        first.join()
        pipe.send("ready")
        try:
            pipe.recv()
        except EOFError:
            pass
        else:
            Events(folder).tell("joins", fault=number)
            _let_in(context, number, count, folder, subset)
        finally:  # as at the end of a command; a child of the fork server leaves its own behind
            multiprocessing.forkserver._forkserver._stop()
            sys.stdout.flush()


def _let_in(context: Any, number: int, count: int, folder: Path, subset: Path) -> None:
    """Starts the workers, as many calls of the command would, and writes down how it went."""
    ends = [folder / f"join{number}-{one}.json" for one in range(count)]
    workers = [context.Process(target=_worker, args=(folder, subset, end)) for end in ends]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [
        json.loads(end.read_text())
        if end.exists()
        else {"error": f"ended without a word, with exit code {worker.exitcode}"}
        for end, worker in zip(ends, workers, strict=True)
    ]
    failed = [one for one in found if "error" in one]
    _result(folder, number).write_text(json.dumps(failed[0] if failed else found[0]))


def _result(folder: Path, number: int) -> Path:
    """Where those who join leave how it went."""
    return folder / f"join{number}.json"


def _worker(folder: Path, subset: Path, end: Path) -> None:
    data.load = functools.partial(load_subset, subset)
    data.prepare = lambda *_, **__: None
    try:
        found = {"exit_code": join_run(JoinConfig(run=folder / "run", quiet=True)).exit_code}
    except (GossipError, ValueError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    except BaseException:
        traceback.print_exc()
        found = {"error": traceback.format_exc()}
    end.write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the command's process, whose threads nobody waits for


def _nothing() -> None:
    """All there is to do for a process that is only to begin."""
