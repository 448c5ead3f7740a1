"""Making all replicas that of rank 0."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm._buckets import is_sharded, local
from gossipgrad.comm._group import Group
from gossipgrad.comm._parameters import all_parameters
from gossipgrad.errors import GossipError

__all__ = ["broadcast_replica"]

_TOGETHER_BYTES = 4 << 20  # small tensors share messages: each costs a round through all ranks


@torch.no_grad()
def broadcast_replica(group: Group, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Overwrites parameters, buffers and optimizer state with those of rank 0; a collective.

    Hyper-parameters stay each rank's own. State that rank 0 does not have is dropped. Where rank 0
    is no member of the group any more, its lowest member stands for it.

    Raises:
        GossipError: If a rank dies meanwhile, or rank 0's optimizer keeps something that is
            neither a tensor nor a plain number, text or None.
    """
    parameters = all_parameters(model, optimizers).values()
    _broadcast(group, [local(tensor) for tensor in (*parameters, *model.buffers())])
    for number, optimizer in enumerate(optimizers):
        _broadcast_state(group, number, optimizer)


def _broadcast_state(group: Group, number: int, optimizer: Optimizer) -> None:
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    outline = group.broadcast_object(_outline(group, number, optimizer, parameters))
    if group.rank != group.members[0]:
        optimizer.state.clear()
    tensors: list[Tensor] = []
    for place, key, kind, *rest in outline:
        parameter = parameters[place]
        if kind == "value":
            optimizer.state[parameter][key] = rest[0]
            continue
        shape, dtype, device_type = rest
        if group.rank != group.members[0]:
            optimizer.state[parameter][key] = _empty(parameter, shape, dtype, device_type)
        tensors.append(local(optimizer.state[parameter][key]))
    _broadcast(group, tensors)


def _broadcast(group: Group, tensors: Sequence[Tensor]) -> None:
    """Overwrites tensors of any types and devices with those of rank 0, many in a message."""
    batch: list[Tensor] = []
    batch_bytes = 0
    for tensor in tensors:
        if batch and batch_bytes + tensor.nbytes > _TOGETHER_BYTES:
            _broadcast_batch(group, batch)
            batch, batch_bytes = [], 0
        batch.append(tensor)
        batch_bytes += tensor.nbytes
    if batch:
        _broadcast_batch(group, batch)


def _broadcast_batch(group: Group, batch: Sequence[Tensor]) -> None:
    if len(batch) == 1:
        group.broadcast_(batch[0])
        return
    flat = torch.cat([t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in batch])
    group.broadcast_(flat)
    if group.rank != group.members[0]:
        for tensor, piece in zip(batch, flat.split([t.nbytes for t in batch]), strict=True):
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _outline(
    group: Group, number: int, optimizer: Optimizer, parameters: Sequence[Tensor]
) -> list[list[Any]]:
    """What rank 0's optimizer keeps: place of the parameter, key, kind, and what to make."""
    outline: list[list[Any]] = []
    if group.rank != group.members[0]:
        return outline
    for place, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                made = [list(value.shape), str(value.dtype).split(".")[1], value.device.type]
                outline.append([place, key, "tensor", *made])
            elif value is None or isinstance(value, bool | int | float | str):
                outline.append([place, key, "value", value])
            else:
                raise GossipError(
                    f"optimizer {number} ({type(optimizer).__name__}) keeps a "
                    f"{type(value).__name__} as {key!r}, which cannot be sent to the other ranks: "
                    "start the session before its first step, when it keeps nothing yet"
                )
    return outline


def _empty(parameter: Tensor, shape: list[int], dtype: str, device_type: str) -> Tensor:
    kind = getattr(torch, dtype)
    if is_sharded(parameter) and tuple(shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=kind)
    device = parameter.device if device_type == parameter.device.type else "cpu"
    return torch.empty(shape, dtype=kind, device=device)
