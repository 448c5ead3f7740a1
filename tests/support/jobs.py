"""Jobs of the small data sets that tests make."""

import torch
from torch import nn

from gossipgrad.data import Dataset
from gossipgrad.train import Job, TrainConfig, build_model, cross_entropy

__all__ = ["job_of", "job_on"]


def job_of(config: TrainConfig, dataset: Dataset) -> Job:
    """The built-in model that a configuration names, on a data set."""
    torch.manual_seed(config.seed)
    return job_on(dataset, build_model(config.model, dataset.info))


def job_on(dataset: Dataset, model: nn.Module | None = None) -> Job:
    """A model, or one that does not matter, on a data set."""
    return Job(
        model=model or nn.Linear(1, 1),
        train=dataset.train,
        test=dataset.test,
        loss=cross_entropy,
    )
