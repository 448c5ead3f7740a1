"""The world of processes that torchrun or Slurm has started, if one has."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of this process among those already started."""

    rank: int
    world_size: int
    launcher: str


def find_world(environ: Mapping[str, str]) -> World | None:
    """The world that the environment describes, None outside of one.

    torchrun sets `RANK` and `WORLD_SIZE`; Slurm sets `SLURM_PROCID` and `SLURM_NTASKS`, and means a
    world where there is more than one task.

    Example:
        >>> find_world({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
        World(rank=3, world_size=8, launcher='Slurm')
        >>> find_world({})
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return World(
            rank=int(environ["RANK"]), world_size=int(environ["WORLD_SIZE"]), launcher="torchrun"
        )
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return World(
            rank=int(environ["SLURM_PROCID"]),
            world_size=int(environ["SLURM_NTASKS"]),
            launcher="Slurm",
        )
    return None
