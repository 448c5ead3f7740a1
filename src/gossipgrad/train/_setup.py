"""What one rank trains with, made in the order in which ranks meet over it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.data import ElasticBatches
from gossipgrad.engine import Session
from gossipgrad.second_order import SecondOrder

from ._batches import Batches, Groups, LoaderBatches, RingBatches, make_batches
from ._config import TrainConfig
from ._device import find_device
from ._evaluate import TestPart
from ._folder import RunDir
from ._job import Job, JobError
from ._metrics import Event
from ._optimizers import Rates, make_optimizers
from ._shrinking import shrink
from ._spans import StepSpans
from ._state import (
    Checkpoints,
    LoopState,
    begin_from_consensus,
    begin_resumed,
    narrow_as_saved,
    seed_rank,
)
from .strategies import Joiner, Replica, RunningStrategy


class RunPosition:
    """The position of a run, in steps of a rank had nobody come or gone."""

    def __init__(
        self, strategy: RunningStrategy, batches: Batches, resumed: Mapping[str, Any] | None = None
    ) -> None:
        self._strategy = strategy
        self._batches = batches
        self._epoch = self._last = self._ahead = 0
        if resumed is not None:
            position = strategy.position(resumed["steps"])
            self._last = resumed.get("position", position)
            self._ahead = self._last - position

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, or what is left of it."""
        self._epoch = epoch

    def at(self, steps: int) -> int:
        """Where the run is, for a rank that has made so many steps."""
        if (elastic := self._disturbed(self._epoch)) is not None:
            position = elastic.position
        else:
            position = self._strategy.position(steps) + self._ahead
        self._last = max(self._last, position)
        return self._last

    def is_over(self, steps: int) -> bool:
        """Whether the epoch is known to be over without a look at its batches."""
        if self._disturbed(self._epoch) is not None:
            return False
        return self.at(steps) >= (self._epoch + 1) * len(self._batches)

    def end_epoch(self, steps: int) -> None:
        """The epoch is over, after however many steps of this rank."""
        end = (self._epoch + 1) * len(self._batches)
        if self._disturbed(self._epoch) is not None:
            self._ahead = end - self._strategy.position(steps)
            self._last = max(self._last, end)

    def batch(self, epoch: int, batch: int) -> int:
        """How far an epoch is, in batches of a share, where this rank has made `batch` of it."""
        if (elastic := self._disturbed(epoch)) is None:
            return batch
        return max(0, elastic.position - epoch * len(self._batches))

    def _disturbed(self, epoch: int) -> ElasticBatches | None:
        """The batches, where ranks came or went in an epoch."""
        batches = self._batches
        if isinstance(batches, ElasticBatches) and batches.is_disturbed(epoch):
            return batches
        return None


class Entering(Joiner, Protocol):
    """A worker that joins the run before it trains."""

    begun_step: int
    invitation: Mapping[str, Any]

    def enter(
        self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]
    ) -> Session: ...

    def make_loop_state(self, strategy: RunningStrategy, batches: ElasticBatches) -> LoopState: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInputs:
    """What a rank is given: the run, its part in it, and how others reach it."""

    config: TrainConfig
    job: Job
    run_dir: RunDir
    rank: int
    world_size: int
    stop: threading.Event
    emit: Callable[[Event], None]
    groups: Groups | None = None  # where there is no process group
    joiner: Entering | None = None


class Rank:
    """What a rank has from its start to its end."""

    def __init__(self, given: RankInputs, *, unstarted: ExitStack) -> None:
        self.config, self.job, self.run_dir = given.config, given.job, given.run_dir
        self.world_size, self.stop, self.emit = given.world_size, given.stop, given.emit
        self.joiner = given.joiner
        config, job, run_dir, joiner = self.config, self.job, self.run_dir, self.joiner
        rank, world_size = given.rank, self.world_size
        self.device = find_device(config, rank=rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model = job.model.to(self.device)
        narrow_as_saved(config, run_dir, self.model, rank=rank)
        self.optimizers = make_optimizers(config, self.model, job)
        epoch_batches = job.epoch_batches(config.step_samples, world_size)
        self.rates = Rates(config, self.optimizers, steps_per_epoch=epoch_batches)
        self.total_steps = config.total_steps(epoch_batches)
        own = job.optimizer is not None
        setting = config.setting(world_size, total_steps=self.total_steps, has_own_optimizer=own)
        session, restart = None, None
        if joiner is not None:
            settings = config.traits.session_settings(config.strategy_options, setting)
            session = joiner.enter(self.model, self.optimizers, settings)
            unstarted.callback(session.close)
            rank = session.rank
        self.rank = rank
        # Equal weights at the start, but dropout masks of its own.
        seed_rank(config.seed, rank)
        if joiner is None:
            restart = begin_from_consensus(
                config,
                run_dir,
                self.model,
                self.optimizers,
                rank=rank,
                world_size=world_size,
                epoch_batches=epoch_batches,
            )
        self.spans = StepSpans(
            rank,
            num_steps=config.trace,
            total_steps=self.total_steps,
            island=config.island_size,
        )
        for optimizer in self.optimizers:
            if isinstance(optimizer, SecondOrder):
                optimizer.refresher.recorder = self.spans
                unstarted.callback(optimizer.close)
        replica = Replica(
            model=self.model,
            optimizers=self.optimizers,
            stop=self.stop,
            spans=self.spans,
            groups=given.groups,
            island=config.island_size,
            session=session,
            joiner=joiner,
        )
        self.strategy = config.traits.build(replica, setting, config.strategy_options)
        unstarted.callback(self.strategy.close)
        self.batches = self._make_batches(given.groups)
        if isinstance(self.batches, RingBatches):
            unstarted.callback(self.batches.close)
        self.test = TestPart(
            job,
            rank=rank,
            world_size=world_size,
            threads=config.data_threads,
            device=self.device,
        )
        self.checkpoints = Checkpoints(
            config,
            run_dir,
            rank=rank,
            world_size=world_size,
            model=self.model,
            optimizers=self.optimizers,
            strategy=self.strategy,
            device=self.device,
            emit=self.emit,
        )
        self.begun = state = self._begin(restart)
        metrics = None if state is None else state.metrics
        self.position = RunPosition(self.strategy, self.batches, metrics)
        if state is not None:
            steps = state.metrics["steps"]
            self.rates.set(self.position.at(steps))
            self.spans.set_step(steps)
        is_new = state is not None and state.metrics["offset"] is None
        begin_resumed(config, run_dir, rank=rank, is_new=is_new)
        self.shrinking = shrink(
            config,
            job,
            self.strategy,
            self.model,
            self.optimizers,
            total_steps=self.total_steps,
            device=self.device,
        )
        if self.shrinking is not None and state is not None and state.shrinking is not None:
            self.shrinking.load_state_dict(state.shrinking)

    def _begin(self, restart: tuple[LoopState, str] | None) -> LoopState | None:
        """Bring all to the start, to a checkpoint, or to the run that a joiner enters."""
        config, strategy, joiner, state = self.config, self.strategy, self.joiner, None
        if joiner is not None and isinstance(self.batches, ElasticBatches):
            state = joiner.make_loop_state(strategy, self.batches)
        elif restart is not None:
            state, note = restart
            strategy.skip_steps(state.metrics["steps"])
            strategy.notes.append(note)
        elif config.resume is not None:
            state = self.checkpoints.resume()
            strategy.notes.append(f"resumed from the checkpoint of step {config.resume_step}")
            if config.shuffle == "ring":
                strategy.notes.append(
                    "the ring shuffle began again with the shards of the start, so some samples "
                    "were used twice in that epoch"
                )
        base = None if joiner is None else joiner.invitation["checkpoint_base"]
        self.checkpoints.begin(state, base)
        return state

    def _make_batches(self, groups: Groups | None) -> Batches:
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
