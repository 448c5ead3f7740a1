"""What a rank continues from: a checkpoint of its own, or the consensus of others."""

import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad import checkpoint
from gossipgrad.comm import load_replica, misfit, replica_state
from gossipgrad.decentralized import average_states
from gossipgrad.engine import narrow
from gossipgrad.errors import EvictedError, GossipError, UnlikeCallsError

from ._config import TrainConfig
from ._folder import RunDir, hold_lock
from ._metrics import Event
from .strategies import STRATEGIES, RunningStrategy


def seed_rank(seed: int, rank: int) -> None:
    """Gives a rank random numbers of its own, the same in every run with this seed."""
    drawn = [int(word) for word in np.random.SeedSequence((seed, rank)).generate_state(3)]
    torch.manual_seed(drawn[0])
    random.seed(drawn[1])
    np.random.seed(drawn[2])  # noqa: NPY002  (whatever user code draws from)


def random_state(device: torch.device) -> dict[str, Any]:
    """Where the generators of torch, Python and numpy are, and that of `device` if it has one."""
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": _plain(np.random.get_state(legacy=True)),  # noqa: NPY002  (as user code may)
    }


def _plain(state: Any) -> tuple[Any, ...]:
    kind, keys, *others = state
    return kind, torch.from_numpy(keys.astype(np.int64)), *others


def load_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Bring them where `random_state` found them."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *others = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *others))  # noqa: NPY002


# What a run may be resumed with another value of: how far it goes, where it runs, where things lie,
# how long ranks wait, which faults are injected, and what is shown. All else decides figures.
_MAY_CHANGE = frozenset(
    {
        *("epochs", "nproc", "out", "overwrite", "resume", "resume_step", "data_dir"),
        *("checkpoint_every", "keep_checkpoints", "data_threads", "start_seconds"),
        *("max_steps", "evaluate_every", "keep_best"),
        *("log_every", "trace", "tensorboard", "wandb", "quiet"),
        *("lost_after_seconds", "device", "threads"),
    }
)


def config_of_run(folder: Path) -> TrainConfig:
    """The options that the run in a folder is resumed with.

    Raises:
        ValueError: The folder holds no `config.json` of a run.
    """
    saved = TrainConfig.from_file(RunDir(folder).config, same_run=True)
    return dataclasses.replace(saved, resume=folder, out=folder)


def reopen(config: TrainConfig, stack: ExitStack) -> tuple[TrainConfig, RunDir]:
    """The folder of the run that `config` resumes, and the options with the step filled in."""
    assert config.resume is not None
    run_dir = RunDir(config.resume)
    if config.out not in (None, config.resume):
        raise ValueError(
            f"out is {config.out}, but a run is resumed in its own folder, {config.resume}: leave "
            "--out out, or copy the folder and resume the copy."
        )
    saved = TrainConfig.from_file(run_dir.config, same_run=True)
    stack.enter_context(hold_lock(run_dir, first=True))
    config = dataclasses.replace(config, run_name=config.run_name or saved.run_name)
    _check_alike(config, saved, run_dir.path)
    try:
        step = checkpoint.find(
            run_dir.checkpoints, step=config.resume_step, run=config.run_name
        ).step
    except ValueError as error:
        raise ValueError(
            f"{run_dir.path} cannot be resumed: {error}. A run saves checkpoints with "
            "--checkpoint-every, and --resume-step names one."
        ) from error
    lengths = [(one.epochs, one.max_steps) for one in (config, saved)]
    if lengths[0] != lengths[1] and config.lr_schedule in ("cosine", "linear"):
        name = "epochs" if lengths[0][0] != lengths[1][0] else "max_steps"
        warnings.warn(
            f"{name} is {getattr(config, name)} instead of {getattr(saved, name)}: lr_schedule "
            f"{config.lr_schedule} now falls to 0 at that end, so the "
            "learning rate is another from here, and rises where it had fallen. With lr_schedule "
            "constant or step, runs can be extended without that.",
            stacklevel=3,
        )
    try:
        run_dir.reopen()
    except OSError as error:
        raise ValueError(f"cannot write to {error.filename}: {error.strerror}.") from error
    return dataclasses.replace(config, resume_step=step, out=run_dir.path), run_dir


def begin_resumed(config: TrainConfig, run_dir: RunDir, *, rank: int, is_new: bool) -> None:
    """Make the folder that of the run that continues, now that all have what they continue from."""
    if config.resume is None:
        return
    assert config.nproc is not None, "resolve the configuration first"
    if is_new:
        run_dir.put_aside(rank)
    try:
        run_dir.resumes.unlink()
    except FileNotFoundError:
        return  # another rank was first
    for file in (run_dir.summary, run_dir.model, run_dir.trace, run_dir.report):
        file.unlink(missing_ok=True)
    config.write(run_dir.config)
    for former in run_dir.metrics_ranks():
        if former >= config.nproc:
            run_dir.put_aside(former)


def _check_alike(config: TrainConfig, saved: TrainConfig, folder: Path) -> None:
    ours, theirs = (
        _deciding(one.resolved(nproc=saved.nproc or 1, out=folder)) for one in (config, saved)
    )
    for name, value in theirs.items():
        if ours[name] != value:
            raise ValueError(
                f"{name} is {ours[name]}, but the run in {folder} has {name}={value}: leave "
                f"--{name.replace('_', '-')} out to resume it, or begin another run."
            )


def _deciding(config: TrainConfig) -> dict[str, Any]:
    """The options of a resolved configuration that decide figures, as plain values."""
    values = config.to_json()
    may_change = {*_MAY_CHANGE}
    for section in config.options:
        values |= {f"{section}.{name}": value for name, value in values.pop(section).items()}
    for one in STRATEGIES.values():
        may_change |= {f"{one.section}.{name}" for name in one.may_change_on_resume}
    return {name: value for name, value in values.items() if name not in may_change}


# How long the write of the checkpoint before is awaited. Where the disk is slower than that, ranks
# leave out one here and another there, and few are complete.
_WRITE_SECONDS = 2.0
_LAST_SECONDS = 60.0  # the same, for the last one


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """The position at which a run continues."""

    epoch: int
    batch: int
    metrics: Mapping[str, Any]
    shrinking: Mapping[str, Any] | None = None  # of the session that narrows the model

    @classmethod
    def made_by_others(
        cls,
        *,
        epoch: int,
        steps: int,
        batch: int = 0,
        offset: int | None = None,
        shrinking: Mapping[str, Any] | None = None,
        **known: Any,
    ) -> "LoopState":
        """Where a rank continues after steps of others: what a step costs is counted from here."""
        metrics = {"epochs": epoch, "steps": steps, "counted_from": steps, "offset": offset}
        zeros = dict.fromkeys(("train_seconds", "loss_sum", "epoch_seconds"), 0.0)
        zeros |= dict.fromkeys(("samples", "epoch_samples"), 0)
        if shrinking is not None:
            shrinking = {**shrinking, "steps": steps}
        return cls(epoch=epoch, batch=batch, metrics=metrics | zeros | known, shrinking=shrinking)


class Checkpoints:
    """The checkpoints of one rank: each rank saves its own state."""

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
        self._last = self.base = 0
        self._waits_for_evaluation = False

    def resume(self) -> LoopState:
        """Brings everything where the checkpoint of `resume_step` has it; a collective."""
        step, state, problem = self._config.resume_step, None, None
        assert step is not None, "`reopen` has chosen one"
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

    def begin(self, loop_state: LoopState | None, base: int | None = None) -> None:
        """Get ready to save, if that is asked for; a collective, but for one who joins."""
        strategy, is_resumed = self._strategy, loop_state is not None and base is None
        if is_resumed:
            self._last = self._config.resume_step or 0
            checkpoint.rewind(self._directory, rank=self._rank, step=self._last)
        if self._config.checkpoint_every is None:
            return
        label = 0 if loop_state is None else strategy.checkpoint_label(loop_state.metrics["steps"])
        if base is not None:
            self.base, self._last = base, label + base
        else:
            all_labels = strategy.agree(label)
            if is_resumed:
                # Labels rise, also where ranks of another number make fewer steps, and are the same
                # on all: none is due before the furthest rank reaches a new one.
                self.base = max(0, self._last - max(all_labels))
                self._last = max(all_labels) + self.base
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

    def after_step(self, steps: int, loop_state: Callable[[], LoopState]) -> None:
        """Saves, if that is due.

        In mode stale the ranks come together to save. Where a rank was lost, epochs end after
        unequal steps:

        1. Rank 0 is in step 50, and saves; rank 1 is in step 48, the last of the epoch, and
           evaluates. That is an error on both: rank 1 comes for its evaluation again.
        2. Rank 0 saves nothing before it has evaluated, too. Then all are in the same place: rank 0
           waits in its next step, and rank 1 comes as soon as it is in step 50.
        3. Both save under the greater of their labels.
        """
        every = self._config.checkpoint_every
        if self._saver is None or every is None or self._waits_for_evaluation:
            return
        self._saver.wait(0.0)  # says what has failed since
        label = self._strategy.checkpoint_label(steps) + self.base
        if label <= self._last or not self._strategy.checkpoint_due(steps, every):
            return
        if not self._strategy.is_stale:
            self._last = label
            self._save(self._state(loop_state()), label, _WRITE_SECONDS)
            return
        session = self._strategy.session
        assert session is not None
        try:
            ends = session.agree([steps, label, self._last])  # as in `end`: others may be there
            state = self._state(loop_state())
            self._last = label = _common_label(ends)
            self._save(state, label, _WRITE_SECONDS)
        except EvictedError:
            raise
        except UnlikeCallsError as error:
            self._waits_for_evaluation = True
            why = str(error).partition(". ")[0]
            text = (
                f"rank {self._rank}: the checkpoint of step {label} waits for the next evaluation"
            )
            self._emit({"event": "checkpoint", "text": f"{text}: {why}"})
        except GossipError as error:  # a rank was lost in the middle
            self._last = label
            text = f"rank {self._rank}: the checkpoint of step {label} is left out: {error}"
            self._emit({"event": "checkpoint", "text": text})

    def after_evaluation(self) -> None:
        """All ranks are in the same place."""
        self._waits_for_evaluation = False

    def end(self, steps: int, loop_state: LoopState) -> str | None:
        """Saves the last one, with all ranks that live; why there is none, if so; a collective."""
        if self._saver is None:
            return None
        label = self._strategy.checkpoint_label(steps) + self.base
        try:
            ends = self._strategy.agree([steps, label, self._last])
            alike = len({made for made, *_ in ends}) == 1 and not self._strategy.is_stale
            if not any(made for made, *_ in ends):
                return None
            if alike and all(last == label for *_, last in ends):
                return None
            self._last = _common_label(ends)
            state = self._state(loop_state, drain=not alike)
            if self._save(state, self._last, _LAST_SECONDS):
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

    def _state(self, loop_state: LoopState, *, drain: bool = False) -> dict[str, Any]:
        session = self._strategy.session
        if session is None:
            state = replica_state(self._model, self._optimizers, copy=False)
        else:
            state = session.state_dict(drain=drain, copy=False)
        return {
            **state,
            "strategy": self._strategy.state_dict(),
            "random": random_state(self._device),
            "loop": {**dataclasses.asdict(loop_state), "metrics": dict(loop_state.metrics)},
        }

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        if (why := is_behind(self._config, state["loop"]["epoch"])) is not None:
            return why
        if self._strategy.session is None:
            return misfit(self._model, self._optimizers, state)
        return None  # a session looks for itself

    def _save(self, state: dict[str, Any], label: int, wait_seconds: float) -> bool:
        assert self._saver is not None
        members = self._strategy.living
        return self._saver.save(state, step=label, members=members, wait_seconds=wait_seconds)


def _common_label(ends: Sequence[Sequence[int]]) -> int:
    """Return one label for all ranks, of the steps, label and last label of each."""
    return max(max(label, last + 1) for _, label, last in ends)


def narrow_as_saved(config: TrainConfig, run_dir: RunDir, model: nn.Module, *, rank: int) -> None:
    """Narrow the model to the widths of the checkpoint that is resumed; local."""
    if config.resume is None or config.apoptosis is None:
        return
    directory, step = run_dir.checkpoints, config.resume_step
    members = checkpoint.find(directory, step=step, run=config.run_name).members
    whose = rank if rank in members else members[0]
    state = checkpoint.load(directory, rank=whose, step=step, mmap=True)
    narrow(model, {name: tensor.shape for name, tensor in state["model"].items()})


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
    """Begins with the mean of the saved replicas where other ranks had saved them; local."""
    if config.resume is None:
        return None
    step, directory = config.resume_step, run_dir.checkpoints
    assert step is not None, "`reopen` has chosen one"
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
            f"others could begin with. Give --nproc {before}; or begin another run from the model "
            f"of one rank: `gossipgrad export {run_dir.path} FILE --rank 0`, and load it in a job."
        )
    loops: dict[int, Mapping[str, Any]] = {}

    def read() -> Iterator[Mapping[str, Any]]:
        for one in ranks:
            state = checkpoint.load(directory, rank=one, step=step, mmap=True)
            loops[one] = state["loop"]
            yield state
            del state  # before the next one is read

    mean = average_states(read())
    furthest = max(loops.values(), key=lambda one: (one["epoch"], one["batch"]))
    if why := misfit(model, optimizers, mean) or is_behind(config, furthest["epoch"]):
        raise ValueError(f"the checkpoint of step {step} cannot be resumed: {why}")
    own = replica_state(model, optimizers, copy=False)["optimizers"]
    mean["optimizers"] = [
        {**one, "groups": here["groups"]} for one, here in zip(mean["optimizers"], own, strict=True)
    ]
    load_replica(model, optimizers, mean)
    metrics, epoch = furthest["metrics"], furthest["epoch"]
    batch = round(min(1.0, furthest["batch"] / max(1, metrics["epoch_batches"])) * epoch_batches)
    note = (
        f"the checkpoint of step {step} was saved by {len(ranks)} ranks, and {world_size} "
        "continued from their consensus: not bit for bit what those would have done"
    )
    if rank == 0:
        warnings.warn(note, stacklevel=2)
    state = LoopState.made_by_others(
        epoch=epoch,
        batch=batch,
        steps=epoch * epoch_batches + batch,
        offset=loops[rank]["metrics"]["offset"] if rank in loops else None,
        shrinking=furthest["shrinking"],
        **{name: metrics[name] for name in ("best", "seconds")},
    )
    return state, note
