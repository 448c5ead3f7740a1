"""Models that FSDP2 shards: which part a rank holds, and letting go of what was gathered."""

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gossipgrad.comm import is_sharded

__all__ = ["reshard", "shard_of"]


def reshard(model: nn.Module) -> None:
    """Lets go of full parameters that FSDP2 has gathered and would use again; local.

    After a forward pass without a backward pass, the root module keeps them for the next one. They
    are copies: once the shards are written, the next pass must gather anew.
    """
    loaded = sys.modules.get("torch.distributed.fsdp")  # its import takes long where it is unused
    if loaded is not None:
        for module in model.modules():
            if isinstance(module, loaded.FSDPModule):
                module.reshard()


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
