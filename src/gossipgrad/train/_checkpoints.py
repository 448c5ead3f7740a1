"""Saving what a rank needs to go on, and going on from it."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad import checkpoint
from gossipgrad.comm import load_replica, misfit, replica_state
from gossipgrad.decentralized import average_states
from gossipgrad.errors import EvictedError, GossipError

from ._config import TrainConfig
from ._layout import RunDir
from ._metrics import Event
from ._random_state import load_random_state, random_state
from ._resume import deciding, edited
from .strategies import RunningStrategy

# How long the write of the checkpoint before is awaited. Where the disk is slower than that, ranks
# leave out one here and another there, and few are complete.
_WRITE_SECONDS = 2.0
_LAST_SECONDS = 60.0  # the same, for the last one
_OF_A_RUN = frozenset({"strategy", "random", "loop"})  # beside replica and session


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """Where a run goes on."""

    epoch: int
    batch: int
    metrics: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one rank: each rank saves its own state.

    In mode stale all come together for that, each as its position reaches the next checkpoint.
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
        strategy: RunningStrategy,
        device: torch.device,
        emit: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._directory = run_dir.checkpoints
        self._rank, self._world_size = rank, world_size
        self._model, self._optimizers = model, optimizers
        self._strategy, self._device = strategy, device
        self._emit = emit
        self._saver: checkpoint.Saver | None = None
        self._last = self._base = 0

    def resume(self) -> LoopState:
        """Brings everything where the checkpoint of `resume_step` has it; a collective."""
        step, state, problem = self._config.resume_step, None, None
        assert step is not None, "the front door has chosen one"
        try:
            state = checkpoint.load(
                self._directory,
                rank=self._rank,
                step=step,
                run=self._config.run_name,
                world_size=self._world_size,
            )
            problem = self._misfit(state)
        except ValueError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            problem = f"rank {self._rank} failed to read its own: {type(error).__name__}: {error}"
        for why in self._strategy.agree(problem):
            if why is not None:
                raise ValueError(f"the checkpoint of step {step} cannot be resumed: {why}")
        assert state is not None
        self._strategy.load_state_dict(state["strategy"])
        session = self._strategy.session
        if session is not None:
            session.load_state_dict(state)
        else:
            load_replica(self._model, self._optimizers, state)
        load_random_state(state["random"], self._device)
        return LoopState(**state["loop"])

    def begin(self, loop_state: LoopState | None, carried: Mapping[str, Any] | None = None) -> None:
        """Gets ready to save, if that is asked for; a collective, but for one who joins."""
        if carried is not None:
            assert loop_state is not None
            self._base = carried["base"]
            # The others have saved what was due before.
            self._last = self._strategy.checkpoint_label(loop_state.metrics["steps"]) + self._base
            self._open()
            return
        if loop_state is not None:
            self._last = self._config.resume_step or 0
            checkpoint.rewind(self._directory, rank=self._rank, step=self._last)
        if self._config.checkpoint_every is None:
            return
        strategy = self._strategy
        label = 0 if loop_state is None else strategy.checkpoint_label(loop_state.metrics["steps"])
        all_labels = strategy.agree(label)
        if loop_state is not None:
            # Labels rise, also where ranks of another number make fewer steps, and are the same on
            # all: none is due before the furthest rank reaches a new one.
            highest = max(all_labels)
            self._base = max(0, self._last - highest)
            self._last = highest + self._base
        self._open()

    def carried(self) -> dict[str, Any]:
        """What one who joins has to know to save parts of the same checkpoints."""
        return {"base": self._base}

    def after_step(self, steps: int, loop_state: Callable[[], LoopState]) -> None:
        """Saves, if that is due."""
        every = self._config.checkpoint_every
        if self._saver is None or every is None:
            return
        self._saver.wait(0.0)  # says what has failed meanwhile
        label = self._strategy.checkpoint_label(steps) + self._base
        if label <= self._last or not self._strategy.checkpoint_due(steps, every):
            return
        self._last = label
        try:
            self._save(self._state(loop_state()), label)
        except EvictedError:
            raise
        except GossipError as error:
            if not self._strategy.is_stale:
                raise
            text = f"rank {self._rank}: the checkpoint of step {label} is left out: {error}"
            self._emit({"event": "checkpoint", "text": text})

    def end(self, steps: int, loop_state: LoopState) -> str | None:
        """Saves the last one, with all ranks that live; why there is none, if so; a collective."""
        if self._saver is None:
            return None
        label = self._strategy.checkpoint_label(steps) + self._base
        try:
            ends = self._strategy.agree([steps, label, self._last])
            alike = len({made for made, *_ in ends}) == 1 and not self._strategy.is_stale
            if not any(made for made, *_ in ends):
                return None
            if alike and all(last == label for *_, last in ends):
                return None
            self._last = max(max(label, last + 1) for _, label, last in ends)
            state = self._state(loop_state, drain=not alike)
            if self._save(state, self._last, wait_seconds=_LAST_SECONDS):
                return None
            return str(
                self._saver.error
                or f"the one before was still being written after {_LAST_SECONDS:g} s"
            )
        except (GossipError, RuntimeError, ValueError) as error:
            return str(error)

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

    def _open(self) -> None:
        if self._config.checkpoint_every is None:
            return
        self._saver = checkpoint.Saver(
            self._directory,
            rank=self._rank,
            world_size=self._world_size,
            run=self._config.run_name or "",
            keep=self._config.keep_checkpoints,
            tell=lambda text: self._emit(
                {"event": "checkpoint", "text": f"rank {self._rank}: {text}"}
            ),
        )

    def _state(self, loop_state: LoopState, *, drain: bool = False) -> dict[str, Any]:
        session = self._strategy.session
        if session is None:
            state = replica_state(self._model, self._optimizers, copy=False)
        else:
            state = session.state_dict(drain=drain, copy=False)
        return {
            **state,
            "options": deciding(self._config),
            "strategy": self._strategy.state_dict(),
            "random": random_state(self._device),
            "loop": {
                "epoch": loop_state.epoch,
                "batch": loop_state.batch,
                "metrics": dict(loop_state.metrics),
            },
        }

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        if missing := sorted(_OF_A_RUN - state.keys()):
            return f"it was not saved by a run of the command, for it lacks {missing[0]!r}"
        why = edited(self._config, state) or is_behind(self._config, state["loop"]["epoch"])
        if why is not None:
            return why
        if self._strategy.session is None:
            return misfit(self._model, self._optimizers, state)
        return None  # a session looks for itself

    def _save(
        self, state: dict[str, Any], label: int, wait_seconds: float = _WRITE_SECONDS
    ) -> bool:
        assert self._saver is not None
        return self._saver.save(
            state,
            step=label,
            members=self._strategy.living,
            wait_seconds=wait_seconds,
        )


def is_behind(config: TrainConfig, epoch: int) -> str | None:
    """Why a checkpoint in an epoch, counted from 0, is beyond the end of the run, if it is."""
    if epoch <= config.epochs:
        return None
    return (
        f"epochs is {config.epochs}, but {epoch} are over in it: give --epochs {epoch} or more, or "
        "an older checkpoint with --resume-step"
    )


def begin_from_consensus(
    config: TrainConfig,
    run_dir: RunDir,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    rank: int,
    world_size: int,
    epoch_batches: int,
) -> tuple[LoopState, str] | None:
    """Begins with the mean of the saved replicas where other ranks had saved them; local.

    Weights and moments are the mean of all that were saved, the run goes on in the epoch in which
    the furthest of these was, and all else, such as shares, residuals and learning rates, is that
    of a start with so many ranks.
    """
    if config.resume is None:
        return None
    step, directory = config.resume_step, run_dir.checkpoints
    assert step is not None, "the front door has chosen one"
    found = checkpoint.find(directory, step=step, run=config.run_name)
    ranks, before = found.members, found.world_size
    if ranks == tuple(range(world_size)) and before == world_size:
        return None
    if not config.traits.communicates:
        if before == world_size:
            return None
        raise ValueError(
            f"nproc is {world_size}, but the checkpoint of step {step} is of {before} ranks, each "
            f"of which trained on its own (strategy {config.strategy}): there is no one model that "
            f"others could go on from. Give --nproc {before}; or begin another run from the model "
            f"of one rank: `gossipgrad export {run_dir.path} FILE --rank 0`, and load it in a job."
        )
    loops: dict[int, Mapping[str, Any]] = {}
    changed: list[str | None] = []

    def read() -> Iterator[Mapping[str, Any]]:
        for one in ranks:
            state = checkpoint.load(directory, rank=one, step=step, mmap=True)
            loops[one] = state["loop"]
            changed.append(edited(config, state))
            yield state
            del state  # before the next one is read

    mean = average_states(read())
    furthest = max(loops.values(), key=lambda one: (one["epoch"], one["batch"]))
    why = misfit(model, optimizers, mean) or changed[0]
    if why or (why := is_behind(config, furthest["epoch"])):
        raise ValueError(f"the checkpoint of step {step} cannot be resumed: {why}")
    own = replica_state(model, optimizers, copy=False)["optimizers"]
    mean["optimizers"] = [
        {**one, "groups": here["groups"]} for one, here in zip(mean["optimizers"], own, strict=True)
    ]
    load_replica(model, optimizers, mean)
    metrics = {name: value for name, value in furthest["metrics"].items() if name != "position"}
    done = min(1.0, furthest["batch"] / max(1, metrics["epoch_batches"]))
    batch = round(done * epoch_batches)
    metrics["steps"] = furthest["epoch"] * epoch_batches + batch
    # What a step costs is counted from here, as bytes are: other ranks sent the earlier ones.
    metrics |= {"samples": 0, "train_seconds": 0.0, "counted_from": metrics["steps"]}
    metrics["offset"] = loops[rank]["metrics"]["offset"] if rank in loops else None
    note = (
        f"the checkpoint of step {step} was saved by {len(ranks)} ranks, and {world_size} went on "
        "from their consensus: not bit for bit what those would have done"
    )
    if rank == 0:
        warnings.warn(note, stacklevel=2)
    return LoopState(epoch=furthest["epoch"], batch=batch, metrics=metrics), note
