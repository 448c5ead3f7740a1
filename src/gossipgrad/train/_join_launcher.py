"""Starts workers on this machine that join a run, and watches over them."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from ._config import TrainConfig
from ._invitation import Invitation
from ._join_worker import JoinSpec, join_main
from ._joining import JoinConfig
from ._layout import RunDir
from ._metrics import Event
from ._progress import Progress
from ._result import RankResult, RunFailedError
from ._signals import Stops, catch_stops
from ._starting import start_workers
from ._worker_handle import WorkerHandle

_POLL_SECONDS = 0.1
# When the run is over, or this worker is told to leave it.
_SILENT_SECONDS = 10.0
# The run gives it up long before.
_ALWAYS_SILENT_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Joiners:
    """How workers that joined a run went.

    Attributes:
        results: Of those that came to their end, by rank.
        failures: Why others did not, in words that begin with the worker.
        stopped_by: The signal that had them leave, if one did.
    """

    results: dict[int, RankResult]
    failures: list[str]
    stopped_by: signal.Signals | None


class _JoinProgress:
    """Passes events on, and says which rank a worker has become."""

    def __init__(self, progress: Progress) -> None:
        self.ranks: dict[int, int] = {}
        self._progress = progress

    def take(self, number: int, event: Event) -> None:
        if event["event"] == "joined":
            self.ranks[number] = event["rank"]
            self._progress.notice(
                f"joined as rank {event['rank']}, with the weights of rank {event['from_rank']}"
            )
        self._progress.take(number, event)

    def name(self, number: int) -> str:
        rank = self.ranks.get(number)
        return f"worker {number}" if rank is None else f"rank {rank}"


def launch_joiners(
    options: JoinConfig,
    config: TrainConfig,
    run_dir: RunDir,
    invitation: Invitation,
    progress: Progress,
) -> Joiners:
    """Run workers that join, until each is over; no one of them needs another.

    The first signal has those that train leave the run at the next step, in order, and ends the
    others; a second one ends all at once. No worker outlives this call.

    Raises:
        RunFailedError: A worker could not be started, or none came to its end though no signal
            was given; with the first reason.
    """
    shown = _JoinProgress(progress)
    specs = [
        (number, JoinSpec(config=config, run_dir=run_dir, invitation=invitation, number=number))
        for number in range(options.nproc)
    ]
    workers: list[WorkerHandle] = []
    with catch_stops() as stops:
        try:
            for worker in start_workers(join_main, specs, config, stops, called="worker"):
                workers.append(worker)  # noqa: PERF402  (those started are ended, come what may)
            _supervise(workers, run_dir, shown, progress, stops)
        finally:
            for worker in workers:
                worker.kill_unless_done()
            for worker in workers:
                worker.join()
    failures = [
        f"{shown.name(worker.rank)} {worker.failure.cause.rstrip('.')}"
        for worker in workers
        if worker.failure is not None
    ]
    joiners = Joiners(
        results={worker.result.rank: worker.result for worker in workers if worker.result},
        failures=failures,
        stopped_by=stops.first,
    )
    if failures and not joiners.results and stops.first is None:
        raise RunFailedError(_first_of(workers, shown, run_dir))
    return joiners


def _supervise(
    workers: Sequence[WorkerHandle],
    run_dir: RunDir,
    shown: _JoinProgress,
    progress: Progress,
    stops: Stops,
) -> None:
    """Listen to the workers until each is over, or all are to end at once."""
    told = False
    over_seconds: float | None = None
    while running := [worker for worker in workers if not worker.over]:
        wait([worker.pipe for worker in running], timeout=_POLL_SECONDS)
        if over_seconds is None and run_dir.summary.exists():
            over_seconds = time.monotonic()
        ending = stops.first is not None or over_seconds is not None
        for worker in running:
            worker.listen(shown, awaited=ending)
            for limit, seconds in (
                (_SILENT_SECONDS, worker.awaited_seconds),
                (_ALWAYS_SILENT_SECONDS, worker.silent_seconds),
            ):
                if seconds > limit and not worker.over:
                    worker.give_up(f"stood still for {limit:g} s and was ended")
            if (lost := worker.failure) is not None:
                progress.lose(worker.rank)
                if len(workers) > 1:
                    progress.notice(f"{shown.name(worker.rank)} {lost.cause}")
        if stops.insisted:
            return
        if stops.first is not None and not told:
            told = True
            progress.notice("leaving the run, which goes on; once more to end at once")
            for worker in running:
                worker.tell_to_stop()
        if told and not any(w.rank in shown.ranks for w in workers if not w.over):
            return


def _first_of(workers: Sequence[WorkerHandle], shown: _JoinProgress, run_dir: RunDir) -> str:
    """Why the first worker failed, and where its traceback is."""
    worker = next(worker for worker in workers if worker.failure is not None)
    assert worker.failure is not None
    rank = shown.ranks.get(worker.rank)
    where = run_dir.join_errors(worker.pid or 0) if rank is None else run_dir.errors(rank)
    trace = f" (traceback in {where})" if where.exists() else ""
    return f"{shown.name(worker.rank)} {worker.failure.cause.rstrip('.')}{trace}"
