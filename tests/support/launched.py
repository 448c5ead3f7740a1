"""Runs of the launcher in this process: their workers, and what befalls these at a given step."""

import json
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from gossipgrad.train import TrainConfig
from support.held_workers import held_at
from support.waiting import until

__all__ = [
    "after_steps",
    "config",
    "count",
    "kill",
    "pause",
    "press_ctrl_c",
    "stop",
    "wait_for_more",
    "when",
    "workers",
]


def config(out: Path, **options: object) -> TrainConfig:
    """A run without a word, with a line of metrics a step."""
    return TrainConfig(out=out, overwrite=True, quiet=True, log_every=1, **options)


def workers() -> dict[str, multiprocessing.Process]:
    """Those that live, by name.

    None is asked for its exit code: of two threads that ask at once, the launcher's and this one,
    one reads it and the other one takes it for 255.
    """
    found = {}
    for process in [*multiprocessing.process._children]:
        with suppress(OSError, ValueError):  # it has ended, or was closed
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] != "Z":
                found[process.name] = process
    return found


@contextmanager
def when(condition: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` in a thread as soon as `condition` holds, unless the block is over before."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            if condition():
                act()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def count(out: Path, rank: int, event: str = "step") -> int:
    """How many events of a kind a rank has written to its metrics."""
    file = out / f"metrics-rank{rank}.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return sum(json.loads(line)["event"] == event for line in lines)


@contextmanager
def after_steps(
    out: Path, steps: int, act: Callable[[], None], *, rank: int = 1, before: int | None = None
) -> Iterator[None]:
    """Calls `act` as soon as a rank has written more than `steps` steps to its metrics.

    No rank makes more than `before` steps until it has: a run that ends needs that.
    """

    def act_and_let_go() -> None:
        act()
        go_on()

    held = nullcontext(lambda: None) if before is None else held_at(before)
    with held as go_on, when(lambda: count(out, rank) > steps, act_and_let_go):
        yield


def kill(rank: int) -> Callable[[], None]:
    """Kills a worker when called."""
    return lambda: os.kill(_pid(rank), signal.SIGKILL)


def stop(rank: int) -> Callable[[], None]:
    """Has a worker stand still, for good, when called."""
    return lambda: os.kill(_pid(rank), signal.SIGSTOP)


@contextmanager
def pause(rank: int) -> Iterator[None]:
    """Has a worker stand still for as long as the block."""
    pid = _pid(rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for_more(out: Path, rank: int, event: str, more: int) -> None:
    """Returns when a rank has written so many more events of a kind."""
    goal = count(out, rank, event) + more
    until(lambda: count(out, rank, event) >= goal)


def press_ctrl_c() -> None:
    """As in a terminal, for this process alone."""
    os.kill(os.getpid(), signal.SIGINT)


def _pid(rank: int) -> int:
    pid = workers()[f"gossipgrad-rank{rank}"].pid
    assert pid is not None
    return pid
