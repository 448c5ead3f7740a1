"""Workers of the launcher that something befalls at a certain moment, however late others are."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from gossipgrad.train import _run, _state
from gossipgrad.train._metrics import Event, Metrics
from gossipgrad.train._worker import worker_main
from support.waiting import HANG_SECONDS, until

__all__ = ["held_at", "struck_at_start"]


@contextmanager
def held_at(steps: int) -> Iterator[Callable[[], None]]:
    """Has the workers of runs in the block stand still after so many steps, until they may go on.

    Gives what lets them go on. They beat meanwhile, and wait for slow disks as long as it takes.
    """
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "open"
        body = partial(_held, gate=gate, steps=steps)
        with mock.patch.object(_run, "worker_main", body):
            yield gate.touch


@contextmanager
def struck_at_start(rank: int, number: signal.Signals) -> Iterator[None]:
    """Has a worker of runs in the block send itself a signal before it does anything."""
    body = partial(_struck, rank=rank, number=number)
    with mock.patch.object(_run, "worker_main", body):
        yield


def _held(*, gate: Path, steps: int) -> int:
    _state._WRITE_SECONDS = HANG_SECONDS
    write = Metrics.write

    def held(metrics: Metrics, event: str, **values: object) -> Event:
        record = write(metrics, event, **values)
        if event == "step" and metrics.steps >= steps:
            until(gate.exists)
        return record

    with mock.patch.object(Metrics, "write", held):
        return worker_main()


def _struck(*, rank: int, number: signal.Signals) -> int:
    if os.environ["RANK"] == str(rank):
        os.kill(os.getpid(), number)
    return worker_main()
