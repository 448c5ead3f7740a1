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
from gossipgrad.train import _join as joining
from gossipgrad.train._joiner import join_main

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
        context.set_forkserver_preload(["gossipgrad.train._join", "torch._dynamo", __name__])
        first = context.Process(target=_nothing)  # waits until the fork server has loaded it all
        first.start()
        first.join()
        pipe.send("ready")
        try:
            pipe.recv()
            _let_in(number, count, folder, subset)
        except EOFError:
            return
        finally:  # as at the end of a command; a child of the fork server leaves its own behind
            multiprocessing.forkserver._forkserver._stop()
            sys.stdout.flush()


def _let_in(number: int, count: int, folder: Path, subset: Path) -> None:
    Events(folder).tell("joins", fault=number)
    joining.join_main = functools.partial(_worker, subset)
    data.prepare = lambda *_, **__: None
    try:
        outcome = join_run(JoinConfig(run=folder / "run", nproc=count, quiet=True))
        found = {"exit_code": outcome.exit_code, "parts": outcome.parts}
        if outcome.failures:
            found["error"] = "; ".join(outcome.failures)
    except (GossipError, ValueError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    except BaseException:
        traceback.print_exc()
        found = {"error": traceback.format_exc()}
    _result(folder, number).write_text(json.dumps(found))


def _result(folder: Path, number: int) -> Path:
    """Where those who join leave how it went."""
    return folder / f"join{number}.json"


def _worker(subset: Path) -> int:
    data.load = functools.partial(load_subset, subset)
    return join_main()


def _nothing() -> None:
    """All there is to do for a process that is only to begin."""
