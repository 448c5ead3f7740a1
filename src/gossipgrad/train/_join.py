"""Joining a run under way: whether it can be joined, and starting the workers that do."""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from gossipgrad import checkpoint, data
from gossipgrad.comm import check_secret
from gossipgrad.launch import Launched, Rendezvous, Worker, launch

from ._config import TrainConfig
from ._device import check_device
from ._invitation import Invitation
from ._joiner import join_main
from ._layout import RunDir
from ._lock import hold_lock
from ._options import check_at_least, check_fields, make_plain
from ._result import RankResult, RunFailedError, exit_code_of
from ._run import Timer, start_fork_server
from .strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """Which run to join, and what is this machine's own; all else is the run's.

    Attributes:
        run: The folder of the run.
        nproc: Workers to start here.
        device: Where they train; None: as the run says.
        data_dir: Folder of data sets here; None: as the run says.
        threads: Threads of compute of each; None: as the run says.
        quiet: Show no progress.
    """

    run: Path
    nproc: int = 1
    device: Literal["cpu", "cuda", "auto"] | None = None
    data_dir: Path | None = None
    threads: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "nproc", "threads")


def find_run(options: JoinConfig) -> tuple[TrainConfig, RunDir, Invitation]:
    """The run to join, as its workers here train in it, and its invitation; gets its data ready.

    Raises:
        ValueError: It cannot be joined, or not from here.
        GossipError: The data set is missing and could not be fetched.
    """
    run_dir = RunDir(options.run)
    _check_is_run(run_dir)
    invitation = Invitation.read(run_dir)
    if invitation is not None and invitation.version != version("gossipgrad"):
        raise ValueError(
            f"the run in {run_dir.path} is one of gossipgrad {invitation.version}, and here is "
            f"{version('gossipgrad')}: install the same."
        )
    config = _config_of(options, run_dir)
    _check_can_grow(config, run_dir)
    if invitation is None:
        raise ValueError(f"the run in {run_dir.path} {_why_not_invited(run_dir)}")
    if invitation.address is None:
        raise ValueError(f"the run in {run_dir.path} cannot be joined: {invitation.refusal}")
    check_secret(None)
    check_device(config)
    _knock(invitation, run_dir)
    if config.job is None:
        data.prepare(config.data, config.data_dir)
    return config, run_dir, invitation


def _check_is_run(run_dir: RunDir) -> None:
    if not run_dir.config.exists():
        what = "holds no run" if run_dir.path.is_dir() else "is no folder"
        raise ValueError(
            f"{run_dir.path} {what}: name the folder that a run which is training writes to, its "
            "--out."
        )


def _config_of(options: JoinConfig, run_dir: RunDir) -> TrainConfig:
    config = TrainConfig.from_file(run_dir.config, same_run=True)
    own = {name: getattr(options, name) for name in ("device", "data_dir", "threads")}
    config = dataclasses.replace(
        config,
        **{name: value for name, value in own.items() if value is not None},
        quiet=options.quiet,
        wandb=None,
        trace=0,  # of steps near the start of the run
    )
    return config.resolved(nproc=config.nproc or 1, out=run_dir.path)


def _check_can_grow(config: TrainConfig, run_dir: RunDir) -> None:
    if not config.traits.can_grow:
        can = " or ".join(one.name for one in STRATEGIES.values() if one.can_grow)
        raise ValueError(
            f"the run in {run_dir.path} has strategy {config.strategy}, and its ranks are those it "
            f"was started with: only runs of strategy {can} can be joined."
        )
    if config.shuffle != "global":
        has = "moves around a ring of" if config.shuffle == "ring" else "belongs to one of"
        raise ValueError(
            f"the run in {run_dir.path} has shuffle {config.shuffle}: every sample {has} the ranks "
            "that were there at the start, and there is none for another. Only runs with --shuffle "
            "global can be joined."
        )


def _why_not_invited(run_dir: RunDir) -> str:
    if run_dir.partial.exists():
        return (
            "is not training: it starts or ends just now, or was killed. If it starts, try again "
            f"when it has shown its first epoch; after a kill {_begin_again(run_dir)}"
        )
    if run_dir.summary.exists():
        return f"is over: {_begin_again(run_dir)}"
    return f"has failed, or was stopped before it began: {_begin_again(run_dir)}"


def _begin_again(run_dir: RunDir) -> str:
    if checkpoint.steps(run_dir.checkpoints):
        return f"go on with it by `gossipgrad train --resume {run_dir.path}`."
    return f"begin another like it by `gossipgrad train --config {run_dir.config}`."


def _knock(invitation: Invitation, run_dir: RunDir) -> None:
    """Refuse a run whose store does not answer, before workers have loaded anything."""
    if invitation.store is None:
        return
    host, port = invitation.store
    try:
        invitation.knock()
    except OSError as error:
        raise ValueError(
            f"nobody listens at {host}:{port}, where the run in {run_dir.path} has its store "
            f"({error.strerror or error}): it was killed, or is out of reach from this machine. If "
            f"it was killed, {_begin_again(run_dir)}"
        ) from error


_POLL_SECONDS = 0.1
# For the run to be put together, when the last rank here has handed in.
_SUMMARY_SECONDS = 60.0
# For a worker to end after the run, or after a signal: one that still runs hangs.
_OVER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOutcome:
    """How joining a run ended.

    Attributes:
        exit_code: For the shell: 0 when all workers reached the end of the run; 130 if they left it
            after Ctrl-C, and 143 after SIGTERM; else 1 when one has failed, though others reached
            the end.
        run_dir: The folder of the run.
        parts: Of each worker that joined and reached its end: its "rank", its "steps" and
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
        shared = {"config": config.to_json(), "invitation": asdict(invitation)}
        rendezvous.store.set("join", json.dumps(shared))
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
            raise RunFailedError(f"the run in {run_dir.path} ended meanwhile ({failures[0]})")
    summary = None
    if not all(result.left for result in results.values()):
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
    """What the workers that reached their end handed in, by rank, and why others did not."""
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
