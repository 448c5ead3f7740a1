"""One call, one run, in workers started here or by torchrun or Slurm."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch.distributed as dist

from gossipgrad.comm import AskedStore
from gossipgrad.launch import Exit, Launched, Rendezvous, Worker, ensure_fork_server, launch

from ._check import check
from ._config import TrainConfig
from ._finish import End, Ends
from ._folder import RunDir, is_held, where_weights_are
from ._result import Outcome, RunFailedError, exit_code_of
from ._start import MAILBOX, Start
from ._worker import open_folder, run_in_world, worker_main
from ._world import find_world

DEFAULT_NPROC = 4
# For workers to end by themselves when the run is put together, or cannot continue.
_END_SECONDS = 10.0
_POLL_SECONDS = 0.1
_SHOW_CURSOR = "\x1b[?25h"


def run(config: TrainConfig) -> Outcome:
    """Train as `config` says and leave the run in its folder.

    Starts the workers on this machine and waits for them, or, inside a world that torchrun or
    Slurm has started, takes part in it as one rank. What can be checked is checked before a process
    starts.

    A gossip run continues when ranks die: the exported model is then the consensus of those that
    are left, and the summary tells who was lost, when, and what of the data went with them.

    Like every program that starts processes with multiprocessing, a script that calls this keeps
    the call under `if __name__ == "__main__":`.

    Args:
        config: The options.

    Returns:
        How it ended, and where the files are.

    Raises:
        ValueError: The options cannot work; nothing was started.
        GossipError: The run failed and nothing can be kept of it, or its data cannot be fetched.
        RuntimeError: A `ValueError` came up after the options were checked; it is the cause.
    """
    config.warn_of_unused()
    if (world := find_world(os.environ, nproc=config.nproc)) is not None:
        return run_in_world(config, world)
    nproc = config.nproc or DEFAULT_NPROC
    check(config, nproc, is_launcher=True)
    with ExitStack() as held:
        config, run_dir = open_folder(config, nproc, held)
        try:
            return _Launcher(config, run_dir, nproc).run()
        except ValueError as error:  # no mistake in the options: it keeps its traceback
            raise RuntimeError("the run failed after its options were checked") from error


class _Launcher:
    """Workers of a run on this machine, from their start to their end."""

    def __init__(self, config: TrainConfig, run_dir: RunDir, nproc: int) -> None:
        self._config, self._run_dir, self._nproc = config, run_dir, nproc
        self._is_doomed = False
        self._killed: set[int] = set()
        self._end_seconds: float | None = None

    def run(self) -> Outcome:
        """Start them, and wait until each is over."""
        ensure_fork_server(
            [
                "gossipgrad.train",
                "torch._dynamo",  # the first optimizer of a process loads it, in a second
            ]
        )
        with Rendezvous(self._nproc) as rendezvous:
            store = AskedStore(dist.PrefixStore(MAILBOX, rendezvous.store))
            self._start, self._ends = Start(store, 0, self._nproc), Ends(self._run_dir, store)
            self._start.open({"config": self._config.to_json(), "token": None})
            try:
                launched = launch(
                    worker_main,
                    rendezvous,
                    grace_seconds=float("inf"),  # a second signal ends them
                    supervise=self._supervise,
                    describe=self._describe,
                    island=self._config.island_size,
                )
                self._await_joined()
                return self._outcome(launched)
            finally:
                if not self._run_dir.is_complete:
                    self._ends.clean_up()
                if sys.stdout.isatty() and not self._config.quiet:
                    print(_SHOW_CURSOR, end="", flush=True)  # a killed worker may have hidden it

    def _supervise(self, workers: Sequence[Worker]) -> None:
        """End workers that nobody can wait for any more."""
        is_over = self._run_dir.report.exists() and not self._run_dir.partial.exists()
        # A signal that comes as a worker is forked is lost: the others have ended, and it waits.
        has_end = any(worker.exit is not None for worker in workers)
        self._is_doomed |= has_end and not self._start.has_begun()
        if not (is_over or self._is_doomed):
            return
        now = time.monotonic()
        self._end_seconds = self._end_seconds or now + _END_SECONDS
        for worker in workers if now > self._end_seconds else ():
            self._killed.add(worker.rank)
            worker.kill()

    def _describe(self, end: Exit) -> str | None:
        """Why a worker failed, if the others continue without it; else the run's end says it."""
        content = self._end_of(end)
        if not self._start.has_begun():
            self._start.fail(f"rank {end.rank} {content['cause']}")
            self._is_doomed = True
        self._is_doomed |= self._config.needs_every_rank or content.get("is_fatal", False)
        return None if self._is_doomed or content.get("is_consequence") else content.get("cause")

    def _end_of(self, end: Exit) -> End:
        """What a worker has handed in, else what its process ended with."""
        content = self._ends.read(end.rank)
        if content is None:
            # A rank that another one's failure ends at the start hands in nothing.
            gave_up = end.code > 0 and not self._start.has_begun()
            is_consequence = gave_up or end.rank in self._killed
            why = {"cause": end.cause, "is_consequence": is_consequence}
            content = self._ends.hand_in(end.rank, why)
        return content

    def _await_joined(self) -> None:
        """Keep the store for those who joined and still train, until the run is put together."""
        run_dir = self._run_dir
        living = [rank for rank in run_dir.ranks_seen() if rank >= self._nproc]
        while living and not run_dir.is_complete:
            living = [rank for rank in living if is_held(run_dir.rank_lock(rank), otherwise=False)]
            time.sleep(_POLL_SECONDS)

    def _outcome(self, launched: Launched) -> Outcome:
        run_dir, stopped_by = self._run_dir, launched.stopped_by
        if run_dir.is_complete:
            summary = json.loads(run_dir.summary.read_text())
            return Outcome(
                exit_code=exit_code_of(stopped_by if summary["interrupted"] else None),
                run_dir=run_dir.path,
                summary=summary,
                report=run_dir.report,
            )
        if stopped_by is not None:
            code = exit_code_of(stopped_by)
            return Outcome(exit_code=code, begun=self._start.has_begun(), run_dir=run_dir.path)
        raise RunFailedError(self._first_failure(launched))

    def _first_failure(self, launched: Launched) -> str:
        """Which worker failed first and why, one whose failure was not due to another's."""
        ends = {rank: self._end_of(end) for rank, end in launched.exits.items()}
        causes = {rank: content for rank, content in ends.items() if "cause" in content}
        what = "all workers ended, and none has written the results"
        if causes:
            rank, content = min(
                causes.items(),
                key=lambda one: (one[1].get("is_consequence", False), one[1]["when_seconds"]),
            )
            what = f"rank {rank} {content['cause'].rstrip('.')}"
            if self._config.needs_every_rank and launched.exits[rank].code < 0:
                what += f"; strategy {self._config.strategy} needs every rank, so the run is over"
            if (where := self._run_dir.errors(rank)).exists():
                what += f" (traceback in {where})"
        if len(causes) < len(ends):
            what += f"; {where_weights_are(self._run_dir)}"
        return what
