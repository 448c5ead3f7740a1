"""The start of a session: all ranks agree on the model, and copy the replica of rank 0."""

import hashlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm._buckets import local
from gossipgrad.comm._group import Group
from gossipgrad.comm._mean import statistics
from gossipgrad.comm._replica_state import all_parameters, kept_by, put_back, take_state
from gossipgrad.errors import AgreementError

__all__ = [
    "agree_on",
    "broadcast_replica",
    "broadcast_values",
    "difference",
    "digest",
    "fingerprint",
]

logger = logging.getLogger(__name__)

_TOGETHER_BYTES = 4 << 20  # small tensors share messages, since each takes a pass through all ranks
_PARAMETERS = 64  # parameters whose state is copied and sent together


def fingerprint(
    model: nn.Module, optimizers: Sequence[Optimizer], settings: dict[str, Any]
) -> dict[str, str]:
    """Return everything that must be equal on all ranks, as a flat table of text."""
    table = {f"setting {name!r}": str(value) for name, value in settings.items()}
    parameters = all_parameters(model, optimizers)
    for name, tensor in parameters.items():
        frozen = "" if tensor.requires_grad else ", frozen"
        table[f"parameter {name!r}"] = f"{tuple(local(tensor).shape)} {tensor.dtype}{frozen}"
    for name, tensor in statistics(model).items():  # other buffers may be each rank's own
        table[f"buffer {name!r}"] = f"{tuple(local(tensor).shape)} {tensor.dtype}"
    order = [list(parameters), list(statistics(model))]
    table["order of parameters and buffers"] = digest(order)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for number, optimizer in enumerate(optimizers):
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        counts = "+".join(str(len(group)) for group in groups)
        table[f"optimizer {number}"] = (
            f"{type(optimizer).__name__} of {counts} parameters (in the order {digest(groups)})"
        )
    return table


def agree_on(
    group: Group, model: nn.Module, optimizers: Sequence[Optimizer], settings: dict[str, Any]
) -> None:
    """Check that all ranks train the same model with the same settings; a collective.

    Raises:
        AgreementError: On every rank, with the first difference from rank 0.
        GossipError: If a rank died before it called this.
    """
    table = fingerprint(model, optimizers, settings)
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    if len(set(group.all_gather_object(digest))) == 1:
        return
    tables = group.all_gather_object(table)
    first = group.members[0]
    for rank, other in zip(group.members, tables, strict=True):
        if (key := difference(tables[0], other)) is not None:
            raise AgreementError(
                f"the ranks do not agree: {key} is {other.get(key, 'missing')} on rank {rank}, but "
                f"{tables[0].get(key, 'missing')} on rank {first}. Build the same model, optimizer "
                "and settings on every rank; nothing was sent"
            )
    raise AssertionError("digests differ, tables do not")


def difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the first key whose values differ, those of digests last; None for equal tables."""
    last = ("setting 'bucket_bytes'", "setting 'messages'", "order", "optimizer")
    keys = sorted({**one, **other}, key=lambda key: key.startswith(last))
    return next((key for key in keys if one.get(key) != other.get(key)), None)


@torch.no_grad()
def broadcast_replica(group: Group, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Overwrite parameters, buffers and optimizer state with those of rank 0; a collective.

    Hyper-parameters stay each rank's own, and so do buffers that differ in shape between ranks
    (caches); a warning names them. State that rank 0 does not have is dropped. If rank 0 is no
    longer a member, the lowest member takes its role.

    Raises:
        GossipError: If a rank dies, or rank 0's optimizer holds a value that is neither a tensor
            nor plain.
    """
    parameters = all_parameters(model, optimizers).values()
    _broadcast(group, [local(tensor) for tensor in (*parameters, *_alike_buffers(group, model))])
    is_source = group.rank == group.members[0]
    for number, optimizer in enumerate(optimizers):
        kept: list[list[Any]] = []
        if is_source:
            kept = kept_by(optimizer, f"of optimizer {number} ({type(optimizer).__name__})", False)
        else:
            optimizer.state.clear()
        for first in range(0, group.broadcast_object(len(kept)), _PARAMETERS):
            some = broadcast_values(group, kept[first : first + _PARAMETERS])
            if not is_source:
                put_back(optimizer, some)
        if not is_source:
            take_state(optimizer)


def _alike_buffers(group: Group, model: nn.Module) -> list[Tensor]:
    """Return the buffers that have the same shape and type on all ranks, and name the others."""
    own = dict(model.named_buffers())
    described = {n: f"{tuple(local(t).shape)} of {t.dtype}" for n, t in own.items()}
    gathered = group.all_gather_object(described)
    names = list(dict.fromkeys(name for each in gathered for name in each))
    unlike = [n for n in names if any(each.get(n) != gathered[0].get(n) for each in gathered)]
    if unlike:
        logger.warning(
            "rank %d: buffers differ between ranks, and stay each rank's own: %s",
            *(group.rank, ", ".join(unlike)),
        )
    return [own[name] for name in names if name not in unlike]


def broadcast_values(group: Group, value: Any) -> Any:
    """Return the source's value, including tensors in host memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    mine = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    size = group.broadcast_object(mine.numel())
    is_source = group.rank == group.members[0]
    data = mine.clone() if is_source else torch.empty(size, dtype=torch.uint8, device="cpu")
    group.broadcast_(data)
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def _broadcast(group: Group, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors of any type and device with those of rank 0, many in a message."""
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


def digest(names: Any) -> str:
    """Return a short digest of values of JSON, to compare them among ranks."""
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
