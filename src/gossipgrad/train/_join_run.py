"""Joining a run under way: one call, some workers of this machine."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gossipgrad.launch import Launched, Rendezvous, Worker, launch

from ._config import TrainConfig
from ._ending import Ending, put_together_orphan
from ._files import write_errors
from ._invitation import Invitation, fingerprint_of
from ._joining import JoinConfig, find_run
from ._layout import RunDir
from ._lock import hold_lock
from ._metrics import Event
from ._newcomer import Newcomer
from ._progress import make_progress
from ._rank import train_rank
from ._result import RankResult, RunFailedError, after_checks, exit_code_of, short_cause
from ._run import Timer, start_fork_server
from ._signals import Stops, end_at_once, hear_stops
from ._tasks import load_job
from ._worker import silence
from ._world import find_world, open_store

_POLL_SECONDS = 0.1
# For whoever puts the run together, when the last rank here has handed in.
_SUMMARY_SECONDS = 60.0
# For a worker to end after the run, or after a signal: one that still runs stands still.
_OVER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOutcome:
    """How joining a run ended.

    Attributes:
        exit_code: For the shell: 0 when all workers came to the end of the run; 130 if they left it
            after Ctrl-C, and 143 after SIGTERM; else 1 when one has failed, though others came to
            the end.
        run_dir: The folder of the run.
        parts: Of each worker that joined and came to its end: its "rank", its "steps" and
            "samples", whether it "left" before the others stopped, and whether it is "late": the
            run was put together without it, for it had ended as this worker came.
        summary: The content of the run's `summary.json`; None if it goes on, or was not put
            together in time.
        failures: Why workers did not come to their end, each in words that begin with which.
    """

    exit_code: int
    run_dir: Path
    parts: list[dict[str, Any]]
    summary: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)


def join_run(options: JoinConfig) -> JoinOutcome:
    """Start workers on this machine that join a run, and train in it to its end.

    Each takes weights, optimizer state and its place in the run from one living rank while the
    others keep stepping, then takes its share of the samples that are left. The run's options are
    those of its `config.json`. It goes on without these workers when they leave by Ctrl-C or
    SIGTERM, or die. If they outlive all processes that began the run, they train to its end, and
    put it together here.

    Like every program that starts processes with multiprocessing, a script that calls this keeps
    the call under `if __name__ == "__main__":`.

    Args:
        options: Which run, and what is this machine's own.

    Returns:
        How it ended.

    Raises:
        ValueError: The run cannot be joined; nothing was started.
        RunFailedError: No worker has joined, or all of them failed.
        GossipError: The data set is missing and could not be fetched.
    """
    config, run_dir, invitation = find_run(options)
    with hold_lock(run_dir), Rendezvous(options.nproc) as rendezvous:
        told = {"config": config.to_json(), "invitation": asdict(invitation)}
        rendezvous.store.set("join", json.dumps(told))
        start_fork_server(config)
        launched = launch(
            join_main,
            rendezvous,
            grace_seconds=float("inf"),  # a second signal ends them
            supervise=_Supervisor(run_dir),
            describe=lambda end: _end_of(rendezvous.store, end.rank).get("cause", end.cause),
        )
        results, failures = _ends(rendezvous.store, launched, run_dir)
        if failures and not results and launched.stopped_by is None:
            if run_dir.invitation.exists():
                raise RunFailedError(failures[0])
            raise RunFailedError(
                f"the run in {run_dir.path} came to its end meanwhile ({failures[0]})"
            )
        summary = None
        if results:
            with after_checks():
                summary = put_together_orphan(config, run_dir, results)
    if summary is None and not all(result.left for result in results.values()):
        summary = _await_summary(run_dir)
    cut_short = not results or any(result.stopped for result in results.values())
    return JoinOutcome(
        exit_code=exit_code_of(launched.stopped_by if cut_short else None) or int(bool(failures)),
        run_dir=run_dir.path,
        parts=[
            {
                "rank": rank,
                "steps": result.steps,
                "samples": result.samples,
                "left": result.left,
                "late": summary is not None and rank not in _counted(summary),
            }
            for rank, result in sorted(results.items())
        ],
        summary=summary,
        failures=failures,
    )


def join_main() -> int:
    """Body of a worker that joins a run, as the launcher has left it in the store; never returns.

    A signal has it leave the run at the next step, in order; before it has joined, and a second
    time, it ends it.
    """
    world = find_world(os.environ)
    assert world is not None, "the launcher sets RANK and WORLD_SIZE"
    silence(world)
    store = open_store(world.rank, world.world_size)
    told = json.loads(store.get("join"))
    place = told["invitation"].pop("store")
    invitation = Invitation(**told["invitation"], store=None if place is None else tuple(place))
    joiner = _Joiner(TrainConfig.from_json(told["config"]), invitation, number=world.rank)
    with hear_stops(joiner.on_stop):
        end = joiner.run()
    store.set(f"end{world.rank}", json.dumps(end))
    sys.stdout.flush()
    sys.stderr.flush()
    # A broken process group may hang in its own teardown.
    os._exit(int("cause" in end))


class _Joiner:
    """A worker that joins."""

    def __init__(self, config: TrainConfig, invitation: Invitation, *, number: int) -> None:
        assert config.out is not None
        self._config, self._run_dir = config, RunDir(config.out)
        self._invitation, self._number = invitation, number
        self._progress = make_progress(config, 1)
        self._stop = threading.Event()
        self._rank: int | None = None

    def on_stop(self, stops: Stops) -> None:
        """Take a signal."""
        if self._rank is None or stops.insisted:
            end_at_once(stops)
        self._progress.notice("leaving the run, which goes on; once more to end at once")
        self._stop.set()

    def run(self) -> dict[str, Any]:
        """Join, train and hand in; gives the result, or the cause why there is none."""
        try:
            result = self._train()
        except Exception as error:
            rank = self._rank
            where = self._run_dir.join_errors(os.getpid())
            where = where if rank is None else self._run_dir.errors(rank)
            write_errors(where, traceback.format_exc())
            return {"cause": f"failed: {short_cause(error)}", "rank": rank, "trace": str(where)}
        finally:
            self._progress.close()
        return {"result": result.to_json(), "rank": self._rank}

    def _emit(self, event: Event) -> None:
        event.pop("living", None)
        if event["event"] == "joined":
            self._rank = event["rank"]
            self._progress.notice(
                f"joined as rank {event['rank']}, with the weights of rank {event['from_rank']}"
            )
        if self._number == 0 or event["event"] == "checkpoint":
            self._progress.take(0, event)

    def _train(self) -> RankResult:
        config, run_dir, invitation = self._config, self._run_dir, self._invitation
        job = load_job(config)
        if fingerprint_of(job) != invitation.data:
            what = f"job {config.job}" if config.job else f"data set {config.data}"
            raise ValueError(
                f"the {what} is another here than where the run was started: its model, or the "
                "number or the labels of its samples. Put the same here; --data-dir names another "
                "folder of data sets."
            )
        assert invitation.address is not None
        assert config.nproc is not None
        newcomer = Newcomer(invitation.address, run_dir, stop=self._stop, emit=self._emit)
        with closing(newcomer):
            try:
                result = train_rank(
                    config,
                    job,
                    run_dir,
                    rank=self._number,
                    world_size=config.nproc,
                    stop=self._stop,
                    emit=self._emit,
                    newcomer=newcomer,
                )
            except Exception as error:
                self._hand_in(newcomer.mailbox, {"cause": f"failed: {short_cause(error)}"})
                raise
            self._hand_in(newcomer.mailbox, {"result": result.to_json()})
            return result

    def _hand_in(self, mailbox: dist.Store | None, content: dict[str, Any]) -> None:
        if mailbox is not None and self._rank is not None:
            Ending(self._run_dir, mailbox, self._rank, self._config.nproc or 1).hand_in(content)


class _Supervisor:
    """Ends workers that stand still when the run is over."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._over = Timer(_OVER_SECONDS)

    def __call__(self, workers: Sequence[Worker]) -> None:
        if self._over.has_passed(since=self._run_dir.summary.exists()):
            for worker in workers:
                worker.kill()


def _end_of(store: dist.Store, number: int) -> dict[str, Any]:
    key = f"end{number}"
    return json.loads(store.get(key)) if store.check([key]) else {}


def _ends(
    store: dist.Store, launched: Launched, run_dir: RunDir
) -> tuple[dict[int, RankResult], list[str]]:
    """What those who came to their end handed in, by rank, and why others did not."""
    results, failures = {}, []
    for number, process in launched.exits.items():
        end = _end_of(store, number)
        if "result" in end:
            results[end["rank"]] = RankResult.from_json(end["result"])
        elif process.code and process.code != exit_code_of(launched.stopped_by):
            rank = end.get("rank")
            name = f"worker {number}" if rank is None else f"rank {rank}"
            trace = f" (traceback in {end['trace']})" if "trace" in end else ""
            failures.append(f"{name} {end.get('cause', process.cause).rstrip('.')}{trace}")
    return results, failures


def _counted(summary: dict[str, Any]) -> set[int]:
    """Whose results the run has, of those that joined it."""
    return {one["rank"] for one in summary["joined"] if one["end"] != "lost"}


def _await_summary(run_dir: RunDir) -> dict[str, Any] | None:
    deadline = time.monotonic() + _SUMMARY_SECONDS
    while not run_dir.summary.exists():
        if time.monotonic() > deadline or not run_dir.partial.exists():
            return None
        time.sleep(_POLL_SECONDS)
    return json.loads(run_dir.summary.read_text())
