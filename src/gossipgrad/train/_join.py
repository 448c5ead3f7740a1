"""Joining a run under way: a worker whose first act is `gg.join`, and then is a rank like any."""

import dataclasses
import json
import os
import threading
import time
import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gossipgrad import checkpoint, data
from gossipgrad.comm import check_secret

from ._config import TrainConfig
from ._device import check_device
from ._ending import Ending
from ._folder import RunDir, hold_lock, write_errors
from ._invitation import Invitation, fingerprint_of
from ._job import Job
from ._joiner import RunJoiner
from ._metrics import Event
from ._options import check_at_least, check_fields, make_plain
from ._progress import Progress
from ._rank import train_rank
from ._result import RunFailedError, exit_code_of, short_cause
from ._signals import Stops, end_at_once, hear_stops
from ._tasks import load_job
from .strategies import STRATEGIES

_POLL_SECONDS = 0.5
# For the run to be put together, once this rank has handed in.
_SUMMARY_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """Which run to join, and what is this machine's own; all else is the run's.

    Attributes:
        run: The folder of the run.
        device: Where this worker trains; None: as the run says.
        data_dir: Folder of data sets here; None: as the run says.
        threads: Threads of compute; None: as the run says.
        quiet: Show no progress.
    """

    run: Path
    device: Literal["cpu", "cuda", "auto"] | None = None
    data_dir: Path | None = None
    threads: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOutcome:
    """How joining a run ended.

    Attributes:
        exit_code: For the shell: 0 at the end of the run; 130 or 143 after Ctrl-C or SIGTERM.
        run_dir: The folder of the run.
        rank: The number that this worker had in the run.
        steps: That it made.
        samples: That it trained on.
        left: Whether it left before the others stopped.
        summary: The content of the run's `summary.json`; None if the run goes on, or was not put
            together in time.
    """

    exit_code: int
    run_dir: Path
    rank: int
    steps: int
    samples: int
    left: bool
    summary: dict[str, Any] | None = None


def join_run(options: JoinConfig) -> JoinOutcome:
    """Join a run with this process, and train in it to its end.

    It takes weights, optimizer state and its place in the run from one living rank while the
    others keep stepping, then takes its share of the samples that are left. The run's options are
    those of its `config.json`. On Ctrl-C or SIGTERM it leaves at the next step, and the run goes
    on; before it has joined, and a second time, it ends at once. If this worker outlives all
    processes that began the run, it trains to the end, and puts the run together here.

    Args:
        options: Which run, and what is this machine's own.

    Returns:
        How it ended.

    Raises:
        ValueError: The run cannot be joined, or not from here.
        RunFailedError: It could not join, or failed on the way; the message has the cause.
        GossipError: The data set is missing and could not be fetched.
    """
    config, run_dir, invitation = _find_run(options)
    assert config.nproc is not None
    assert invitation.address is not None
    progress, stop = Progress(config), threading.Event()
    ending: Ending | None = None

    def emit(event: Event) -> None:
        nonlocal ending
        event.pop("living", None)
        if event["event"] == "joined":
            assert joiner.mailbox is not None
            ending = Ending(config, run_dir, joiner.mailbox, event["rank"])
            donor = event["from_rank"]
            progress.notice(f"joined as rank {event['rank']}, with the weights of rank {donor}")
        progress.take(event)

    def on_stop(stops: Stops) -> None:
        if joiner.rank is None:
            progress.notice("stopped before this worker had joined; the run goes on")
        if joiner.rank is None or stops.insisted:
            end_at_once(stops)
        progress.notice("leaving the run, which goes on; once more to end at once")
        stop.set()

    joiner = RunJoiner(invitation.address, run_dir, stop=stop, emit=emit)
    with hold_lock(run_dir), hear_stops(on_stop) as stops, closing(progress), closing(joiner):
        try:
            job = load_job(config)
            _check_data(config, job, invitation)
            result = train_rank(
                config,
                job,
                run_dir,
                rank=0,
                world_size=config.nproc,
                stop=stop,
                emit=emit,
                joiner=joiner,
            )
            assert ending is not None, "it has joined"
            ending.hand_in({"result": result.to_json()})
            outcome = None if result.left else ending.finish()
        except Exception as error:
            if ending is not None:
                ending.hand_in({"cause": f"failed: {short_cause(error)}"})
            raise RunFailedError(_describe_failure(error, run_dir, joiner.rank)) from error
        finally:
            if ending is not None:
                ending.close()
    summary = None if outcome is None else outcome.summary
    if summary is None and not result.left:
        summary = _await_summary(run_dir)
    return JoinOutcome(
        exit_code=exit_code_of(stops.first if result.stopped else None),
        run_dir=run_dir.path,
        rank=result.rank,
        steps=result.steps,
        samples=result.samples,
        left=result.left,
        summary=summary,
    )


def _find_run(options: JoinConfig) -> tuple[TrainConfig, RunDir, Invitation]:
    """The run to join, as a worker here trains in it, and its invitation; gets its data ready."""
    run_dir = RunDir(options.run)
    if not run_dir.config.exists():
        raise ValueError(
            f"{run_dir.path} holds no run: name the folder that a run which is training writes to, "
            "its --out."
        )
    config = TrainConfig.from_file(run_dir.config, same_run=True)
    own = {name: getattr(options, name) for name in ("device", "data_dir", "threads")}
    config = dataclasses.replace(
        config,
        **{name: value for name, value in own.items() if value is not None},
        quiet=options.quiet,
        wandb=None,
        trace=0,  # of steps near the start of the run
    )
    config = config.resolved(nproc=config.nproc or 1, out=run_dir.path)
    if not config.traits.can_grow or config.shuffle != "global":
        can = " or ".join(one.name for one in STRATEGIES.values() if one.can_grow)
        raise ValueError(
            f"the run in {run_dir.path} has strategy {config.strategy} and shuffle "
            f"{config.shuffle}: only runs of strategy {can} with --shuffle global can be joined."
        )
    if (invitation := Invitation.read(run_dir)) is None:
        raise ValueError(
            f"the run in {run_dir.path} is not training. If it starts just now, try again when it "
            f"has shown its first epoch; if it is over, or was killed, {_start_again(run_dir)}."
        )
    if invitation.address is None:
        raise ValueError(f"the run in {run_dir.path} cannot be joined: {invitation.refusal}")
    check_secret()
    check_device(config)
    if config.job is None:
        data.prepare(config.data, config.data_dir)
    return config, run_dir, invitation


def _check_data(config: TrainConfig, job: Job, invitation: Invitation) -> None:
    if fingerprint_of(job) != invitation.data:
        what = f"job {config.job}" if config.job else f"data set {config.data}"
        raise ValueError(
            f"the {what} is another here than where the run was started: its model, or the number "
            "or the labels of its samples. Put the same here; --data-dir names another folder of "
            "data sets."
        )


def _describe_failure(error: Exception, run_dir: RunDir, rank: int | None) -> str:
    cause = short_cause(error).rstrip(".")
    if rank is None:
        where = run_dir.join_errors(os.getpid())
        what = (
            f"could not join the run in {run_dir.path}: {cause}; if it was killed, "
            f"{_start_again(run_dir)}"
        )
    else:
        where = run_dir.errors(rank)
        what = f"rank {rank} failed: {cause}"
    if not run_dir.invitation.exists():
        what = f"the run in {run_dir.path} has ended ({what})"
    return f"{what} (traceback in {where})" if write_errors(where, traceback.format_exc()) else what


def _start_again(run_dir: RunDir) -> str:
    if checkpoint.steps(run_dir.checkpoints):
        return f"go on with it by `gossipgrad train --resume {run_dir.path}`"
    return f"begin another like it by `gossipgrad train --config {run_dir.config}`"


def _await_summary(run_dir: RunDir) -> dict[str, Any] | None:
    deadline = time.monotonic() + _SUMMARY_SECONDS
    while not run_dir.summary.exists():
        if time.monotonic() > deadline or not run_dir.partial.exists():
            return None
        time.sleep(_POLL_SECONDS)
    return json.loads(run_dir.summary.read_text())
