"""Starts workers on this machine, watches over them, and passes Ctrl-C on."""

import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import TypeGuard

import torch.distributed as dist

from ._config import TrainConfig
from ._joined import collect_joined, read_file
from ._layout import RunDir
from ._progress import Progress
from ._result import RankResult, RunFailedError
from ._signals import Stops, catch_stops
from ._starting import start_workers
from ._stop_word import StopWord
from ._worker import LOOPBACK, WorkerSpec, group_store, worker_main
from ._worker_handle import Failure, WorkerHandle
from .strategies import GROUP

_POLL_SECONDS = 0.1
# When one rank of an all-reduce is lost the others fail too; wait for the one that was first.
_CAUSE_GRACE_SECONDS = 1.0
# One that goes on just then is told by its own session that it was given up.
_GIVEN_UP_GRACE_SECONDS = 3.0
# No less, for machines that are busy.
_SILENT_SECONDS = 10.0
# When nobody is left to wait for them: as long as their collectives would wait for a rank.
_ALL_SILENT_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """How a run of local workers went.

    Attributes:
        results: Of the ranks that came to their end.
        failures: Of those that were lost.
        stopped_by: The signal that ended the run early, if one did.
        begun: Whether a rank had begun to train.
    """

    results: dict[int, RankResult]
    failures: dict[int, Failure]
    stopped_by: signal.Signals | None
    begun: bool


class _InsistedError(BaseException):
    """A second signal came while a worker was being started, which may take seconds."""


def launch(config: TrainConfig, run_dir: RunDir, progress: Progress) -> Launched:
    """Run `config.nproc` workers to their end, or to the stop by SIGINT or SIGTERM.

    Workers come out of a fork server that has torch loaded, talk over loopback, and find each
    other in a store that lives in this process, so that no worker is needed more than the others.
    When one is lost, gossip and local runs go on without it, and if it is killed or stands still
    before anybody trains, they start again; an all-reduce run ends. One that stands still is ended
    if others can do nothing but wait for it (at the start, or when they are over), or a signal asks
    for the end. If all that are left stand still, nobody waits for them: that is told, and they
    have half an hour to go on. Those who joined the run are awaited at its end, for a while, or as
    long as they train on if they alone are left. The first signal asks the workers to stop at the
    next step and keeps what was reached; the second kills them. A signal before the first step ends
    the run. No worker outlives this call.

    Raises:
        RunFailedError: A worker could not start, one of an all-reduce was lost, or all were.
    """
    starting = True

    def on_stop(stops: Stops) -> None:
        if starting and stops.insisted:
            raise _InsistedError
        if starting:
            progress.notice("stopping; once more to stop at once")

    absent: dict[int, Failure] = {}
    with catch_stops(on_stop) as stops, hosted_store() as port:
        while True:
            workers: list[WorkerHandle] = []
            starting = True
            try:
                for worker in _start(config, run_dir, port, stops, absent):
                    workers.append(worker)  # noqa: PERF402  (those started are ended, come what may)
                starting = False
                _supervise(workers, config, progress, stops)
            except _InsistedError:
                pass
            finally:
                starting = False
                # All at once: one that sees another go would complain of it.
                for worker in workers:
                    worker.kill_unless_done()
                for worker in workers:
                    worker.join()
            lost = {} if stops.first is not None else _lost_at_start(workers, config)
            if not lost:
                break
            for failure in lost.values():
                progress.lose(failure.rank)
                progress.notice(
                    f"rank {failure.rank} {failure.cause} before its first step; starting again "
                    "without it"
                )
            absent |= lost
        results = {worker.rank: worker.result for worker in workers if worker.result is not None}
        joined, missing = collect_joined(
            run_dir,
            results,
            read=partial(read_file, run_dir),
            hurry=_Hurry(stops, port, set(range(config.nproc or 0)) - set(absent), results),
        )
    failures = {worker.rank: worker.failure for worker in workers if worker.failure is not None}
    failures |= {rank: Failure(rank=rank, cause=why, started=True) for rank, why in missing.items()}
    launched = Launched(
        results=results | joined,
        failures={**absent, **failures},
        stopped_by=stops.first,
        begun=any(worker.ready for worker in workers),
    )
    _check_end(launched, config, run_dir)
    return launched


class _Hurry:
    """Whether those who joined are awaited no longer; tells them to stop if nobody else can."""

    def __init__(
        self,
        stops: Stops,
        port: int,
        members: Collection[int],
        results: Mapping[int, RankResult],
    ) -> None:
        self._stops, self._port, self._members = stops, port, members
        self._told = bool(results)  # a rank that was told to stop has said so

    def __call__(self) -> bool:
        if self._stops.first is not None and not self._told:
            self._told = True
            word = StopWord(group_store(self._port, self._members, GROUP))
            word.say()
            word.close()
        return self._stops.insisted


def _lost_at_start(workers: list[WorkerHandle], config: TrainConfig) -> dict[int, Failure]:
    """Who was killed before anybody trained, if the others can start again without them."""
    failures = [worker.failure for worker in workers if worker.failure is not None]
    killed = {failure.rank: failure for failure in failures if failure.was_killed}
    own = [failure for failure in failures if not failure.was_killed and not failure.is_consequence]
    if config.needs_every_rank or own or any(worker.ready for worker in workers):
        return {}
    return killed if len(killed) < len(workers) else {}


def _start(
    config: TrainConfig, run_dir: RunDir, port: int, stops: Stops, absent: Collection[int]
) -> Iterator[WorkerHandle]:
    assert config.nproc is not None, "resolve the configuration first"
    members = tuple(rank for rank in range(config.nproc) if rank not in absent)
    specs = [
        WorkerSpec(
            config=config,
            run_dir=run_dir,
            rank=rank,
            world_size=config.nproc,
            store_port=port,
            members=members,
        )
        for rank in members
    ]
    return start_workers(worker_main, [(spec.rank, spec) for spec in specs], config, stops)


@contextmanager
def hosted_store() -> Iterator[int]:
    """A store on loopback, for as long as the block; gives its port."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # The store closes the descriptor when it goes.
    store = dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        del store


def _supervise(
    workers: list[WorkerHandle], config: TrainConfig, progress: Progress, stops: Stops
) -> None:
    """Listen to the workers until each is over or the run is."""
    told = told_silent = False
    doomed_seconds = hopeless_seconds = None
    while running := [worker for worker in workers if not worker.over]:
        wait([worker.pipe for worker in running], timeout=_POLL_SECONDS)
        stopping = stops.first is not None
        awaited = {
            worker.rank: stopping or _is_awaited(worker, workers, config) for worker in running
        }
        for worker in running:
            worker.listen(progress, awaited=awaited[worker.rank])
        all_silent_seconds = _all_silent_seconds(workers, config)
        if all_silent_seconds > 0 and not told_silent:
            progress.notice(
                "all workers that are left stand still; they have "
                f"{_ALL_SILENT_SECONDS / 60:g} min to go on"
            )
        told_silent = all_silent_seconds > 0
        for worker in running:
            if (limit := _outstayed_seconds(worker, config, all_silent_seconds)) is not None:
                worker.give_up(f"stood still for {limit:g} s and was ended")
        for worker in running:
            if (lost := worker.failure) is None:
                continue
            progress.lose(lost.rank)
            if not _is_fatal(lost, config, begun=_begun(workers)):
                others = "" if all(worker.over for worker in workers) else "; the others go on"
                progress.notice(f"rank {lost.rank} {lost.cause}{others}")
        if _are_given_up(running, workers):
            hopeless_seconds = hopeless_seconds or time.monotonic() + _GIVEN_UP_GRACE_SECONDS
            if time.monotonic() > hopeless_seconds:
                for worker in running:
                    worker.give_up("stood still, and the others had taken it for dead")
                    progress.notice(f"rank {worker.rank} stood still, and was ended")
        if stops.first is not None:
            if stops.insisted or not any(worker.ready or worker.over for worker in workers):
                return
            if not told:
                told = True
                progress.notice("stopping at the next step; once more to stop at once")
                for worker in running:
                    worker.tell_to_stop()
            continue
        begun = _begun(workers)
        fatal = [
            lost for worker in workers if _is_fatal(lost := worker.failure, config, begun=begun)
        ]
        if fatal:
            doomed_seconds = doomed_seconds or time.monotonic() + _CAUSE_GRACE_SECONDS
            if not all(lost.is_consequence for lost in fatal) or time.monotonic() > doomed_seconds:
                return


def _is_awaited(worker: WorkerHandle, workers: list[WorkerHandle], config: TrainConfig) -> bool:
    """Whether others can do nothing but wait for this one, should it stand still.

    Ranks that train give up one that is silent by themselves, if the strategy lets them.
    """
    others = [other for other in workers if other is not worker]
    if any(other.shows_life for other in others):
        return config.needs_links and (not worker.ready or not config.traits.communicates)
    return any(other.result is not None for other in others)


def _all_silent_seconds(workers: list[WorkerHandle], config: TrainConfig) -> float:
    """For how long all have stood still, 0 if one does not, or has come to its end."""
    living = [worker for worker in workers if worker.failure is None]
    if not living or not all(
        worker.heard
        and not worker.over
        and worker.silent_seconds > _silence_limit_seconds(worker, config)
        for worker in living
    ):
        return 0.0
    return min(worker.silent_seconds for worker in living)


def _outstayed_seconds(
    worker: WorkerHandle, config: TrainConfig, all_silent_seconds: float
) -> float | None:
    """How long one that stands still was waited for at most, None if it may still go on."""
    limit = _silence_limit_seconds(worker, config)
    if worker.over:
        return None
    if worker.awaited_seconds > limit or (not worker.heard and worker.silent_seconds > limit):
        return limit
    return _ALL_SILENT_SECONDS if all_silent_seconds > _ALL_SILENT_SECONDS else None


def _silence_limit_seconds(worker: WorkerHandle, config: TrainConfig) -> float:
    limit = max(_SILENT_SECONDS, config.lost_after_seconds)
    return limit if worker.heard else max(limit, config.start_seconds)


def _are_given_up(running: list[WorkerHandle], workers: list[WorkerHandle]) -> bool:
    """Whether none runs any more but those whom the others took for dead."""
    results = [worker.result for worker in workers if worker.result is not None]
    given_up = {int(rank) for result in results for rank in result.lost}
    return bool(given_up) and all(worker.rank in given_up for worker in running)


def _begun(workers: list[WorkerHandle]) -> bool:
    return any(worker.ready for worker in workers)


def _is_fatal(failure: Failure | None, config: TrainConfig, *, begun: bool) -> TypeGuard[Failure]:
    """Whether the run cannot go on without this worker, `begun` by others or not."""
    if failure is None:
        return False
    own = not failure.was_killed and not failure.is_consequence
    unready = not failure.started and (own or not begun)
    return unready or failure.is_fatal or config.needs_every_rank


def _check_end(launched: Launched, config: TrainConfig, run_dir: RunDir) -> None:
    """Raise if there is nothing to keep of the run, naming the worker that fell first."""
    failures = sorted(launched.failures.values(), key=lambda lost: lost.is_consequence)
    if launched.stopped_by is not None and (launched.results or not failures):
        return
    fatal = [lost for lost in failures if _is_fatal(lost, config, begun=launched.begun)]
    if not fatal and launched.results:
        return
    first = (fatal or failures)[0]
    what = first.cause.rstrip(".")
    if not first.started:
        verb, colon, rest = what.partition(":")
        what = f"{verb} before its first step{colon}{rest}"
    elif config.needs_every_rank and not first.is_fatal:
        what += f"; strategy {config.strategy} needs every rank, so the run is over"
    where = run_dir.errors(first.rank)
    trace = f" (traceback in {where})" if where.exists() else ""
    raise RunFailedError(f"rank {first.rank} {what}{trace}")
