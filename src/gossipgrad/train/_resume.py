"""Going on with a run that has checkpoints: whether it can be, and from which of them."""

import dataclasses
from pathlib import Path
from typing import Any

from gossipgrad import checkpoint

from ._config import TrainConfig
from ._layout import RunDir

# What a run may be resumed with another value of: how far it goes, where things lie, how long ranks
# wait, and what is told of it. All else decides figures.
MAY_CHANGE = frozenset(
    {
        *("epochs", "nproc", "out", "overwrite", "resume", "resume_step", "data_dir"),
        *("checkpoint_every", "keep_checkpoints", "data_threads", "start_seconds"),
        *("shuffle_deadline_seconds", "log_every", "trace", "tensorboard", "wandb", "quiet"),
        *("gossip.deadline_seconds", "gossip.deadline_floor_seconds"),
        "gossip.lost_after_seconds",
    }
)


def config_of_run(folder: Path) -> TrainConfig:
    """The options that the run in a folder is resumed with.

    Raises:
        ValueError: The folder holds no `config.json` of a run.
    """
    saved = TrainConfig.from_file(RunDir(folder).config)
    return dataclasses.replace(saved, resume=folder, out=folder)


def reopen(config: TrainConfig) -> tuple[TrainConfig, RunDir]:
    """The folder of the run that `config` resumes, and the options with the step filled in.

    What its last start had put together is removed; metrics and checkpoints stay.

    Raises:
        ValueError: There is no such run or checkpoint, or the options contradict those of the run.
    """
    assert config.resume is not None
    run_dir = RunDir(config.resume)
    if config.out not in (None, config.resume):
        raise ValueError(
            f"out is {config.out}, but a run goes on in its own folder, {config.resume}: leave "
            "--out out, or copy the folder and resume the copy."
        )
    saved = TrainConfig.from_file(run_dir.config)
    _check_alike(config, saved, run_dir.path)
    step = config.resume_step
    there = checkpoint.steps(run_dir.checkpoints)
    if not there:
        raise ValueError(
            f"{run_dir.path} has no checkpoint that all ranks have saved: a run saves them with "
            "--checkpoint-every."
        )
    if step is None:
        step = there[-1]
    elif step not in there:
        raise ValueError(
            f"resume_step is {step}, but the checkpoints that all ranks have saved are of steps "
            f"{', '.join(map(str, there))}."
        )
    try:
        run_dir.reopen()
    except OSError as error:
        raise ValueError(f"cannot write to {error.filename}: {error.strerror}.") from error
    return dataclasses.replace(config, resume_step=step, out=run_dir.path), run_dir


def saved_ranks(directory: Path, step: int) -> tuple[int, ...]:
    """The ranks whose states make up the checkpoint of a step.

    Raises:
        ValueError: There is none that can be read.
    """
    first = 0
    while step not in checkpoint.steps(directory, rank=first):
        first += 1
        if first > 1 << 16:
            raise ValueError(f"{directory} has no checkpoint of step {step}")
    found = checkpoint.manifest(directory, rank=first, step=step)
    return tuple(found.members)


def _check_alike(config: TrainConfig, saved: TrainConfig, folder: Path) -> None:
    nproc = saved.nproc or 1
    ours = _flat(config.resolved(nproc=nproc, out=folder))
    theirs = _flat(saved.resolved(nproc=nproc, out=folder))
    for name, value in theirs.items():
        if name not in MAY_CHANGE and ours[name] != value:
            option = name.rpartition(".")[2]
            raise ValueError(
                f"{option} is {ours[name]}, but the run in {folder} has {option}={value}: leave "
                f"--{option.replace('_', '-')} out to resume it, or begin another run."
            )


def _flat(config: TrainConfig) -> dict[str, Any]:
    values = config.to_json()
    nested = {
        f"{name}.{inner}": value
        for name in ("gossip", "post_local")
        for inner, value in values.pop(name).items()
    }
    return {**values, **nested}
