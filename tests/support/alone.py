"""One rank that trains alone, in this process."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gossipgrad.data import Dataset
from gossipgrad.train import Job, TrainConfig
from gossipgrad.train._folder import RunDir, claim
from gossipgrad.train._rank import train_rank
from gossipgrad.train._result import RankResult
from gossipgrad.train._tasks import load_job
from support.jobs import job_of

__all__ = ["begin_alone", "train_alone"]


def begin_alone(out: Path, **options: Any) -> tuple[TrainConfig, RunDir]:
    """The options and the folder of a run of strategy local, which replaces one that was there."""
    run_dir = claim(out, name="", overwrite=True)
    config = TrainConfig(**{"strategy": "local", "run_name": out.name, **options})
    config = config.resolved(nproc=1, out=run_dir.path)
    config.write(run_dir.config)
    return config, run_dir


def train_alone(
    config: TrainConfig,
    run_dir: RunDir,
    *,
    dataset: Dataset | None = None,
    job: Job | None = None,
    rank: int = 0,
    stop: threading.Event | None = None,
    emit: Callable[[dict[str, Any]], None] = lambda event: None,
) -> RankResult:
    """Trains a job, else the one that the options name, on another data set if one is given."""
    threads = torch.get_num_threads()
    if job is None:
        job = load_job(config) if dataset is None else job_of(config, dataset)
    try:
        return train_rank(
            config,
            job,
            run_dir,
            rank=rank,
            world_size=rank + 1,
            stop=stop or threading.Event(),
            emit=emit,
        )
    finally:
        torch.set_num_threads(threads)
