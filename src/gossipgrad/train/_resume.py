"""Going on with a run that has checkpoints: whether it can be, and from which of them."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossipgrad import checkpoint

from ._config import TrainConfig
from ._layout import RunDir
from ._versions import other_versions, versions
from .strategies import STRATEGIES

# What a run may be resumed with another value of: how far it goes, where it runs, where things lie,
# how long ranks wait, which faults are injected, and what is shown. All else decides figures.
_MAY_CHANGE = frozenset(
    {
        *("epochs", "nproc", "out", "overwrite", "resume", "resume_step", "data_dir"),
        *("checkpoint_every", "keep_checkpoints", "data_threads", "start_seconds"),
        *("max_steps", "evaluate_every", "keep_best"),
        *("log_every", "trace", "tensorboard", "wandb", "quiet"),
        *("lost_after_seconds", "encrypt", "device", "threads"),
    }
)


def config_of_run(folder: Path) -> TrainConfig:
    """The options that the run in a folder is resumed with.

    Raises:
        ValueError: The folder holds no `config.json` of a run.
    """
    saved = TrainConfig.from_file(RunDir(folder).config, same_run=True)
    return dataclasses.replace(saved, resume=folder, out=folder)


def reopen(
    config: TrainConfig, *, hold: Callable[[RunDir], None] = lambda run_dir: None
) -> tuple[TrainConfig, RunDir]:
    """The folder of the run that `config` resumes, and the options with the step filled in.

    What its last end has left stays as it is, until `begin_resumed`.
    """
    assert config.resume is not None
    run_dir = RunDir(config.resume)
    if config.out not in (None, config.resume):
        raise ValueError(
            f"out is {config.out}, but a run goes on in its own folder, {config.resume}: leave "
            "--out out, or copy the folder and resume the copy."
        )
    saved = TrainConfig.from_file(run_dir.config, same_run=True)
    hold(run_dir)
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
    if others := other_versions(_noted_versions(run_dir)):
        warnings.warn(
            f"the run in {run_dir.path} was made with {others}: the result may differ in the "
            "last bits from what it would have come to",
            stacklevel=3,
        )
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


def begin_resumed(config: TrainConfig, run_dir: RunDir, *, rank: int, anew: bool) -> None:
    """Has the folder be that of the run that goes on, now that all have what they go on from.

    For each rank before it writes there. What the last end had put together is removed, `config` is
    written, and metrics of ranks that the run goes on without are put aside, into `former`.
    """
    if config.resume is None:
        return
    assert config.nproc is not None, "resolve the configuration first"
    if anew:
        _put_aside(run_dir, rank)
    try:
        run_dir.resumes.unlink()
    except FileNotFoundError:
        return  # another rank was first
    run_dir.remove_end()
    config.write(run_dir.config, versions())
    for former in run_dir.metrics_ranks():
        if former >= config.nproc:
            _put_aside(run_dir, former)


def _put_aside(run_dir: RunDir, rank: int) -> None:
    if run_dir.metrics(rank).exists():
        run_dir.former_metrics(rank).parent.mkdir(exist_ok=True)
        run_dir.metrics(rank).rename(run_dir.former_metrics(rank))


def _noted_versions(run_dir: RunDir) -> dict[str, Any]:
    noted = json.loads(run_dir.config.read_text()).get("versions")
    return noted if isinstance(noted, dict) else {}


def _check_alike(config: TrainConfig, saved: TrainConfig, folder: Path) -> None:
    ours, theirs = (
        deciding(one.resolved(nproc=saved.nproc or 1, out=folder)) for one in (config, saved)
    )
    for name, value in theirs.items():
        if ours[name] != value:
            raise ValueError(
                f"{name} is {ours[name]}, but the run in {folder} has {name}={value}: leave "
                f"--{name.replace('_', '-')} out to resume it, or begin another run."
            )


def deciding(config: TrainConfig) -> dict[str, Any]:
    """The options of a resolved configuration that decide figures, as plain values."""
    values = config.to_json()
    may_change = {*_MAY_CHANGE}
    for section in config.options:
        values |= {f"{section}.{name}": value for name, value in values.pop(section).items()}
    for one in STRATEGIES.values():
        may_change |= {f"{one.section}.{name}" for name in one.may_change_on_resume}
    return {name: value for name, value in values.items() if name not in may_change}


def edited(config: TrainConfig, state: Mapping[str, Any]) -> str | None:
    """Which option is not what a checkpoint was saved with: `config.json` was edited; None: none.

    Options that the state does not have, as of another version, are not compared.
    """
    saved = state.get("options", {})
    for name, value in deciding(config).items():
        if value != saved.get(name, value):
            return (
                f"{name} is {value} in config.json, but it was saved with {name}={saved[name]}: "
                "put that back, or begin another run with --config"
            )
    return None
