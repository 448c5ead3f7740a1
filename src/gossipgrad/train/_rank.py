"""What one rank does: the training loop and the evaluations around it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import nn

from gossipgrad.data import ElasticBatches
from gossipgrad.errors import EvictedError
from gossipgrad.second_order import SecondOrder

from ._batches import Groups, RingBatches, deal_anew, make_batches, notes_on
from ._checkpoints import Checkpoints
from ._config import TrainConfig
from ._device import find_device
from ._evaluate import TestPart, copy_of
from ._files import reserve_model, write_model
from ._invitation import invite, withdraw
from ._job import Job
from ._layout import RunDir
from ._loggers import open_loggers
from ._loop import Loop, RunPosition
from ._losses import notes_on_shares, record_store_losses
from ._metrics import Event, Metrics
from ._optimizers import make_optimizers, make_schedulers, notes_on_muon, set_step
from ._other_ranks import other_ranks, start_from_consensus
from ._random_state import seed_rank
from ._result import RankResult
from ._resume import begin_resumed
from ._shrinking import shrink, tell
from ._spans import StepSpans
from ._tasks import setting_of
from .strategies import Replica, RunningStrategy

if TYPE_CHECKING:
    from ._joiner import RunJoiner


def train_rank(
    config: TrainConfig,
    job: Job,
    run_dir: RunDir,
    *,
    rank: int,
    world_size: int,
    stop: threading.Event,
    emit: Callable[[Event], None],
    groups: Groups | None = None,
    joiner: "RunJoiner | None" = None,
) -> RankResult:
    """Train one replica to the end or the stop, and leave it in `run_dir` for export.

    The default process group must be there, except for `strategy` local without a ring shuffle, and
    for gossip where there are `groups`.
    Runs `threads` threads of compute. On the CPU, with the same `config` and as many ranks, a run
    repeats bit for bit, for as long as every exchange is delivered: a rank that dies, or comes too
    late, changes what others mix, and on which samples they train.

    Args:
        config: The options; `lr` must be filled in.
        job: What to train; its model is.
        run_dir: Where files go.
        rank: This rank; of a joiner its number on this machine, until it has a rank.
        world_size: How many there are, or were at the start.
        stop: Set from outside to end the run at the next step boundary.
        emit: Takes events for the user: "ready", "progress", "members", "epoch",
            "checkpoint".
        groups: Private groups of the ranks, by name.
        joiner: Joins the run, which trains already; None: takes part from its start.

    Returns:
        The figures of this rank.

    Raises:
        PeerLostError: An all-reduce found a rank gone.
        EvictedError: The others have given this rank up; its weights are in `run_dir`.
        DivergedError: The loss is no longer finite.
        GossipError: There is no space for the model; without it, nothing is trained.
    """
    torch.set_num_threads(config.threads)
    device = find_device(config, rank=rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = job.model.to(device)
    optimizers = make_optimizers(config, model, job)
    threads = config.batch_threads
    with ExitStack() as unstarted:  # a start that comes to no step leaves, and may be tried again
        session = None
        if joiner is not None:
            settings = config.traits.session_settings(
                config.strategy_options, setting_of(config, job, world_size)
            )
            session = joiner.enter(model, optimizers, settings)
            unstarted.callback(session.close)
            rank = session.rank
        # Equal weights at the start, but dropout masks of its own.
        seed_rank(config.seed, rank)
        share = rank if joiner is None else 0  # no share is a joiner's, but parts of all
        batches = make_batches(
            config, job.train_samples(), rank=share, world_size=world_size, groups=groups
        )
        if isinstance(batches, RingBatches):
            unstarted.callback(batches.close)
        total_steps = config.epochs * len(batches)
        loop_state, note = None, f"resumed from the checkpoint of step {config.resume_step}"
        former = []
        members = tuple(range(world_size))
        if (others := other_ranks(config, run_dir, members, world_size)) is not None:
            loop_state, note, former = start_from_consensus(
                config,
                run_dir,
                others,
                model,
                optimizers,
                rank=rank,
                members=members,
                epoch_batches=len(batches),
            )
        spans = StepSpans(rank, num_steps=config.trace, total_steps=total_steps)
        for optimizer in optimizers:
            if isinstance(optimizer, SecondOrder):
                optimizer.recorder = spans
                unstarted.callback(optimizer.close)
        test = TestPart(
            job,
            rank=rank,
            world_size=world_size,
            threads=threads,
            device=device,
        )
        replica = Replica(
            model=model,
            optimizers=optimizers,
            stop=stop,
            spans=spans,
            groups=groups,
            session=session,
            joiner=joiner,
        )
        setting = setting_of(config, job, world_size, total_steps=total_steps)
        strategy = config.traits.build(replica, setting, config.strategy_options)
        unstarted.callback(strategy.close)
        batches = deal_anew(config, batches, strategy.session)
        if joiner is not None and isinstance(batches, ElasticBatches):
            loop_state = joiner.make_loop_state(strategy, batches)
        schedulers = make_schedulers(
            config.learning_rate, optimizers, steps_per_epoch=len(batches), epochs=config.epochs
        )
        checkpoints = Checkpoints(
            config,
            run_dir,
            rank=rank,
            world_size=world_size,
            model=model,
            optimizers=optimizers,
            strategy=strategy,
            batches=batches,
            device=device,
            emit=emit,
        )
        if joiner is None and loop_state is not None:
            strategy.load_former_states(loop_state.metrics["steps"], former)
        elif config.resume is not None:
            loop_state = checkpoints.resume()
        former = []
        checkpoints.begin(loop_state, None if joiner is None else joiner.carried["checkpoints"])
        resumed = None if loop_state is None else loop_state.metrics
        position = RunPosition(strategy, batches, resumed)
        if resumed is not None:
            set_step(schedulers, position.at(resumed["steps"]))
            spans.set_step(resumed["steps"])
        if config.resume is not None:
            strategy.notes.append(note)
        anew = resumed is not None and resumed["offset"] is None
        begin_resumed(config, run_dir, rank=rank, anew=anew)
        shrinking = shrink(
            config, job, strategy, model, optimizers, total_steps=total_steps, device=device
        )
        loggers = open_loggers(config, run_dir, rank)
        with (
            Metrics(run_dir.metrics(rank), resumed=resumed, loggers=loggers) as metrics,
            closing(checkpoints),
            _saved_if_evicted(model, run_dir.evicted_model(rank)),
            record_store_losses() as store_losses,
        ):
            loop = Loop(
                strategy=strategy,
                criterion=job.loss,
                optimizers=optimizers,
                schedulers=schedulers,
                batches=batches,
                position=position,
                test=test,
                device=device,
                epochs=config.epochs,
                log_every=config.log_every,
                metrics=metrics,
                spans=spans,
                stop=stop,
                emit=emit,
                checkpoints=checkpoints,
                loop_state=loop_state,
                widths=None if shrinking is None else shrinking.widths,
            )
            if strategy.session is not None:
                strategy.session.carry = loop.carried
            if (why := _invite(strategy, job, run_dir, config)) is not None:
                strategy.notes.append(why)
            reserve_model(run_dir, rank, model)
            emit({"event": "ready", "total_steps": total_steps, "living": strategy.living})
            unstarted.pop_all()
            final = loop.run()
            seconds = metrics.seconds
    if not strategy.has_left:
        withdraw(run_dir)
    traffic, lost_ranks = strategy.traffic(), strategy.lost_ranks()
    own_accuracy = test.accuracy(model) if strategy.replicas_differ else final.accuracy
    shares = None
    if isinstance(batches, ElasticBatches):
        if not strategy.has_left:
            batches.close()
        shares = batches.stats()
    strategy.notes += tell(shrinking)
    if shrinking is not None:
        shrinking.close()
    strategy.close()
    for optimizer in optimizers:
        if isinstance(optimizer, SecondOrder):
            strategy.notes.append(f"roots: {optimizer.refresh_stats}")
            optimizer.close()
    shuffle = None
    if isinstance(batches, RingBatches):
        batches.close()
        shuffle = batches.stats()
    # A run that is over, and did not wait, takes no model of one that joined any more.
    with nullcontext() if joiner is None else suppress(FileNotFoundError):
        write_model(run_dir, rank, final.weights)
        spans.save(run_dir.rank_trace(rank))
    return RankResult(
        rank=rank,
        steps=metrics.steps - (0 if joiner is None else joiner.begun_step),
        epochs=metrics.epochs,
        samples=metrics.samples,
        seconds=seconds,
        train_seconds=metrics.train_seconds,
        accuracy=final.accuracy,
        own_accuracy=own_accuracy,
        is_consensus=final.is_consensus,
        consensus_distance=final.consensus_distance,
        stopped=position.at(metrics.steps) < total_steps,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        bytes_sent=traffic.bytes_sent,
        exposed_seconds=traffic.exposed_seconds,
        mixing_seconds=traffic.mixing_seconds,
        extra_memory_bytes=traffic.extra_memory_bytes,
        outcomes=traffic.outcomes,
        late_rounds=traffic.late_rounds,
        void_rounds=traffic.void_rounds,
        shuffle_bytes_sent=0 if shuffle is None else shuffle.bytes_sent,
        shuffle_exposed_seconds=0.0 if shuffle is None else shuffle.exposed_seconds,
        shuffle_late_rounds=0 if shuffle is None else shuffle.late_rounds,
        shuffle_rows_dealt=batches.rows_dealt if isinstance(batches, RingBatches) else 0,
        shuffle_rows_held=0 if shuffle is None else shuffle.rows_held,
        shares=None if shares is None else asdict(shares),
        lost=lost_ranks,
        joined=strategy.joined_ranks(),
        left=strategy.has_left,
        store_losses=store_losses,
        notes=(
            *strategy.notes,
            *metrics.notes,
            *loggers.notes,
            *notes_on(shuffle),
            *notes_on_shares(shares),
            *notes_on_muon(optimizers),
        ),
    )


def _invite(
    strategy: RunningStrategy, job: Job, run_dir: RunDir, config: TrainConfig
) -> str | None:
    """Has the lowest rank of the start invite others, where there are samples for them."""
    session = strategy.session
    if session is None or config.shuffle != "global":
        return None
    if session.rank != min(session.membership.living):
        return None
    return invite(session, job, run_dir)


@contextmanager
def _saved_if_evicted(model: nn.Module, path: Path) -> Iterator[None]:
    """What a rank has learned is not lost with its membership."""
    try:
        yield
    except EvictedError as error:
        path.write_bytes(save(copy_of(model)))
        raise EvictedError(f"{error} ({path})") from error
