"""What one rank does: the training loop and the evaluations around it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.checkpoint import model_tensors, write_safetensors
from gossipgrad.data import ElasticBatches
from gossipgrad.engine import Session
from gossipgrad.errors import EvictedError
from gossipgrad.second_order import SecondOrder

from ._batches import (
    AnyBatches,
    Groups,
    LoaderBatches,
    RingBatches,
    make_batches,
    notes_on,
)
from ._config import TrainConfig
from ._device import find_device
from ._evaluate import Evaluation, TestPart
from ._folder import RunDir, reserve_model, write_model
from ._job import Job, JobError
from ._loggers import open_loggers
from ._loop import Best, Loop, Passes, RunPosition
from ._metrics import Event, Metrics
from ._optimizers import make_optimizers, make_schedulers, notes_on_muon, set_step
from ._result import RankResult
from ._shrinking import note_on_widths, shrink
from ._spans import StepSpans
from ._state import Checkpoints, LoopState, begin_from_consensus, begin_resumed, seed_rank
from ._tasks import setting_of
from .strategies import Joiner, Replica, RunningStrategy

# Leaves an invitation in the folder of a run that others can join; why there is none, if so.
Invite = Callable[[Session, Job, RunDir], str | None]


class Entering(Joiner, Protocol):
    """A worker that joins the run before it trains."""

    begun_step: int
    carried: dict[str, Any]

    def enter(
        self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]
    ) -> Session: ...

    def make_loop_state(self, strategy: RunningStrategy, batches: ElasticBatches) -> LoopState: ...


def train_rank(
    config: TrainConfig,
    job: Job,
    run_dir: RunDir,
    *,
    rank: int,
    world_size: int,
    stop: threading.Event,
    emit: Callable[[Event], None],
    invite: Invite,
    groups: Groups | None = None,
    joiner: Entering | None = None,
) -> RankResult:
    """Train one replica to the end or the stop, and leave it in `run_dir` for export.

    The default process group must be there, except for `strategy` local without a ring shuffle, and
    for gossip where there are `groups`.
    Runs `threads` threads of compute. On the CPU, with the same `config` and as many ranks, a run
    repeats bit for bit, for as long as every exchange is delivered: a rank that dies, or comes too
    late, changes what others mix, and on which samples they train.
    """
    torch.set_num_threads(config.threads)
    with ExitStack() as unstarted:  # a start that comes to no step leaves, and may be tried again
        one = _Rank(
            config,
            job,
            run_dir,
            rank=rank,
            world_size=world_size,
            stop=stop,
            groups=groups,
            joiner=joiner,
            unstarted=unstarted,
        )
        checkpoints, loop_state = one.restore(emit)
        shrinking = shrink(
            config,
            job,
            one.strategy,
            one.model,
            one.optimizers,
            total_steps=one.total_steps,
            device=one.device,
        )
        rank, resumed = one.rank, None if loop_state is None else loop_state.metrics
        steps = None if resumed is None else resumed["steps"]
        loggers = open_loggers(config, run_dir, rank, resumed_steps=steps)
        with (
            Metrics(run_dir.metrics(rank), resumed=resumed, loggers=loggers) as metrics,
            closing(checkpoints),
            _saved_if_evicted(one.model, run_dir.evicted_model(rank)),
        ):
            loop = Loop(
                strategy=one.strategy,
                criterion=job.loss,
                optimizers=one.optimizers,
                schedulers=one.schedulers,
                batches=one.batches,
                position=one.position,
                test=one.test,
                device=one.device,
                epochs=config.epochs,
                total_steps=one.total_steps,
                passes=Passes(
                    accumulate=config.accumulate,
                    clip_norm=config.clip_norm,
                    amp=config.amp is not None,
                ),
                evaluate_every=config.evaluate_every,
                best=None
                if config.keep_best is None
                else Best(run_dir.best, config.keep_best, rank=rank),
                log_every=config.log_every,
                metrics=metrics,
                spans=one.spans,
                stop=stop,
                emit=emit,
                checkpoints=checkpoints,
                loop_state=loop_state,
                widths=None if shrinking is None else shrinking.widths,
            )
            one.invite(loop, invite)
            reserve_model(run_dir, rank, one.model)
            emit({"event": "ready", "total_steps": one.total_steps, "living": one.strategy.living})
            unstarted.pop_all()
            final = loop.run()
            seconds = metrics.seconds
    one.strategy.notes += note_on_widths(shrinking)
    if shrinking is not None:
        shrinking.close()
    best = None if loop.best is None else loop.best.found
    return _finish(one, metrics, final, best, seconds=seconds)


class _Rank:
    """What a rank has from its start to its end.

    To make one is a collective, but for a joiner, which joins the run here.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        run_dir: RunDir,
        *,
        rank: int,
        world_size: int,
        stop: threading.Event,
        groups: Groups | None,
        joiner: Entering | None,
        unstarted: ExitStack,
    ) -> None:
        self.config, self.job, self.run_dir, self.joiner = config, job, run_dir, joiner
        self.world_size = world_size
        self.device = find_device(config, rank=rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model = job.model.to(self.device)
        self.optimizers = make_optimizers(config, self.model, job)
        session = None
        if joiner is not None:
            settings = config.traits.session_settings(
                config.strategy_options, setting_of(config, job, world_size)
            )
            session = joiner.enter(self.model, self.optimizers, settings)
            unstarted.callback(session.close)
            rank = session.rank
        self.rank = rank
        # Equal weights at the start, but dropout masks of its own.
        seed_rank(config.seed, rank)
        epoch_batches = job.epoch_batches(config.step_samples, world_size)
        self.total_steps = config.total_steps(epoch_batches)
        self.restart: tuple[LoopState, str] | None = None
        if joiner is None:
            self.restart = begin_from_consensus(
                config,
                run_dir,
                self.model,
                self.optimizers,
                rank=rank,
                world_size=world_size,
                epoch_batches=epoch_batches,
            )
        self.spans = StepSpans(rank, num_steps=config.trace, total_steps=self.total_steps)
        for optimizer in self.optimizers:
            if isinstance(optimizer, SecondOrder):
                optimizer.recorder = self.spans
                unstarted.callback(optimizer.close)
        replica = Replica(
            model=self.model,
            optimizers=self.optimizers,
            stop=stop,
            spans=self.spans,
            groups=groups,
            session=session,
            joiner=joiner,
        )
        setting = setting_of(config, job, world_size, total_steps=self.total_steps)
        self.strategy = config.traits.build(replica, setting, config.strategy_options)
        unstarted.callback(self.strategy.close)
        self.batches = self._make_batches(groups)
        if isinstance(self.batches, RingBatches):
            unstarted.callback(self.batches.close)
        self.schedulers = make_schedulers(
            config.learning_rate,
            self.optimizers,
            steps_per_epoch=epoch_batches,
            epochs=config.epochs,
            max_steps=config.max_steps,
        )
        self.position = RunPosition(self.strategy, self.batches)
        self.test = TestPart(
            job,
            rank=rank,
            world_size=world_size,
            threads=config.batch_threads,
            device=self.device,
        )

    def _make_batches(self, groups: Groups | None) -> AnyBatches:
        job = self.job
        if job.train_loader is None:
            return make_batches(
                self.config,
                job.train_samples(),
                rank=self.rank,
                world_size=self.world_size,
                groups=groups,
                session=self.strategy.session,
            )
        batches = LoaderBatches(job.make_loader(self.rank, self.world_size))
        if len(lengths := {*self.strategy.agree(len(batches))}) > 1:
            raise JobError(
                "Job.train_loader gave loaders of unequal numbers of batches to the ranks, from "
                f"{min(lengths)} to {max(lengths)}: ranks would wait for each other. Give each as "
                "many, as with gossipgrad.data.ShardedSampler."
            )
        return batches

    def restore(self, emit: Callable[[Event], None]) -> tuple[Checkpoints, LoopState | None]:
        """Bring all where the run goes on: of a joiner, after a checkpoint, or at the start."""
        config, strategy, joiner = self.config, self.strategy, self.joiner
        checkpoints = Checkpoints(
            config,
            self.run_dir,
            rank=self.rank,
            world_size=self.world_size,
            model=self.model,
            optimizers=self.optimizers,
            strategy=strategy,
            device=self.device,
            emit=emit,
        )
        state = None
        if joiner is not None and isinstance(self.batches, ElasticBatches):
            state = joiner.make_loop_state(strategy, self.batches)
        elif self.restart is not None:
            state, note = self.restart
            strategy.skip_steps(state.metrics["steps"])
            strategy.notes.append(note)
        elif config.resume is not None:
            state = checkpoints.resume()
            strategy.notes.append(f"resumed from the checkpoint of step {config.resume_step}")
            if config.shuffle == "ring":
                strategy.notes.append(
                    "the ring shuffle began again with the shards of the start, so some samples "
                    "were used twice in that epoch"
                )
        checkpoints.begin(state, None if joiner is None else joiner.carried["checkpoint_base"])
        if state is not None:
            steps = state.metrics["steps"]
            self.position = RunPosition(strategy, self.batches, state.metrics)
            set_step(self.schedulers, self.position.at(steps))
            self.spans.set_step(steps)
        is_new = state is not None and state.metrics["offset"] is None
        begin_resumed(config, self.run_dir, rank=self.rank, is_new=is_new)
        return checkpoints, state

    def invite(self, loop: Loop, invite: Invite) -> None:
        """Hand joiners what they need; the lowest rank invites them."""
        session = self.strategy.session
        if session is None:
            return
        session.carry = loop.carried
        is_lowest = session.rank == min(session.membership.living)
        if self.config.shuffle == "global" and is_lowest:
            why = invite(session, self.job, self.run_dir)
            self.strategy.notes += [] if why is None else [why]


def _finish(
    one: _Rank,
    metrics: Metrics,
    final: Evaluation,
    best: dict[str, Any] | None,
    *,
    seconds: float,
) -> RankResult:
    """Leave the model for export, release all, and count what the rank has done."""
    strategy, batches, joiner, model = one.strategy, one.batches, one.joiner, one.model
    if not strategy.has_left:
        one.run_dir.invitation.unlink(missing_ok=True)
    traffic, lost_ranks = strategy.traffic(), strategy.lost_ranks()
    own_accuracy = one.test.accuracy(model) if strategy.replicas_differ else final.accuracy
    shares = shuffle = None
    if isinstance(batches, ElasticBatches):
        if not strategy.has_left:
            batches.close()
        shares = batches.stats()
    if isinstance(batches, LoaderBatches) and lost_ranks:
        strategy.notes.append("no rank trained on the rest of the batches of lost ranks")
    strategy.close()
    for optimizer in one.optimizers:
        if isinstance(optimizer, SecondOrder):
            strategy.notes.append(f"roots: {optimizer.refresh_stats}")
            optimizer.close()
    if isinstance(batches, RingBatches):
        batches.close()
        shuffle = batches.stats()
    # A run that is over, and did not wait, takes no model of one that joined any more.
    with nullcontext() if joiner is None else suppress(FileNotFoundError):
        write_model(one.run_dir, one.rank, final.weights)
    try:
        one.spans.save(one.run_dir.rank_trace(one.rank))
    except FileNotFoundError:
        pass
    except OSError as error:  # a full disk takes the trace, and never the model
        strategy.notes.append(f"the trace lacks this rank: {error.strerror}")
    begun = 0 if joiner is None else joiner.begun_step
    return RankResult(
        rank=one.rank,
        steps=metrics.steps - begun,
        steps_counted=metrics.steps - max(begun, metrics.counted_from),
        epochs=metrics.epochs,
        samples=metrics.samples,
        seconds=seconds,
        train_seconds=metrics.train_seconds,
        accuracy=final.accuracy,
        own_accuracy=own_accuracy,
        is_consensus=final.is_consensus,
        consensus_distance=final.consensus_distance,
        stopped=one.position.at(metrics.steps) < one.total_steps,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        bytes_sent=traffic.bytes_sent,
        exposed_seconds=traffic.exposed_seconds,
        mixing_seconds=traffic.mixing_seconds,
        extra_memory_bytes=traffic.extra_memory_bytes,
        outcomes=traffic.outcomes,
        metric_name=one.job.metric_name or "",
        metric_format=one.job.metric_format or "",
        late_rounds=traffic.late_rounds,
        void_rounds=traffic.void_rounds,
        best=best,
        shuffle_bytes_sent=0 if shuffle is None else shuffle.bytes_sent,
        shuffle_late_rounds=0 if shuffle is None else shuffle.late_rounds,
        shares=None if shares is None else asdict(shares),
        lost=lost_ranks,
        joined=strategy.joined_ranks(),
        left=strategy.has_left,
        notes=(
            *strategy.notes,
            *metrics.notes,
            *notes_on(shuffle),
            *notes_on_muon(one.optimizers),
        ),
    )


@contextmanager
def _saved_if_evicted(model: nn.Module, path: Path) -> Iterator[None]:
    """What a rank has learned is not lost with its membership."""
    try:
        yield
    except EvictedError as error:
        write_safetensors(path, model_tensors(model))
        raise EvictedError(f"{error} ({path})") from error
