"""The front door: one call, one run, in workers started here or as one rank of a given world."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from gossipgrad.launch import Exit, Launched, Rendezvous, Worker, ensure_fork_server, launch

from ._check import check
from ._config import TrainConfig
from ._ending import MAILBOX, HandedIn, clean_up, has_living_joiners
from ._layout import RunDir
from ._lock import hold_lock
from ._result import Outcome, RunFailedError, after_checks, exit_code_of
from ._worker import open_folder, run_in_world, worker_main
from ._world import find_world

_DEFAULT_NPROC = 4
# For the others to end by themselves, of a run that needs every rank.
_DOOMED_SECONDS = 5.0
# For workers to end after the run was put together: one that still runs stands still.
_OVER_SECONDS = 10.0
# For those who joined to put a run together whose other ranks are gone.
_SUMMARY_SECONDS = 20.0
_POLL_SECONDS = 0.1
_SHOW_CURSOR = "\x1b[?25h"


def run(config: TrainConfig, *, show_config: bool = False) -> Outcome:
    """Train as `config` says and leave the run in its folder.

    Starts the workers on this machine and waits for them, or, inside a world that torchrun or
    Slurm has started, takes part in it as one rank. What can be checked is checked before a process
    starts.

    A gossip run goes on when ranks die: the exported model is then the consensus of those that are
    left, and the summary tells who was lost, when, and what of the data went with them.

    Like every program that starts processes with multiprocessing, a script that calls this keeps
    the call under `if __name__ == "__main__":`.

    Args:
        config: The options.
        show_config: Print `config.json` before the start.

    Returns:
        How it ended, and where the files are.

    Raises:
        ValueError: The options cannot work; nothing was started.
        GossipError: The run failed and nothing can be kept of it, or its data cannot be fetched.
        RuntimeError: A `ValueError` came up after the options were checked; it is the cause.
    """
    config.warn_of_unused()
    if (world := find_world(os.environ)) is not None:
        return run_in_world(config, world, show_config=show_config)
    nproc = config.nproc or _DEFAULT_NPROC
    check(config, nproc)
    with contextlib.ExitStack() as held:

        def hold(run_dir: RunDir) -> None:
            held.enter_context(hold_lock(run_dir, first=True))

        config, run_dir = open_folder(config, nproc, hold=hold, show_config=show_config)
        with after_checks():
            return _Launcher(config, run_dir, nproc).run()


class _Launcher:
    """Workers of a run on this machine, from their start to their end."""

    def __init__(self, config: TrainConfig, run_dir: RunDir, nproc: int) -> None:
        self._config, self._run_dir, self._nproc = config, run_dir, nproc
        self._is_doomed = False
        self._doomed = Timer(_DOOMED_SECONDS)
        self._over = Timer(_OVER_SECONDS)

    def run(self) -> Outcome:
        """Start them, and wait until each is over."""
        start_fork_server(self._config)
        with Rendezvous(self._nproc) as rendezvous:
            self._mailbox = dist.PrefixStore(MAILBOX, rendezvous.store)
            opened = {"config": self._config.to_json(), "token": None}
            self._mailbox.set("run", json.dumps(opened))
            try:
                launched = launch(
                    worker_main,
                    rendezvous,
                    grace_seconds=float("inf"),  # a second signal ends them
                    supervise=self._supervise,
                    describe=self._describe,
                )
                return self._outcome(launched)
            except BaseException:
                clean_up(self._run_dir)
                raise
            finally:
                if sys.stdout.isatty() and not self._config.quiet:
                    print(_SHOW_CURSOR, end="", flush=True)  # a killed worker may have hidden it

    def _supervise(self, workers: Sequence[Worker]) -> None:
        """End workers that nobody can wait for any more."""
        is_over = self._run_dir.report.exists() and not self._run_dir.partial.exists()
        if self._doomed.has_passed(since=self._is_doomed) or self._over.has_passed(since=is_over):
            for worker in workers:
                if not self._mailbox.check([f"rank{worker.rank}"]):  # else it is about to end
                    worker.kill()

    def _describe(self, end: Exit) -> str | None:
        """Why a worker failed, if the others go on without it; else the end of the run says it."""
        content = self._end_of(end)
        has_begun = self._mailbox.check(["start0"])
        if not has_begun and end.code < 0:
            # The others wait for one that they have never heard of, and not for one that is silent.
            dist.PrefixStore("start", self._mailbox).set(f"beat/{end.rank}", "dead")
        self._is_doomed |= self._config.needs_every_rank or content.get("is_fatal", False)
        ends_all = self._is_doomed or not (has_begun or end.code < 0)
        return (
            None if ends_all or content.get("is_consequence") else content.get("cause", end.cause)
        )

    def _end_of(self, end: Exit) -> HandedIn:
        """What a worker has handed in, else what its process ended with."""
        key = f"rank{end.rank}"
        if not self._mailbox.check([key]):
            content = {"cause": end.cause, "when_seconds": time.time()}
            self._mailbox.set(key, json.dumps(content))
        return json.loads(self._mailbox.get(key))

    def _outcome(self, launched: Launched) -> Outcome:
        run_dir, stopped_by = self._run_dir, launched.stopped_by
        await_joined(run_dir)
        if run_dir.summary.exists() and not run_dir.resumes.exists():
            summary = json.loads(run_dir.summary.read_text())
            return Outcome(
                exit_code=exit_code_of(stopped_by if summary["interrupted"] else None),
                run_dir=run_dir.path,
                summary=summary,
                report=run_dir.report,
            )
        if stopped_by is not None:
            clean_up(run_dir)
            begun = self._mailbox.check(["start0"])  # by those who have begun to train
            code = exit_code_of(stopped_by)
            return Outcome(exit_code=code, begun=begun, run_dir=run_dir.path)
        raise RunFailedError(self._first_failure(launched))

    def _first_failure(self, launched: Launched) -> str:
        """Which worker failed first and why, one whose failure was not due to another's."""
        ends = {rank: self._end_of(end) for rank, end in launched.exits.items()}
        causes = {rank: content for rank, content in ends.items() if "cause" in content}
        if not causes:
            return "all workers ended, but none has put the run together"
        rank, content = min(
            causes.items(),
            key=lambda one: (one[1].get("is_consequence", False), one[1]["when_seconds"]),
        )
        what = content["cause"].rstrip(".")
        if self._config.needs_every_rank and launched.exits[rank].code < 0:
            what += f"; strategy {self._config.strategy} needs every rank, so the run is over"
        where = self._run_dir.errors(rank)
        trace = f" (traceback in {where})" if where.exists() else ""
        return f"rank {rank} {what}{trace}"


def await_joined(run_dir: RunDir) -> None:
    """Keep the store for those who joined and go on, until they have put the run together."""
    last_seconds = time.monotonic()
    while not run_dir.summary.exists():
        if has_living_joiners(run_dir, {}, ()):
            last_seconds = time.monotonic()
        has_joined = any(run_dir.partial.glob("joined-rank*"))
        if not has_joined or time.monotonic() > last_seconds + _SUMMARY_SECONDS:
            return
        time.sleep(_POLL_SECONDS)


class Timer:
    """How long something has been so.

    Args:
        limit_seconds: When that is too long.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._since_seconds: float | None = None

    def has_passed(self, *, since: bool) -> bool:
        """Whether `since` has been true at each call for longer than the limit."""
        now = time.monotonic()
        if not since:
            self._since_seconds = None
        elif self._since_seconds is None:
            self._since_seconds = now
        return self._since_seconds is not None and now > self._since_seconds + self._limit_seconds


def start_fork_server(config: TrainConfig) -> None:
    """Have the modules of workers loaded once for all of them."""
    ensure_fork_server(
        [
            "gossipgrad.train",
            "torch._dynamo",  # the first optimizer of a process loads it, in a second
            *(["sklearn.datasets"] if config.data == "digits" and config.job is None else []),
        ]
    )
