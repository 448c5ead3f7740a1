"""What one rank does: the training loop, what is around it, and what it comes to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossipgrad.checkpoint import model_tensors, write_safetensors
from gossipgrad.data import ElasticBatches
from gossipgrad.engine import Session
from gossipgrad.errors import EvictedError
from gossipgrad.second_order import SecondOrder

from ._batches import Groups, LoaderBatches, RingBatches
from ._config import TrainConfig
from ._evaluate import Evaluation
from ._folder import RunDir, reserve_model, write_model
from ._job import Job
from ._loggers import open_loggers
from ._loop import Loop
from ._metrics import Event, Metrics
from ._optimizers import notes_on_muon
from ._result import RankResult
from ._setup import Entering, Rank
from ._shrinking import note_on_widths

# Leaves an invitation in the folder of a run that others can join; why there is none, if so.
Invite = Callable[[Session, Job, RunDir], str | None]


def train_rank(
    config: TrainConfig,
    job: Job,
    run_dir: RunDir,
    *,
    rank: int,
    world_size: int,
    stop: threading.Event,
    emit: Callable[[Event], None],
    invite: Invite = lambda session, job, run_dir: None,
    groups: Groups | None = None,
    joiner: Entering | None = None,
) -> RankResult:
    """Train one replica to the end or the stop, and leave it in `run_dir` for export."""
    torch.set_num_threads(config.threads)
    with ExitStack() as unstarted:  # a start that comes to no step leaves, and may be tried again
        one = Rank(
            config,
            job,
            run_dir,
            rank=rank,
            world_size=world_size,
            stop=stop,
            emit=emit,
            groups=groups,
            joiner=joiner,
            unstarted=unstarted,
        )
        resumed = None if one.begun is None else one.begun.metrics
        steps = None if resumed is None else resumed["steps"]
        loggers = open_loggers(config, run_dir, one.rank, resumed_steps=steps)
        with (
            Metrics(run_dir.metrics(one.rank), resumed=resumed, loggers=loggers) as metrics,
            closing(one.checkpoints),
            _saved_if_evicted(one.model, run_dir.evicted_model(one.rank)),
        ):
            loop = Loop(one, metrics)
            if (session := one.strategy.session) is not None:
                session.carry = loop.carried
                is_lowest = session.rank == min(session.membership.living)
                if config.shuffle == "global" and is_lowest:
                    why = invite(session, job, run_dir)
                    one.strategy.notes += [] if why is None else [why]
            reserve_model(run_dir, one.rank, one.model)
            emit({"event": "ready", "total_steps": one.total_steps, "living": one.strategy.living})
            unstarted.pop_all()
            final = loop.run()
            seconds = metrics.seconds
    one.strategy.notes += note_on_widths(one.shrinking)
    if one.shrinking is not None:
        one.shrinking.close()
    best = None if loop.best is None else loop.best.found
    return _result_of(one, metrics, final, best, seconds=seconds)


def _result_of(
    one: Rank,
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
    counted: dict[str, Any] = asdict(strategy.traffic())
    lost_ranks = strategy.lost_ranks()
    del counted["consensus_distance_estimate"]  # the exact one is known
    own_accuracy = one.test.accuracy(model) if strategy.replicas_differ else final.accuracy
    shares = None
    if isinstance(batches, ElasticBatches):
        if not strategy.has_left:
            batches.close()
        shares = asdict(batches.stats())
    if isinstance(batches, LoaderBatches) and lost_ranks:
        strategy.notes.append("no rank trained on the rest of the batches of lost ranks")
    strategy.close()
    for optimizer in one.optimizers:
        if isinstance(optimizer, SecondOrder):
            strategy.notes.append(f"roots: {optimizer.refresh_stats}")
            optimizer.close()
    if isinstance(batches, RingBatches):
        batches.close()
        counted |= batches.figures()
        strategy.notes += batches.notes()
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
        metric_name=one.job.metric_name or "",
        metric_format=one.job.metric_format or "",
        best=best,
        shares=shares,
        lost=lost_ranks,
        joined=strategy.joined_ranks(),
        left=strategy.has_left,
        notes=(
            *strategy.notes,
            *metrics.notes,
            *notes_on_muon(one.optimizers),
        ),
        **counted,
    )


@contextmanager
def _saved_if_evicted(model: nn.Module, path: Path) -> Iterator[None]:
    """What a rank has learned is not lost with its membership."""
    try:
        yield
    except EvictedError as error:
        write_safetensors(path, model_tensors(model))
        raise EvictedError(f"{error} ({path})") from error
