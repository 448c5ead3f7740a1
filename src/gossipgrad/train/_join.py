"""Joining a run under way: how it invites, and a worker whose first act is `gg.join`."""

import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad import checkpoint, data
from gossipgrad.comm import AskedStore, check_secret
from gossipgrad.data import ElasticBatches

from ._config import TrainConfig
from ._device import check_device
from ._finish import Ends, finish
from ._folder import RunDir, held, hold_lock, write_errors
from ._loop import Best
from ._metrics import Event
from ._options import check_at_least, check_fields, make_plain
from ._progress import Progress
from ._rank import fingerprint_of, train_rank
from ._result import RunFailedError, exit_code_of, short_cause
from ._setup import RankInputs
from ._signals import Stops, catch_stops, end_at_once
from ._start import MAILBOX
from ._state import LoopState
from ._tasks import load_job
from .strategies import STRATEGIES, RunningStrategy, StopFlag

_JOIN_SECONDS = 300.0
_POLL_SECONDS = 0.5
_ASK_SECONDS = 0.1
_STORE_SECONDS = 2.0


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
        summary: The content of the run's `summary.json`; None if the run continues, or was not put
            together here.
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

    It takes weights, optimizer state and its position in the run from one living rank while the
    others keep stepping, then takes its share of the samples that are left. The run's options are
    those of its `config.json`. On Ctrl-C or SIGTERM it leaves at the next step, and the run
    continues; before it has joined, and a second time, it ends at once. If this worker outlives all
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
    progress, stop = Progress(config), threading.Event()

    def emit(event: Event) -> None:
        event.pop("living", None)
        if event["event"] == "joined":
            donor = event["from_rank"]
            progress.notice(f"joined as rank {event['rank']}, with the weights of rank {donor}")
        progress.take(event)

    def on_stop(stops: Stops) -> None:
        if joiner.ends is None:
            progress.notice("stopped before this worker had joined; the run continues")
        if joiner.ends is None or stops.insisted:
            end_at_once(stops)
        progress.notice("leaving the run, which continues; once more to end at once")
        stop.set()

    joiner = RunJoiner(invitation, run_dir, stop=stop, emit=emit)
    with hold_lock(run_dir), catch_stops(on_stop) as stops, closing(progress), closing(joiner):
        try:
            job = load_job(config)
            if fingerprint_of(job) != invitation["data"]:
                raise ValueError(
                    f"the {f'job {config.job}' if config.job else f'data set {config.data}'} is "
                    "another here than where the run was started: its model, or the number or the "
                    "targets of its samples. Put the same here; --data-dir names another folder of "
                    "data sets."
                )
            result = train_rank(
                RankInputs(
                    config=config,
                    job=job,
                    run_dir=run_dir,
                    rank=0,
                    world_size=config.nproc,
                    stop=stop,
                    emit=emit,
                    joiner=joiner,
                )
            )
            assert joiner.ends is not None, "it has joined"
            end = {"result": dataclasses.asdict(result)}
            joiner.ends.hand_in(result.rank, end)
            outcome = None if result.left else finish(config, joiner.ends, result.rank, end)
        except Exception as error:
            if joiner.ends is not None:
                joiner.ends.hand_in(joiner.rank, {"cause": f"failed: {short_cause(error)}"})
            raise RunFailedError(_describe_failure(error, run_dir, joiner)) from error
    summary = None if outcome is None else outcome.summary
    if summary is None and not result.left and run_dir.summary.exists():
        summary = json.loads(run_dir.summary.read_text())
    return JoinOutcome(
        exit_code=exit_code_of(stops.first if result.stopped else None),
        run_dir=run_dir.path,
        rank=result.rank,
        steps=result.steps,
        samples=result.samples,
        left=result.left,
        summary=summary,
    )


def _find_run(options: JoinConfig) -> tuple[TrainConfig, RunDir, Mapping[str, Any]]:
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
    invitation = _read_invitation(run_dir)
    if invitation["address"] is None:
        raise ValueError(f"the run in {run_dir.path} cannot be joined: {invitation['refusal']}")
    check_secret()
    check_device(config)
    if config.job is None:
        data.prepare(config.data, config.data_dir)
    return config, run_dir, invitation


def _read_invitation(run_dir: RunDir) -> Mapping[str, Any]:
    try:
        return json.loads(run_dir.invitation.read_text())
    except FileNotFoundError as error:
        raise ValueError(
            f"the run in {run_dir.path} is not training. If it starts just now, try again when it "
            f"has shown its first epoch; if it is over, or was killed, {_start_again(run_dir)}."
        ) from error
    except OSError as error:
        raise ValueError(
            f"cannot read {run_dir.invitation}: {error.strerror}; join as the user who started "
            "the run."
        ) from error


def _describe_failure(error: Exception, run_dir: RunDir, joiner: "RunJoiner") -> str:
    cause = short_cause(error).rstrip(".")
    if joiner.ends is not None:
        where = write_errors(run_dir.errors(joiner.rank))
        return f"rank {joiner.rank} failed: {cause}{where}"
    where = write_errors(run_dir.join_errors(os.getpid()))
    return (
        f"could not join the run in {run_dir.path}: {cause}; if it has ended, or was killed, "
        f"{_start_again(run_dir)}{where}"
    )


def _start_again(run_dir: RunDir) -> str:
    if checkpoint.steps(run_dir.checkpoints):
        return f"continue it by `gossipgrad train --resume {run_dir.path}`"
    return f"begin another like it by `gossipgrad train --config {run_dir.config}`"


class RunJoiner:
    """Joins a run, and stops with it, or leaves it before: it polls whether the run stops."""

    def __init__(
        self,
        invitation: Mapping[str, Any],
        run_dir: RunDir,
        *,
        stop: threading.Event,
        emit: Callable[[Event], None],
    ) -> None:
        self.invitation, self._run_dir = invitation, run_dir
        self._stop, self._emit = stop, emit
        self.rank = self.begun_step = 0
        self.ends: Ends | None = None  # as soon as it has joined
        self._batches: ElasticBatches | None = None
        self._run_stops = False
        self._asked_seconds = -math.inf
        self._over, self._held = threading.Event(), ExitStack()

    @property
    def leaves(self) -> bool:
        """Whether this worker is to stop, and the run is not."""
        return self._stop.is_set() and not self._run_stops

    @property
    def is_over(self) -> bool:
        """Whether the run was put together already, without this worker."""
        return self._run_dir.summary.exists()

    def enter(
        self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]
    ) -> gg.GossipSession:
        """Join; model and optimizers are then those of a living rank."""
        address = self.invitation["address"]
        session = gg.join(model, optimizers, address, **settings, timeout_seconds=_JOIN_SECONDS)
        self.rank = session.rank
        root = store = session.group.store
        while isinstance(root, dist.PrefixStore):
            root = root.underlying_store
        mailbox = AskedStore(dist.PrefixStore(MAILBOX, root), timeout_seconds=_STORE_SECONDS)
        self._held.enter_context(held(self._run_dir.rank_lock(self.rank)))
        self.ends = Ends(self._run_dir, mailbox)
        thread = threading.Thread(target=self._watch, args=(StopFlag(store),), daemon=True)
        thread.start()
        self._held.callback(thread.join)
        self._emit({"event": "joined", "rank": session.rank, "from_rank": session.joined_from})
        return session

    def make_loop_state(self, strategy: RunningStrategy, batches: ElasticBatches) -> LoopState:
        """Where the run is, by the session's position and the newest epoch in the store; local."""
        self._batches = batches
        strategy.load_state_dict(self.invitation["strategy"])
        self.begun_step = strategy.position(0)
        return LoopState.made_by_others(
            epoch=batches.newest_epoch() or 0,
            steps=self.begun_step,
            best=Best.read(self._run_dir.best),
            seconds=max(0.0, time.time() - self.invitation["began_seconds"]),
        )

    def flush(self) -> None:
        """Report which samples were used, before this worker leaves, so that no others are lost."""
        if self._batches is not None:
            self._batches.close()

    def is_behind(self) -> bool:
        """Whether the others train in an epoch that this rank has not begun; asked often."""
        now = time.monotonic()
        if self._batches is None or now - self._asked_seconds < _ASK_SECONDS:
            return False
        self._asked_seconds = now
        return self._batches.is_behind()

    def close(self) -> None:
        """Watch no more, and count as dead."""
        self._over.set()
        self._held.close()

    def _watch(self, flag: StopFlag) -> None:
        while not self._over.wait(_POLL_SECONDS):
            is_set = flag.is_set()
            if is_set or (is_set is None and self.is_over):
                self._run_stops = True
                self._stop.set()
                break
        flag.close()
