"""Before anything is sent: do all ranks train the same model with the same settings?"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm._buckets import local
from gossipgrad.comm._group import Group
from gossipgrad.comm._parameters import all_parameters
from gossipgrad.errors import AgreementError

__all__ = ["agree_on", "fingerprint"]


def fingerprint(
    model: nn.Module, optimizers: Sequence[Optimizer], settings: dict[str, Any]
) -> dict[str, str]:
    """What must be equal on all ranks, as a flat table of plain words."""
    table = {f"setting {name!r}": str(value) for name, value in settings.items()}
    parameters = all_parameters(model, optimizers)
    for kind, tensors in (("parameter", parameters.items()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            frozen = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
            table[f"{kind} {name!r}"] = f"{tuple(local(tensor).shape)} {tensor.dtype}{frozen}"
    order = [list(parameters), [name for name, _ in model.named_buffers()]]
    table["order of parameters and buffers"] = _digest(order)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for number, optimizer in enumerate(optimizers):
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        counts = "+".join(str(len(group)) for group in groups)
        table[f"optimizer {number}"] = (
            f"{type(optimizer).__name__} of {counts} parameters (in the order {_digest(groups)})"
        )
    return table


def agree_on(
    group: Group, model: nn.Module, optimizers: Sequence[Optimizer], settings: dict[str, Any]
) -> None:
    """Returns if all ranks train the same with the same settings; a collective.

    Raises:
        AgreementError: On every rank, with the first difference to rank 0.
        GossipError: If a rank died before it came here.
    """
    table = fingerprint(model, optimizers, settings)
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    if len(set(group.all_gather_object(digest))) == 1:
        return
    tables = group.all_gather_object(table)
    first = group.members[0]
    for rank, other in zip(group.members, tables, strict=True):
        # Digests last: what makes them differ is told better by name.
        last = ("order", "optimizer")
        for key in sorted({**tables[0], **other}, key=lambda key: key.startswith(last)):
            here, there = tables[0].get(key), other.get(key)
            if here != there:
                raise AgreementError(
                    f"the ranks do not agree: {key} is {there or 'missing'} on rank {rank}, but "
                    f"{here or 'missing'} on rank {first}. Build the same model, optimizer and "
                    "settings on every rank; nothing was sent"
                )
    raise AssertionError("digests differ, tables do not")


def _digest(names: Any) -> str:
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
