"""Whether a run can be joined: what can be known before a worker starts."""

import dataclasses
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from gossipgrad import checkpoint, data
from gossipgrad.comm import check_secret

from ._config import TrainConfig
from ._device import check_device
from ._invitation import Invitation
from ._layout import RunDir
from ._options import check_at_least, check_fields, make_plain
from .strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """Which run to join, and what is this machine's own; all else is the run's.

    Attributes:
        run: The folder of the run.
        nproc: Workers to start here.
        device: Where they train; None: as the run says.
        data_dir: Folder of data sets here; None: as the run says.
        threads: Threads of compute of each; None: as the run says.
        quiet: Show no progress.
    """

    run: Path
    nproc: int = 1
    device: Literal["cpu", "cuda", "auto"] | None = None
    data_dir: Path | None = None
    threads: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "nproc", "threads")


def find_run(options: JoinConfig) -> tuple[TrainConfig, RunDir, Invitation]:
    """The run to join, as its workers here train in it, and its invitation; gets its data ready.

    Raises:
        ValueError: It cannot be joined, or not from here.
        GossipError: The data set is missing and could not be fetched.
    """
    run_dir = RunDir(options.run)
    _check_is_run(run_dir)
    invitation = Invitation.read(run_dir)
    if invitation is not None and invitation.version != version("gossipgrad"):
        raise ValueError(
            f"the run in {run_dir.path} is one of gossipgrad {invitation.version}, and here is "
            f"{version('gossipgrad')}: install the same."
        )
    config = _config_of(options, run_dir)
    _check_can_grow(config, run_dir)
    if invitation is None:
        raise ValueError(f"the run in {run_dir.path} {_why_not_invited(run_dir)}")
    if invitation.address is None:
        raise ValueError(f"the run in {run_dir.path} cannot be joined: {invitation.refusal}")
    check_secret(None)
    check_device(config)
    _knock(invitation, run_dir)
    if config.job is None:
        data.prepare(config.data, config.data_dir)
    return config, run_dir, invitation


def _check_is_run(run_dir: RunDir) -> None:
    if not run_dir.config.exists():
        what = "holds no run" if run_dir.path.is_dir() else "is no folder"
        raise ValueError(
            f"{run_dir.path} {what}: name the folder that a run which is training writes to, its "
            "--out."
        )


def _config_of(options: JoinConfig, run_dir: RunDir) -> TrainConfig:
    config = TrainConfig.from_file(run_dir.config, same_run=True)
    own = {name: getattr(options, name) for name in ("device", "data_dir", "threads")}
    config = dataclasses.replace(
        config,
        **{name: value for name, value in own.items() if value is not None},
        quiet=options.quiet,
        wandb=None,
        trace=0,  # of steps near the start of the run
    )
    return config.resolved(nproc=config.nproc or 1, out=run_dir.path)


def _check_can_grow(config: TrainConfig, run_dir: RunDir) -> None:
    if not config.traits.can_grow:
        can = " or ".join(one.name for one in STRATEGIES.values() if one.can_grow)
        raise ValueError(
            f"the run in {run_dir.path} has strategy {config.strategy}, and its ranks are those it "
            f"was started with: only runs of strategy {can} can be joined."
        )
    if config.shuffle != "global":
        has = "moves around a ring of" if config.shuffle == "ring" else "belongs to one of"
        raise ValueError(
            f"the run in {run_dir.path} has shuffle {config.shuffle}: every sample {has} the ranks "
            "that were there at the start, and there is none for another. Only runs with --shuffle "
            "global can be joined."
        )


def _why_not_invited(run_dir: RunDir) -> str:
    if run_dir.partial.exists():
        return (
            "is not training: it starts or ends just now, or was killed. If it starts, try again "
            f"when it has told of its first epoch; after a kill {_begin_again(run_dir)}"
        )
    if run_dir.summary.exists():
        return f"is over: {_begin_again(run_dir)}"
    return f"has failed, or was stopped before it began: {_begin_again(run_dir)}"


def _begin_again(run_dir: RunDir) -> str:
    if checkpoint.steps(run_dir.checkpoints):
        return f"go on with it by `gossipgrad train --resume {run_dir.path}`."
    return f"begin another like it by `gossipgrad train --config {run_dir.config}`."


def _knock(invitation: Invitation, run_dir: RunDir) -> None:
    """Refuse a run whose store does not answer, before workers have loaded anything."""
    if invitation.store is None:
        return
    host, port = invitation.store
    try:
        invitation.knock()
    except OSError as error:
        raise ValueError(
            f"nobody listens at {host}:{port}, where the run in {run_dir.path} has its store "
            f"({error.strerror or error}): it was killed, or is out of reach from this machine. If "
            f"it was killed, {_begin_again(run_dir)}"
        ) from error
