"""The front door: one call, one run."""

import contextlib
import os

from ._check import check
from ._config import TrainConfig
from ._given_world import find_world
from ._joined import let_go
from ._launcher import launch
from ._layout import RunDir, claim
from ._living import take_part
from ._losses import stands_for_most
from ._outcome import Outcome, exit_code_of
from ._progress import make_progress
from ._result import after_checks
from ._resume import reopen
from ._run_lock import run_lock
from ._summary import compose, finish
from ._versions import versions
from ._world import run_in_world

_DEFAULT_NPROC = 4


def run(config: TrainConfig, *, show_config: bool = False) -> Outcome:
    """Train as `config` says and leave the run in its folder.

    Starts the workers on this machine and waits for them, or, inside a world that torchrun or
    Slurm has started, takes part in it as one rank. What can be checked is checked before a process
    starts.

    A gossip run goes on when ranks die: the exported model is then the consensus of those that are
    left, and the summary tells who was lost, when, and what of the data went with them.

    Like every program that starts processes with multiprocessing, a script that calls this keeps
    the call under `if __name__ == "__main__":`.

    Args:
        config: The options.
        show_config: Print `config.json` before the start.

    Returns:
        How it ended, and where the files are.

    Raises:
        ValueError: The options cannot work; nothing was started.
        GossipError: The run failed and nothing can be kept of it, or its data cannot be fetched.
        RuntimeError: A `ValueError` came up after the options were checked; it is the cause.
    """
    config.warn_of_unused()
    if (world := find_world(os.environ)) is not None:
        return run_in_world(config, world, show_config=show_config)
    nproc = config.nproc or _DEFAULT_NPROC
    check(config, nproc)
    with contextlib.ExitStack() as held:

        def hold(run_dir: RunDir) -> None:
            held.enter_context(take_part(run_dir, first=True))

        if config.resume is None:
            overwrite = config.overwrite
            run_dir = claim(config.out, name=config.label, overwrite=overwrite, hold=hold)
            config = config.named()
        else:
            config, run_dir = reopen(config, hold=hold)
        config = config.resolved(nproc=nproc, out=run_dir.path)
        if config.resume is None:  # else when it is known that the run goes on
            config.write(run_dir.config, versions())
        if show_config:
            print(config.text(versions()), end="", flush=True)
        held.enter_context(run_lock(run_dir))  # so that nobody who joins puts it together
        with after_checks():
            return _run_here(config, run_dir, nproc)


def _run_here(config: TrainConfig, run_dir: RunDir, nproc: int) -> Outcome:
    """The run in local workers, from their start to the report."""
    progress = make_progress(config, nproc)
    try:
        launched = launch(config, run_dir, progress)
    except BaseException:
        let_go(run_dir)
        raise
    finally:
        progress.close()
    if not launched.results:
        let_go(run_dir)
        return Outcome(
            exit_code=exit_code_of(launched.stopped_by),
            begun=launched.begun,
            run_dir=run_dir.path,
        )
    exported = stands_for_most(launched.results)
    summary = compose(
        config,
        launched.results,
        {rank: lost.cause for rank, lost in launched.failures.items()},
        world_size=nproc,
        exported=exported,
        stopped_by=launched.stopped_by,
        run_dir=run_dir,
        when_seconds={rank: lost.when_seconds for rank, lost in launched.failures.items()},
    )
    report = finish(run_dir, summary, exported)
    return Outcome(
        exit_code=exit_code_of(launched.stopped_by if summary["interrupted"] else None),
        run_dir=run_dir.path,
        summary=summary,
        report=report,
    )
