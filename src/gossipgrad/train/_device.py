"""Where a rank trains: on the CPU, or on one of the GPUs of its machine."""

import dataclasses
import os
import sys
from collections.abc import Mapping

import torch

from ._config import TrainConfig
from ._world import find_world

# Where a launcher writes a rank's number on its machine, and how many ranks that has.
_LOCAL_RANKS = {"torchrun": "LOCAL_RANK", "Slurm": "SLURM_LOCALID"}
_LOCAL_SIZES = {"torchrun": "LOCAL_WORLD_SIZE", "Slurm": "SLURM_STEP_TASKS_PER_NODE"}


def check_device(config: TrainConfig) -> None:
    """Refuse a GPU where there is none, and tell of one that is not used."""
    if config.device == "cuda":
        find_device(config, rank=0)
    if config.device == "cpu" and not config.quiet and torch.cuda.is_available():
        print(
            "gossipgrad: a GPU is here and is not used: --device cuda",
            file=sys.stderr,
            flush=True,
        )


def find_device(
    config: TrainConfig, *, rank: int, environ: Mapping[str, str] = os.environ
) -> torch.device:
    """The device of a rank: ranks of one machine share out its GPUs in turn."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise ValueError(
            "device is cuda, but torch finds no GPU that it can use on this machine; use --device "
            "cpu, or a build of torch for the GPU and its driver."
        )
    world = find_world(environ)
    local_rank = rank if world is None else int(environ.get(_LOCAL_RANKS[world.launcher], rank))
    return torch.device("cuda", local_rank % count)


def find_backend(
    config: TrainConfig, world_size: int, *, environ: Mapping[str, str] = os.environ
) -> str:
    """The backend of collectives of the baselines: NCCL where each rank has a GPU of its own."""
    if find_device(config, rank=0).type == "cpu":
        return "gloo"
    ranks = max(ranks_of_nodes(world_size, environ=environ))
    return "cpu:gloo,cuda:nccl" if ranks <= torch.cuda.device_count() else "gloo"


def ranks_of_nodes(world_size: int, *, environ: Mapping[str, str] = os.environ) -> set[int]:
    """How many ranks the machines have: one number if all have as many, or only this is known."""
    world = find_world(environ)
    sizes = str(world_size)
    if world is not None:
        sizes = environ.get(_LOCAL_SIZES[world.launcher], sizes)
    return {int(part.partition("(")[0]) for part in sizes.split(",")}


def with_island(
    config: TrainConfig, world_size: int, *, environ: Mapping[str, str] = os.environ
) -> TrainConfig:
    """The same run with the number of ranks of an island, which may be those of a machine."""
    size = config.island
    if size == "node":
        size, *others = sorted(ranks_of_nodes(world_size, environ=environ))
        if others:
            raise ValueError(
                f"island is node, but machines have {size} to {others[-1]} processes: start as "
                "many on each, or give a number."
            )
    if world_size % size:
        raise ValueError(
            f"island is {size}, but {world_size} processes are no multiple of it: start "
            f"{-(-world_size // size) * size}, or give another --island."
        )
    return dataclasses.replace(config, island=size)
