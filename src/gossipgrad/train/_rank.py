"""What one rank does: the training loop, what is around it, and what it comes to."""

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.checkpoint import model_tensors, write_safetensors
from gossipgrad.data import ElasticBatches, ShardedBatches
from gossipgrad.engine import Session
from gossipgrad.errors import EvictedError, GossipError
from gossipgrad.second_order import SecondOrder

from ._batches import LoaderBatches, RingBatches
from ._evaluate import Evaluation
from ._folder import write_whole
from ._job import Job
from ._loggers import Loggers
from ._loop import Loop
from ._metrics import Metrics
from ._optimizers import notes_on_muon
from ._result import RankResult
from ._setup import Rank, RankInputs
from ._shrinking import note_on_widths

# Targets of so many samples tell two data sets apart.
_PROBED_SAMPLES = 64


def train_rank(given: RankInputs) -> RankResult:
    """Train one replica to the end or the stop, and leave it in the run's folder for export."""
    config, run_dir, emit = given.config, given.run_dir, given.emit
    torch.set_num_threads(config.threads)
    with ExitStack() as unstarted:  # a start that comes to no step leaves, and may be tried again
        one = Rank(given, unstarted=unstarted)
        resumed = None if one.begun is None else one.begun.metrics
        steps = None if resumed is None else resumed["steps"]
        loggers = Loggers(config, run_dir, one.rank, resumed_steps=steps)
        with (
            Metrics(run_dir.metrics(one.rank), resumed=resumed, loggers=loggers) as metrics,
            closing(one.checkpoints),
            _saved_if_evicted(one.model, run_dir.evicted_model(one.rank)),
        ):
            loop = Loop(one, metrics)
            if one.joiner is not None:
                metrics.write("joined", step=one.joiner.begun_step)
            session, shares = one.strategy.session, config.shuffle == "global"
            if session is not None and shares and one.rank == min(one.strategy.living or [0]):
                why = invite(session, one, began_seconds=time.time() - metrics.seconds)
                one.strategy.notes += [] if why is None else [why]
            emit({"event": "ready", "total_steps": one.total_steps, "living": one.strategy.living})
            unstarted.pop_all()
            final = loop.run()
            seconds = metrics.seconds
    one.strategy.notes += note_on_widths(one.shrinking)
    if one.shrinking is not None:
        one.shrinking.close()
    best = None if loop.best is None else loop.best.found
    return _result_of(one, metrics, final, best, seconds=seconds)


def invite(session: Session, one: Rank, *, began_seconds: float) -> str | None:
    """Leave an invitation in the folder of the run, for its owner alone; why not, if so."""
    run_dir = one.run_dir
    found: dict[str, Any] = {
        "address": None,
        "refusal": None,
        "data": fingerprint_of(one.job),
        "strategy": one.strategy.state_dict(),
        "checkpoint_base": one.checkpoints.base,
        "began_seconds": began_seconds,
    }
    if one.config.island_size > 1:
        found["refusal"] = "several ranks share each replica (--island), and one alone is none"
    elif one.job.train_loader is not None:
        found["refusal"] = "its job has a loader of its own, whose shares are fixed"
    else:
        try:
            found["address"] = session.join_address()
        except (ValueError, GossipError) as error:  # a slow store is no reason not to train
            found["refusal"] = str(error)
    try:
        write_whole(run_dir.invitation, json.dumps(found, indent=2) + "\n", mode=0o600)
    except OSError as error:
        return f"nobody can join: {run_dir.invitation} could not be written ({error.strerror})"
    return None


def fingerprint_of(job: Job) -> str:
    """A digest of the shapes of a model, and of numbers of samples and some of their targets."""
    shapes = [tuple(tensor.shape) for tensor in job.model.parameters()]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=16)
    for samples in (*([] if job.train is None else [job.train_samples()]), job.test_samples()):
        chosen = torch.linspace(0, len(samples) - 1, _PROBED_SAMPLES).long()
        targets = samples.batch(chosen)[1].contiguous()
        digest.update(str(len(samples)).encode() + targets.numpy().tobytes())
    return digest.hexdigest()


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
    if isinstance(batches, LoaderBatches | ShardedBatches) and lost_ranks:
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
        _write_model(one.run_dir.rank_model(one.rank), final.weights)
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


def _write_model(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Leave the model for the rank that puts the run together; elsewhere if the disk is full."""
    try:
        write_safetensors(path, weights)
    except FileNotFoundError:
        raise
    except OSError as error:
        where = ""
        with suppress(OSError):
            kept = Path(tempfile.mkdtemp(prefix="gossipgrad-")) / path.name
            write_safetensors(kept, weights)
            where = f". The trained model is in {kept}"
        raise GossipError(
            f"{path} could not be written: {error.strerror}{where}. With a checkpoint the run "
            "continues by --resume, once there is room"
        ) from error


@contextmanager
def _saved_if_evicted(model: nn.Module, path: Path) -> Iterator[None]:
    """What a rank has learned is not lost with its membership."""
    try:
        yield
    except EvictedError as error:
        write_safetensors(path, model_tensors(model))
        raise EvictedError(f"{error} ({path})") from error
