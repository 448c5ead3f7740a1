"""Tensors that are sharded: which part a rank holds."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gossipgrad.comm._buckets import is_sharded

__all__ = ["shard_of"]


def shard_of(tensors: Iterable[Tensor]) -> dict[str, list[int]] | None:
    """This rank's place, and the number of places, on each mesh axis that some are sharded over.

    None if none is; local.
    """
    places: dict[str, list[int]] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            sharded: Any = tensor  # a DTensor, which is not imported here
            mesh = sharded.device_mesh
            names = mesh.mesh_dim_names or range(mesh.ndim)
            axes = zip(names, sharded.placements, mesh.get_coordinate(), mesh.shape, strict=True)
            for axis, placement, at, size in axes:
                if size > 1 and not placement.is_replicate():
                    places[str(axis)] = [at, size]
    return places or None
