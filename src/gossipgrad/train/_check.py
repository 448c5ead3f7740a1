"""What can be known to be wrong before a process starts."""

import warnings
from importlib.util import find_spec
from pathlib import Path

from gossipgrad import data
from gossipgrad.comm import check_secret
from gossipgrad.data import TensorSamples

from ._config import DEFAULT_LR, TrainConfig
from ._device import check_device, find_device, with_island
from ._loggers import check_loggers
from ._optimizer_options import SECTIONS
from ._optimizers import make_optimizers
from ._tasks import load_job


def check(config: TrainConfig, world_size: int, *, is_launcher: bool = False) -> None:
    """Refuse a run that cannot work on so many ranks, and get its data ready.

    A launcher, which only waits afterwards, tries no job on a GPU: it would keep hundreds of
    megabytes of it to the end of the run.

    Raises:
        ValueError: An option does not fit another, the data or this machine.
        JobError: An attribute of the job cannot work.
        GossipError: A built-in data set is missing and could not be fetched.
    """
    if find_spec("safetensors") is None:
        raise ValueError("a run exports its model: pip install 'gossipgrad[train]'.")
    check_loggers(config)
    check_secret()
    check_device(config)
    config = with_island(config, world_size)
    if 1 < world_size == config.island_size:
        warnings.warn(
            f"island is {world_size}, which is all processes: they average gradients, and no "
            "other island is there to gossip with.",
            stacklevel=2,
        )
    if config.job is None:
        data.prepare(config.data, config.data_dir)
    job, name = load_job(config), f"--job {config.job}" if config.job else config.data
    device = find_device(config, rank=0)
    if config.job is not None and (device.type == "cpu" or not is_launcher):
        job.try_out(config.batch_size, device)
    make_optimizers(config.resolved(nproc=world_size, out=Path()), job.model, job)
    num_samples, in_memory, has_labels = world_size, False, False
    if job.train_loader is None:
        train = job.train_samples()
        num_samples, in_memory = len(train), isinstance(train, TensorSamples)
        has_labels = config.shards != "by-label" or train.labels is not None
    elif config.shuffle != "global":
        raise ValueError(
            f"shuffle is {config.shuffle}, but the loader of {name} assigns the samples: leave "
            "--shuffle out."
        )
    else:
        _warn_of_unused(config, "Job.train_loader makes the batches", "batch_size", "data_threads")
    if own := job.optimizer is not None:
        _warn_of_own_optimizer(config)
    steps = config.total_steps(job.epoch_batches(config.step_samples, world_size))
    if config.max_steps is not None and config.max_steps > steps:
        warnings.warn(
            f"max_steps={config.max_steps} is not reached: {config.epochs} epochs have {steps} "
            "steps; give more --epochs.",
            stacklevel=2,
        )
    setting = config.setting(world_size, total_steps=steps, has_own_optimizer=own)
    config.traits.check(config.strategy_options, setting)
    if num_samples < world_size:
        raise ValueError(
            f"{world_size} processes cannot share the {num_samples} samples of {name}; start fewer."
        )
    if config.shuffle == "ring" and not in_memory:
        raise ValueError(
            f"shuffle ring moves samples that lie in memory, each for itself, which those of "
            f"{name} do not (those of a job do if Job.train is a TensorDataset of inputs and "
            "targets); use --shuffle local or global."
        )
    if config.shuffle == "ring" and num_samples < 2 * world_size:
        raise ValueError(
            f"shuffle ring needs two samples on each of {world_size} processes, but {name} has "
            f"{num_samples}; start fewer."
        )
    if config.shuffle != "global" and config.shards == "by-label" and not has_labels:
        raise ValueError(f"{name} has no labels to shard by; use --shards random.")


def _warn_of_own_optimizer(config: TrainConfig) -> None:
    for section, kind in SECTIONS.items():
        if config.options[section] != kind():
            warnings.warn(
                f"{config.options[section]} is not used: the job has an optimizer.", stacklevel=3
            )
    of_optimizer = ("optimizer", "lr", "lr_rule", "weight_decay")
    _warn_of_unused(config, "the job has an optimizer", *of_optimizer)


def _warn_of_unused(config: TrainConfig, why: str, *names: str) -> None:
    for name in names:
        usual = (TrainConfig.__dataclass_fields__[name].default, DEFAULT_LR[config.optimizer])
        if (value := getattr(config, name)) not in usual:
            warnings.warn(f"{name}={value} is not used: {why}.", stacklevel=4)
