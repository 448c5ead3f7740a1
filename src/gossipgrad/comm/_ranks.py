"""The ranks of a session: from None, a process group or a device mesh."""

import math
import os
from collections.abc import Sequence
from numbers import Real

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gossipgrad.comm._group import Group

__all__ = [
    "check_island",
    "check_ranks",
    "resolve_group",
    "resolve_island",
    "resolve_optimizers",
]


def check_ranks(process_group: object, mesh: object) -> None:
    """Raise `ValueError` unless at most one of the two is given, and is valid; local."""
    if process_group is not None and mesh is not None:
        raise ValueError("process_group and mesh name the same thing: give one of them")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh must be a DeviceMesh of one axis, such as mesh['gossip'], got {mesh!r}"
        )
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}: name the one to gossip along, "
            "for example mesh=mesh['gossip']"
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup | Group):
        raise ValueError(
            "process_group must be one of torch.distributed, such as dist.group.WORLD, or a "
            f"gossipgrad.Group, got {process_group!r}"
        )


def resolve_island(
    island: dist.ProcessGroup | DeviceMesh | None,
) -> dist.ProcessGroup | None:
    """Return the ranks that share a replica, None if each has its own; local.

    A mesh of several axes, such as `mesh["shard", "tensor"]`, is all of its ranks.

    Raises:
        ValueError: It is neither a group nor a mesh.
    """
    if island is None:
        return None
    if isinstance(island, DeviceMesh):
        island = (island if island.ndim == 1 else island._flatten()).get_group()
    if not isinstance(island, dist.ProcessGroup):
        raise ValueError(
            "island must be the axis of a DeviceMesh inside a replica, such as mesh['node'], or "
            f"a process group, got {island!r}"
        )
    return island if island.size() > 1 else None


def check_island(
    island: dist.ProcessGroup | None, between: dist.ProcessGroup | DeviceMesh | Group | None
) -> None:
    """Raise `ValueError` unless this rank alone is both in its island and between islands; local.

    `between` are the ranks that take part in the session; a `Group` is taken at its word.
    """
    if island is None or isinstance(between, Group):
        return
    group = between.get_group() if isinstance(between, DeviceMesh) else between
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "island= are the ranks that share a replica: also give the axis between islands, "
            "such as mesh=mesh['gossip']"
        )
    ranks = dist.get_process_group_ranks
    if len(both := {*ranks(island)} & {*ranks(group)}) != 1:
        raise ValueError(
            f"ranks {sorted(both)} are both in this island and in mesh=, and only this rank should "
            "be: give two axes of one mesh, such as mesh=mesh['gossip'], island=mesh['node']"
        )


def resolve_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return one or several optimizers as a list; local.

    A wrapper that subclasses `Optimizer`, such as Accelerate's, has no hooks: it is replaced by the
    optimizer inside it, which makes the steps.

    Raises:
        ValueError: There is none, or one is not a torch optimizer.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers:
        raise ValueError("no optimizer: give the one that trains the model, or a sequence")
    return [_unwrap(each) for each in optimizers]


def _unwrap(optimizer: object) -> Optimizer:
    inner = optimizer
    while isinstance(inner, Optimizer) and not hasattr(inner, "_optimizer_step_pre_hooks"):
        inner = getattr(inner, "optimizer", None)
    if not isinstance(inner, Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer: pass the optimizer that "
            "it wraps (often its `.optimizer`)"
        )
    return inner


def resolve_group(
    process_group: dist.ProcessGroup | Group | None,
    mesh: DeviceMesh | None = None,
    *,
    asks: str = "gossip()",
    start_timeout_seconds: float = 30.0,
) -> Group:
    """Return the group of the ranks that take part: of a group or a mesh axis, by default all.

    Waits for them at most `start_timeout_seconds`, unless they already share a `Group`.

    Raises:
        ValueError: The time is none, both are given, the mesh has several axes, or this process was
            launched as one of several and has no process group; the message then names `asks`.
    """
    seconds: object = start_timeout_seconds
    if not isinstance(seconds, Real) or not 0 < float(seconds) < math.inf:
        raise ValueError(
            f"start_timeout_seconds must be a number of seconds above 0 and finite, got {seconds!r}"
        )
    check_ranks(process_group, mesh)
    if isinstance(process_group, Group):
        return process_group
    if mesh is not None:
        process_group = mesh.get_group()
    elif process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    if process_group is not None:
        return Group.from_process_group(
            process_group, start_timeout_seconds=start_timeout_seconds, call=f"gossipgrad.{asks}"
        )
    launched = os.environ.get("WORLD_SIZE") or "1"
    if launched.strip() != "1":
        raise ValueError(
            f"WORLD_SIZE is {launched}, but torch.distributed is not initialised: call "
            f"torch.distributed.init_process_group('gloo') before {asks}, or unset WORLD_SIZE if "
            "another launcher has left it behind"
        )
    return Group(dist.HashStore(), 0, 1)
