"""What can be known to be wrong before a process starts."""

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad import data, models, topology
from gossipgrad.comm import Faults, check_secret
from gossipgrad.decentralized import check_settings

from ._config import TrainConfig
from ._device import check_device
from ._effects import warn_of_no_effect
from ._loggers import check_loggers
from ._optimizers import make_optimizers, muon_share

# Below it Muon is there in name alone.
_LEAST_MUON_SHARE = 0.1


def check(config: TrainConfig, world_size: int) -> None:
    """Refuse a run that cannot work, and get its data ready.

    Raises:
        ValueError: Options do not fit each other, or a package is missing.
        GossipError: The data set is missing and could not be fetched.
    """
    if find_spec("safetensors") is None:
        raise ValueError("a run exports its model: pip install 'gossipgrad[train]'.")
    check_loggers(config)
    _check_who_may_speak(config)
    check_device(config)
    info = data.info(config.data, config.data_dir, image_size=config.image_size)
    with torch.device("meta"):
        model = models.build(config.model, info)
        optimizers = make_optimizers(config.resolved(nproc=world_size, out=Path()), model)
    _warn_of_idle_muon(config, optimizers)
    if config.strategy == "gossip":
        check_settings(
            topology=config.gossip.topology,
            mode=config.gossip.mode,
            payload=config.gossip.payload,
            every=config.gossip.every,
            average_every=config.gossip.average_every,
            compress=config.gossip.compress,
            seed=config.seed,
            encrypt=config.encrypt or None,
        )
        if config.gossip.topology is not None:
            topology.by_name(config.gossip.topology, world_size, seed=config.seed)
        _check_waits(config)
        faulty = max(Faults.parse(config.gossip.faults or "").ranks, default=0)
        if faulty >= world_size:
            raise ValueError(
                f"faults name rank {faulty}, but there are ranks 0 to {world_size - 1} alone; name "
                "one of these, or start more processes."
            )
    if info.train_samples < world_size:
        raise ValueError(
            f"{world_size} processes cannot share the {info.train_samples} samples of "
            f"{config.data}; start fewer."
        )
    if min(config.batch_size, info.train_samples // world_size) == 1:
        _check_batches_of_one(config, info, model)
    _check_shards(config, info, world_size)
    warn_of_no_effect(config, info, world_size)
    data.prepare(config.data, config.data_dir, image_size=config.image_size)


def _check_who_may_speak(config: TrainConfig) -> None:
    check_secret(config.encrypt or None)
    if config.encrypt and config.strategy not in ("gossip", "local"):
        raise ValueError(
            f"encrypt is on, and strategy {config.strategy} talks through torch's collectives, "
            "which cannot encrypt: use --strategy gossip, or leave --encrypt out and use a network "
            "that encrypts, such as WireGuard."
        )


def _check_waits(config: TrainConfig) -> None:
    is_stale = config.strategy == "gossip" and config.gossip.mode == "stale"
    if config.checkpoint_every is not None and config.shuffle == "ring" and is_stale:
        raise ValueError(
            "checkpoints of shuffle ring wait for the rows that are on their way to neighbours, "
            "and in mode stale no step waits: leave --checkpoint-every out, or use --shuffle "
            "global."
        )
    if is_stale and (config.checkpoint_every or 0) % config.gossip.every:
        assert config.checkpoint_every is not None
        whole = config.checkpoint_every // config.gossip.every * config.gossip.every
        near = [str(steps) for steps in (whole, whole + config.gossip.every) if steps]
        raise ValueError(
            f"checkpoint_every is {config.checkpoint_every}, but in mode stale states are taken "
            f"between rounds, which have {config.gossip.every} steps each (every): use "
            f"--checkpoint-every {' or '.join(near)}."
        )
    waits = config.shuffle == "ring" and config.shuffle_deadline_seconds > 0
    if waits and config.gossip.mode == "stale":
        raise ValueError(
            f"shuffle ring waits up to {config.shuffle_deadline_seconds:g} s for rows of a slow "
            "neighbour, and in mode stale no step waits: use --shuffle-deadline-seconds 0, which "
            "hands out old rows instead, or --shuffle global."
        )


def _warn_of_idle_muon(config: TrainConfig, optimizers: list[Optimizer]) -> None:
    trained, total = muon_share(optimizers)
    if config.optimizer == "muon" and trained < _LEAST_MUON_SHARE * total:
        warnings.warn(
            f"optimizer is muon, but of the {total:,} parameters of model {config.model} Muon "
            f"trains {trained:,}, and AdamW the others: torch's Muon takes matrices of hidden "
            "linear layers alone. Use --optimizer adamw.",
            stacklevel=3,
        )


def _check_batches_of_one(config: TrainConfig, info: data.DatasetInfo, model: nn.Module) -> None:
    if info.kind == "text":
        return
    try:
        with torch.device("meta"):
            model.train()(torch.empty(1, *info.input_shape))
    except ValueError as error:  # batch normalisation of one pixel of one sample
        raise ValueError(
            f"model {config.model} cannot train on batches of a single sample of shape "
            f"{info.input_shape}: its batch normalisation has nothing to average over; use "
            "--batch-size 2 or more, with at least two samples for each process."
        ) from error


def _check_shards(config: TrainConfig, info: data.DatasetInfo, world_size: int) -> None:
    if config.shuffle == "ring":
        if config.data == "imagefolder" or info.kind == "text":
            raise ValueError(
                f"shuffle ring moves samples that lie in memory, each for itself, which those of "
                f"{config.data} do not; use --shuffle local or global."
            )
        if info.train_samples < 2 * world_size:
            raise ValueError(
                f"shuffle ring needs two samples on each of {world_size} processes, but "
                f"{config.data} has {info.train_samples}; start fewer."
            )
    if config.shuffle != "global" and config.shards == "by-label" and info.kind == "text":
        raise ValueError(f"{config.data} has no labels to deal by; use --shards random.")
