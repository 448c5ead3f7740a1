"""A replica as plain values: parameters, buffers and optimizer state, copied and put back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import is_sharded, local
from gossipgrad.decentralized._tensors import all_parameters
from gossipgrad.errors import GossipError

__all__ = ["load_replica", "misfit", "replica_state"]


def replica_state(
    model: nn.Module, optimizers: Sequence[Optimizer], *, copy: bool = True
) -> dict[str, Any]:
    """All that training changes in a replica, in host memory; local.

    Buffers are among it, those that a model's own state leaves out, too. Of sharded tensors it is
    this rank's part. With `copy` False tensors that lie there already are no copies.

    Returns:
        `"model"`: tensors by name. `"optimizers"`: of each its kind, hyper-parameters and state.

    Raises:
        GossipError: An optimizer keeps something that is no plain value.
    """
    return {
        "model": {n: _to_host(tensor, copy) for n, tensor in _named(model, optimizers).items()},
        "optimizers": [_optimizer_state(number, o, copy) for number, o in enumerate(optimizers)],
    }


def misfit(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
) -> str | None:
    """Why a replica's state cannot be put into these objects, None if it can."""
    saved, own = _shapes(state["model"]), _shapes(_named(model, optimizers))
    if saved != own:
        name = min(n for n in saved | own if saved.get(n) != own.get(n))
        return f"{name!r} was saved as {saved.get(name, 'nothing')}, here it is {own.get(name)}"
    kinds = [each["kind"] for each in state["optimizers"]]
    here = [type(optimizer).__name__ for optimizer in optimizers]
    if kinds != here:
        return f"it was saved with the optimizers {', '.join(kinds)}, here are {', '.join(here)}"
    for number, (optimizer, each) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        saved_sizes, sizes = each["sizes"], _sizes(optimizer)
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
        _load_optimizer(optimizer, each)


def _named(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    return {**all_parameters(model, optimizers), **dict(model.named_buffers())}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    held = {name: local(tensor) for name, tensor in tensors.items()}
    return {name: f"{tuple(t.shape)} of {t.dtype}" for name, t in held.items()}


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _to_host(tensor: Tensor, copy: bool) -> Tensor:
    return local(tensor.detach()).to("cpu", copy=copy)


def _plain(value: Any, what: str, copy: bool) -> Any:
    """A value that is made of tensors, numbers, text and None, with its tensors in host memory."""
    if isinstance(value, Tensor):
        return _to_host(value, copy)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(each, what, copy) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_plain(each, what, copy) for each in value])
    raise GossipError(
        f"{what} is a {type(value).__name__}, which is no plain value: a state holds tensors, "
        "numbers, text, None, and lists and dicts of these"
    )


def _optimizer_state(number: int, optimizer: Optimizer, copy: bool) -> dict[str, Any]:
    what = f"of optimizer {number} ({type(optimizer).__name__}) "
    kept: list[list[Any]] = []
    for place, parameter in enumerate(_parameters(optimizer)):
        held = optimizer.state.get(parameter, {})
        if not held:
            continue
        # Where a tensor was tells nothing that can be known before the first step.
        on_host = [k for k, v in held.items() if isinstance(v, Tensor) and v.device.type == "cpu"]
        values = {k: _plain(value, what + f"state {k!r}", copy) for k, value in held.items()}
        kept.append([place, values, on_host])
    groups = [
        {k: _plain(value, what + repr(k), copy) for k, value in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__name__,
        "sizes": _sizes(optimizer),
        "groups": groups,
        "state": kept,
    }


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # a scheduler may hold the same tensor
            else:
                group[key] = _copied(value)
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for place, values, on_host in saved["state"]:
        parameter = parameters[place]
        optimizer.state[parameter] = {
            key: _copied(value) if key in on_host else _beside(parameter, value)
            for key, value in values.items()
        }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_copied(each) for each in value])
    return value


def _beside(parameter: Tensor, value: Any) -> Any:
    """A copy on the parameter's device, sharded as the parameter is if it has its local shape."""
    if not isinstance(value, Tensor):
        return _copied(value)
    if is_sharded(parameter) and value.shape == local(parameter).shape:
        whole = torch.empty_like(parameter, dtype=value.dtype)
        local(whole).copy_(value)
        return whole
    return value.to(parameter.device, copy=True)
