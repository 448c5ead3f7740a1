"""Saving what a rank needs to go on, and going on from it."""

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad import checkpoint
from gossipgrad.decentralized import (
    GossipSession,
    average_states,
    load_replica,
    misfit,
    replica_state,
)
from gossipgrad.errors import GossipError

from ._batches import Batches, RingBatches
from ._config import TrainConfig
from ._layout import RunDir
from ._random_state import load_random_state, random_state
from ._resume import saved_ranks
from ._strategies import Strategy

# How long the write of the checkpoint before is awaited. Where the disk is slower than that, ranks
# would leave out one here and another there, and few would be complete.
_WRITE_SECONDS = 2.0
_LAST_SECONDS = 60.0  # the same, for the last one
_SETTLE_SECONDS = 60.0  # how long rows on their way to neighbours are awaited
_MOST_PENDING_STEPS = 64  # that a state of mode stale is kept back for what it lacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a run goes on.

    Attributes:
        epoch: In which epoch.
        batch: How many batches of it this rank has trained on.
        metrics: What `Metrics.state` gave.
    """

    epoch: int
    batch: int
    metrics: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one rank: each rank saves its own state, and waits for no other.

    In mode stale ranks take theirs as they pass the same rounds, and a state is kept back until it
    is known of each of its exchanges how it ended.

    Args:
        config: The options, resolved.
        run_dir: Where they lie.
        rank: This rank.
        world_size: How many there are.
        model: The replica.
        optimizers: Train it.
        strategy: Keeps replicas together.
        batches: Have a state of their own with a ring shuffle.
        device: Where the model is.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: RunDir,
        *,
        rank: int,
        world_size: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        strategy: Strategy,
        batches: Batches,
        device: torch.device,
    ) -> None:
        self._config = config
        self._directory = run_dir.checkpoints
        self._rank, self._world_size = rank, world_size
        self._model, self._optimizers = model, optimizers
        self._strategy, self._batches, self._device = strategy, batches, device
        self._saver: checkpoint.Saver | None = None
        self._last = self._base = 0
        self._pending: tuple[int, dict[str, Any], int] | None = None

    def resume(self) -> Place:
        """Brings everything where the checkpoint of `resume_step` has it; a collective.

        Raises:
            ValueError: A rank's state cannot be read, or does not fit; on all ranks.
        """
        step, state, problem = self._config.resume_step, None, None
        assert step is not None, "the front door has chosen one"
        try:
            state = checkpoint.load(
                self._directory, rank=self._rank, step=step, world_size=self._world_size
            )
            if self._strategy.session is None:
                problem = misfit(self._model, self._optimizers, state)
        except ValueError as error:
            problem = str(error)
        for why in self._strategy.agree(problem):
            if why is not None:
                raise ValueError(f"the checkpoint of step {step} cannot be resumed: {why}")
        assert state is not None
        self._strategy.go_to(state["strategy"])
        session = self._strategy.session
        if session is not None:
            session.load_state_dict(state)
            self._tell_torn(session, state["session"])
        else:
            load_replica(self._model, self._optimizers, state)
        if isinstance(self._batches, RingBatches):
            self._batches.load_state_dict(state["batches"])
        load_random_state(state["random"], self._device)
        return Place(**state["loop"])

    def begin(self, place: Place | None) -> None:
        """Gets ready to save, if that is asked for; a collective."""
        if place is not None:
            self._last = self._config.resume_step or 0
            checkpoint.rewind(self._directory, rank=self._rank, step=self._last)
        if self._config.checkpoint_every is None:
            return
        if place is not None:  # labels rise, also where ranks of another number make fewer steps
            label = self._strategy.checkpoint_label(place.metrics["steps"])
            self._base = max(0, self._last - label)
        self._saver = checkpoint.Saver(
            self._directory,
            rank=self._rank,
            world_size=self._world_size,
            # Who never meets has nothing that would belong to another start.
            attempt=self._strategy.agree(secrets.token_hex(8))[0] if self._strategy.meets else "",
            keep=self._config.keep_checkpoints,
        )

    @property
    def saves(self) -> bool:
        """Whether checkpoints were asked for."""
        return self._saver is not None

    def after_step(self, steps: int, place: Callable[[], Place]) -> None:
        """Saves, if that is due."""
        every = self._config.checkpoint_every
        if self._saver is None or every is None:
            return
        self._send_pending(steps)
        label = self._strategy.checkpoint_label(steps) + self._base
        if label <= self._last or not self._strategy.checkpoint_due(steps, every):
            return
        if not self._settle_rows():
            return
        self._last = label
        state = self._state(place())
        if self._is_complete(state):
            self._save(state, self._last)
        else:
            self._send_pending(steps, always=True)
            self._pending = self._last, state, steps

    def end(self, steps: int, place: Place) -> str | None:
        """Saves the last one, with all ranks; why there is none, if so."""
        if self._saver is None:
            return None
        self._send_pending(steps, always=True)
        try:
            label = self._strategy.checkpoint_label(steps) + self._base
            told = self._strategy.agree([steps, label, self._last])
            alike = len({one[0] for one in told}) == 1 and not self._strategy.is_stale
            if alike and all(last == label for _, _, last in told):
                return None
            label = max(one for _, one, _ in told)
            if not alike or any(last >= label for _, _, last in told):
                label = max(label, *(last + 1 for _, _, last in told))
            if not self._settle_rows():
                return "rows of the ring shuffle did not arrive"
            state = self._state(place, settle=not alike)
            self._last = label
            self._save(state, label, wait_seconds=_LAST_SECONDS)
        except (GossipError, RuntimeError, ValueError) as error:
            return str(error)
        return None

    def close(self) -> None:
        """Waits for what is being written, and says what could not be."""
        if self._saver is None:
            return
        self._saver.close()
        stats, notes = self._saver.stats(), self._strategy.notes
        if stats.failed:
            notes.append(
                f"checkpoints that could not be saved: {stats.failed}, the last one because of "
                f"{self._saver.error or 'an earlier error'}"
            )
        if stats.skipped:
            notes.append(
                f"checkpoints left out, since the one before was still being written: "
                f"{stats.skipped}"
            )

    def _state(self, place: Place, *, settle: bool = False) -> dict[str, Any]:
        session = self._strategy.session
        if session is None:
            state = replica_state(self._model, self._optimizers, copy=False)
        else:
            state = session.state_dict(settle=settle, copy=self._strategy.is_stale)
        own = self._batches.state_dict() if isinstance(self._batches, RingBatches) else None
        return {
            **state,
            "strategy": self._strategy.place(),
            "batches": own,
            "random": random_state(self._device),
            "loop": {"epoch": place.epoch, "batch": place.batch, "metrics": dict(place.metrics)},
        }

    def _tell_torn(self, session: GossipSession, saved: Mapping[str, Any]) -> None:
        rounds = saved["rounds"]
        before = 0 if rounds is None else rounds["carried"]["torn_rounds"]
        if torn := session.stats().torn_rounds - before:
            self._strategy.notes.append(
                f"rounds that were mixed at one end alone when the checkpoint was taken: {torn}; "
                "the mean over ranks has shifted by them"
            )

    def _is_complete(self, state: Mapping[str, Any]) -> bool:
        return "session" not in state or GossipSession.is_complete(state)

    def _send_pending(self, steps: int, *, always: bool = False) -> None:
        if self._pending is None:
            return
        label, state, since = self._pending
        if always or self._is_complete(state) or steps - since > _MOST_PENDING_STEPS:
            self._pending = None
            self._save(state, label)

    def _save(
        self, state: dict[str, Any], label: int, wait_seconds: float = _WRITE_SECONDS
    ) -> None:
        assert self._saver is not None
        self._saver.save(
            state,
            step=label,
            members=self._strategy.living,
            wait_seconds=wait_seconds,
            copy=not self._strategy.is_stale,  # whose states hold copies
        )

    def _settle_rows(self) -> bool:
        if not isinstance(self._batches, RingBatches):
            return True
        try:
            self._batches.settle(_SETTLE_SECONDS)
        except GossipError as error:
            warnings.warn(f"a checkpoint is left out: {error}", stacklevel=2)
            return False
        return True


def other_ranks(config: TrainConfig, run_dir: RunDir, world_size: int) -> tuple[int, ...] | None:
    """The ranks that saved the checkpoint to resume, if they are not those that are here."""
    if config.resume is None:
        return None
    assert config.resume_step is not None
    saved = saved_ranks(run_dir.checkpoints, config.resume_step)
    return None if saved == tuple(range(world_size)) else saved


def start_from_consensus(
    config: TrainConfig,
    run_dir: RunDir,
    ranks: Sequence[int],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    rank: int,
    world_size: int,
    epoch_batches: int,
) -> Place:
    """Begins on another number of ranks with the mean of the saved replicas; local.

    Each rank reads the states of all. What it comes to is not bit for bit what as many ranks as
    before would have come to: they deal the samples otherwise.

    Raises:
        ValueError: A state cannot be read, or does not fit.
    """
    step, directory = config.resume_step, run_dir.checkpoints
    states = [checkpoint.load(directory, rank=one, step=step) for one in ranks]
    mean = average_states(states)
    if (why := misfit(model, optimizers, mean)) is not None:
        raise ValueError(f"the checkpoint of step {step} cannot be resumed: {why}")
    load_replica(model, optimizers, mean)
    furthest = max(states, key=lambda state: state["loop"]["metrics"]["steps"])["loop"]
    metrics = dict(furthest["metrics"])
    samples = sum(state["loop"]["metrics"]["samples"] for state in states) / world_size
    done = min(1.0, furthest["batch"] / max(1, metrics["epoch_batches"]))
    batch = round(done * epoch_batches)
    own = states[ranks.index(rank)]["loop"]["metrics"] if rank in ranks else None
    metrics |= {
        "steps": furthest["epoch"] * epoch_batches + batch,
        "samples": round(samples),
        "offset": None if own is None else own["offset"],
    }
    if rank == 0:
        warnings.warn(
            f"the checkpoint of step {step} was saved by ranks {', '.join(map(str, ranks))}, and "
            f"{world_size} ranks go on from their consensus: not bit for bit what those would "
            "have done",
            stacklevel=2,
        )
    return Place(epoch=furthest["epoch"], batch=batch, metrics=metrics)
