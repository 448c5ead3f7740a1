"""Runs of one rank in this process, as torchrun starts it: a tenth of a second each."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gossipgrad import checkpoint
from gossipgrad.train import Outcome, TrainConfig, config_of_run, run
from support.waiting import HANG_SECONDS

__all__ = ["each_step", "events", "resume_alone", "run_alone", "stopping_after"]

WORLD = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run_alone(out: Path | None, **options: Any) -> Outcome:
    """A run of strategy local, which replaces one that was there."""
    usual: dict[str, Any] = {"strategy": "local", "quiet": True, "overwrite": True}
    usual["run_name"] = None if out is None else out.name
    return _run(TrainConfig(out=out, **usual | {"trace": 0} | options))


def resume_alone(run_dir: Path, **changes: Any) -> Outcome:
    """Resumes the run in a folder, with some options changed."""
    return _run(dataclasses.replace(config_of_run(run_dir), **changes))


def _run(config: TrainConfig) -> Outcome:
    save = checkpoint.Saver.save

    def patiently(saver: checkpoint.Saver, state: Any, **options: Any) -> bool:
        """However slow the disk is, no checkpoint is left out."""
        return save(saver, state, **options | {"wait_seconds": HANG_SECONDS})

    with (
        mock.patch.dict(os.environ, WORLD),
        mock.patch.object(checkpoint.Saver, "save", patiently),
    ):
        return run(config)


def events(out: Path, kind: str = "step", rank: int = 0) -> list[dict[str, Any]]:
    """What a rank has written to its metrics."""
    lines = (out / f"metrics-rank{rank}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@contextmanager
def each_step(act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act(step)` in each step, from 1, of runs of the built-in tasks in the block."""
    loss, steps = torch.nn.functional.cross_entropy, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        act(steps)
        return loss(*args, **options)

    with mock.patch.object(torch.nn.functional, "cross_entropy", counted):
        yield


def stopping_after(steps: int) -> Any:
    """Presses Ctrl-C after so many steps; a few more may be made until it is seen."""
    return each_step(lambda step: step == steps and os.kill(os.getpid(), signal.SIGINT))
