"""Starting worker processes on this machine, out of a fork server that has torch loaded."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

from ._config import TrainConfig
from ._result import RunFailedError
from ._signals import Stops
from ._worker_handle import WorkerHandle

Spec = TypeVar("Spec")


def start_workers(
    body: Callable[[Spec, Connection], None],
    specs: Sequence[tuple[int, Spec]],
    config: TrainConfig,
    stops: Stops,
    *,
    called: str = "rank",
) -> Iterator[WorkerHandle]:
    """Start a process for each of some numbered specifications, until a signal asks to stop.

    Args:
        body: What a process does with its specification, and its end of a pipe.
        specs: The specifications, and what the workers are numbered by.
        config: The options.
        stops: The signals so far.
        called: What such a number is, in names of processes and in words.

    Raises:
        RunFailedError: A process cannot be started.
    """
    context = multiprocessing.get_context("forkserver")
    ensure_fork_server(
        [
            "gossipgrad.train._worker",
            "gossipgrad.train._join_worker",
            "torch._dynamo",  # the first optimizer of a process loads it, in a second
            *(["sklearn.datasets"] if config.data == "digits" and config.job is None else []),
        ]
    )
    for number, spec in specs:
        if stops.first is not None:
            return
        ours, theirs = context.Pipe()
        process = context.Process(
            target=body, args=(spec, theirs), name=f"gossipgrad-{called}{number}"
        )
        try:
            process.start()
        except (EOFError, OSError) as error:
            ours.close()
            raise RunFailedError(
                f"{called} {number} could not be started: {error or type(error).__name__}"
            ) from error
        except BaseException:
            ours.close()  # it may run, unknown to us, and ends with its pipe
            raise
        finally:
            theirs.close()
        yield WorkerHandle(process, ours, number)


def ensure_fork_server(preload: list[str]) -> None:
    """Start the fork server of this process with some modules loaded, unless it runs already."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    # The fork server and its children inherit the blocked signals: Ctrl-C in a terminal, or the
    # SIGTERM of a batch system, reaches all processes, and would end those that keep the results.
    # The resource tracker unblocks them when it starts, so it goes first.
    multiprocessing.resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
