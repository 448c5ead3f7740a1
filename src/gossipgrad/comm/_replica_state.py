"""A replica as plain values: parameters, buffers and optimizer state, copied and put back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm._buckets import is_sharded, local
from gossipgrad.comm._optimizer_state import (
    copied,
    group_sizes,
    load_optimizer,
    optimizer_state,
    plain,
    to_host,
)
from gossipgrad.comm._parameters import all_parameters

__all__ = ["load_replica", "misfit", "replica_state"]


def replica_state(
    model: nn.Module, optimizers: Sequence[Optimizer], *, copy: bool = True
) -> dict[str, Any]:
    """All that training changes in a replica, in host memory; local.

    Buffers are among it, those that a model's own state leaves out, too, and what its modules tell
    by `get_extra_state`. Of sharded tensors it is this rank's part. Not gradients. With `copy`
    False tensors that lie there already are no copies.

    Returns:
        `"model"`: tensors by name. `"model_names"`: by names of the model's own `state_dict()`, the
        name in `"model"` of the same tensor: tied ones have several there, and those that it leaves
        out none. `"extra"`: extra states by name of the module. `"optimizers"`:
        of each its kind, hyper-parameters and state. `"shard"`: which part of sharded tensors it
        is: place and number of places on each axis of the mesh; None of whole ones.

    Raises:
        GossipError: An optimizer or a module keeps something that is no plain value.
    """
    named = _named(model, optimizers)
    return {
        "model": {name: to_host(tensor, copy) for name, tensor in named.items()},
        "model_names": _own_names(model, named),
        "extra": {
            name: plain(module.get_extra_state(), f"the extra state of module {name!r}", copy)
            for name, module in _with_extra(model).items()
        },
        "optimizers": [optimizer_state(number, o, copy) for number, o in enumerate(optimizers)],
        "shard": _shard_of(named.values()),
    }


def misfit(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
) -> str | None:
    """Why a replica's state cannot be put into these objects, None if it can."""
    named = _named(model, optimizers)
    if (was := state["shard"]) != (here := _shard_of(named.values())):
        return (
            f"it is of {_told(was)}, here is {_told(here)}: save each shard of a replica in a "
            "directory of its own, and load it from there"
        )
    if odd := sorted(set(state["extra"]) ^ set(_with_extra(model))):
        where = "here" if odd[0] in state["extra"] else "in what was saved"
        return f"the module {odd[0]!r} has no extra state {where}"
    saved, own = _shapes(state["model"]), _shapes(named)
    if saved != own:
        name = min(n for n in saved | own if saved.get(n) != own.get(n))
        return f"{name!r} was saved as {saved.get(name, 'nothing')}, here it is {own.get(name)}"
    kinds = [each["kind"] for each in state["optimizers"]]
    here = [type(optimizer).__name__ for optimizer in optimizers]
    if kinds != here:
        return f"it was saved with the optimizers {', '.join(kinds)}, here are {', '.join(here)}"
    for number, (optimizer, each) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        saved_sizes, sizes = each["sizes"], group_sizes(optimizer)
        if list(saved_sizes) != sizes:
            return (
                f"optimizer {number} trained groups of {saved_sizes} parameters, here it trains "
                f"{sizes}"
            )
    return None


@torch.no_grad()
def load_replica(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
) -> None:
    """Puts back what `replica_state` gave, in place and bit for bit; local.

    `misfit` must have found nothing.
    """
    for name, tensor in _named(model, optimizers).items():
        local(tensor).copy_(state["model"][name])
    for optimizer, each in zip(optimizers, state["optimizers"], strict=True):
        load_optimizer(optimizer, each)
    for name, module in _with_extra(model).items():
        module.set_extra_state(copied(state["extra"][name]))


def _own_names(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    """As `state_dict()` names its tensors; not asked for, since hooks of it may communicate."""
    kept = {id(tensor): name for name, tensor in named.items()}
    names: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        own: dict[str, Tensor] = dict(
            module.named_parameters(path, recurse=False, remove_duplicate=False)
        )
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                own[before + name] = buffer
        names |= {name: kept[id(tensor)] for name, tensor in own.items()}
    return names


def _with_extra(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _told(shard: Mapping[str, Sequence[int]] | None) -> str:
    if shard is None:
        return "a whole replica"
    places = [f"{at} of {size} on axis {axis!r}" for axis, (at, size) in shard.items()]
    return f"shard {' and '.join(places)}"


def _named(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    return {**all_parameters(model, optimizers), **dict(model.named_buffers())}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    held = {name: local(tensor) for name, tensor in tensors.items()}
    return {name: f"{tuple(t.shape)} of {t.dtype}" for name, t in held.items()}


def _shard_of(tensors: Iterable[Tensor]) -> dict[str, list[int]] | None:
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
