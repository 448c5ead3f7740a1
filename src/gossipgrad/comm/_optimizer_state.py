"""What an optimizer keeps, as plain values: read, and put back where it was."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm._buckets import is_sharded, local
from gossipgrad.errors import GossipError

__all__ = ["copied", "group_sizes", "load_optimizer", "optimizer_state", "plain", "to_host"]

_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (bool, bool),
    (int, int),
    (float, float),
    (str, str.__str__),
    (bytes, bytes),
)
Path = tuple[Any, ...]  # the keys that lead to a value inside of another


def to_host(tensor: Tensor, copy: bool) -> Tensor:
    """What this rank holds of a tensor, in host memory; with `copy` False itself if it can be."""
    return local(tensor.detach()).to("cpu", copy=copy)


def plain(value: Any, what: str, copy: bool) -> Any:
    """A value that is made of tensors, numbers, text and None, with its tensors in host memory.

    Raises:
        GossipError: It is made of something else.
    """
    if isinstance(value, Tensor):
        return to_host(value, copy)
    if value is None:
        return None
    for kind, bare in _PLAIN:
        if isinstance(value, kind):  # of a subclass, such as numpy's float64, the value alone
            return value if type(value) is kind else bare(value)
    if isinstance(value, Mapping):
        return {key: plain(each, what, copy) for key, each in value.items()}
    if type(value) in (list, tuple, torch.Size):
        made = [plain(each, what, copy) for each in value]
        return made if isinstance(value, list) else tuple(made)
    raise GossipError(
        f"{what} is a {type(value).__name__}, which is no plain value: a state holds tensors, "
        "numbers, text, bytes, None, and lists, tuples and dicts of these"
    )


def copied(value: Any) -> Any:
    """A plain value again, with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([copied(each) for each in value])
    return value


def group_sizes(optimizer: Optimizer) -> list[int]:
    """How many parameters each of its groups has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def optimizer_state(number: int, optimizer: Optimizer, copy: bool) -> dict[str, Any]:
    """Kind, hyper-parameters and state of an optimizer; local.

    State of parameters is told by their places, that under names by these. What hangs on the
    optimizer otherwise is not seen.

    Raises:
        GossipError: Something is no plain value, or stands under a key that is no name.
    """
    what = f"of optimizer {number} ({type(optimizer).__name__}) "
    if type(optimizer).state_dict is not Optimizer.state_dict:
        warnings.warn(
            f"{type(optimizer).__name__} has a state_dict() of its own: what it keeps there beside "
            "its state and groups is not in this state. Save and load it beside this one",
            stacklevel=2,
        )
    places = {id(parameter): place for place, parameter in enumerate(_parameters(optimizer))}
    kept: list[list[Any]] = []
    named: list[list[Any]] = []
    for key, held in optimizer.state.items():
        if isinstance(key, Tensor):
            if id(key) in places and held:  # of others it holds what it has no use for
                values = {k: plain(v, what + f"state {k!r}", copy) for k, v in held.items()}
                kept.append([places[id(key)], values, _on_host(held)])
        elif isinstance(key, str):
            named.append([key, plain(held, what + f"state {key!r}", copy), _on_host(held)])
        else:
            raise GossipError(
                f"{what}state has the key {key!r}, which is no parameter and no text: it cannot "
                "be told again where the state is loaded"
            )
    groups = [
        {k: plain(value, what + repr(k), copy) for k, value in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__name__,
        "sizes": group_sizes(optimizer),
        "groups": groups,
        "state": sorted(kept, key=lambda entry: entry[0]),
        "named": named,
    }


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Puts back what `optimizer_state` gave, beside the parameters or where it was; local."""
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # a scheduler may hold the same tensor
            else:
                group[key] = copied(value)
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for place, values, on_host in saved["state"]:
        parameter = parameters[place]
        optimizer.state[parameter] = _put(values, parameter, {tuple(path) for path in on_host})
    for name, value, on_host in saved["named"]:
        optimizer.state[name] = _put(value, parameters[0], {tuple(path) for path in on_host})


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _on_host(value: Any) -> list[list[Any]]:
    """The paths of tensors in host memory; where one is cannot be known before the first step."""
    if isinstance(value, Tensor):
        return [[]] if value.device.type == "cpu" else []
    return [[key, *path] for key, each in _inside(value) for path in _on_host(each)]


def _put(value: Any, parameter: Tensor, on_host: Collection[Path], at: Path = ()) -> Any:
    """A copy on the parameter's device, but for what was in host memory."""
    if isinstance(value, Tensor):
        return value.clone() if at in on_host else _beside(parameter, value)
    if isinstance(value, Mapping):
        return {key: _put(each, parameter, on_host, (*at, key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(
            [_put(each, parameter, on_host, (*at, n)) for n, each in enumerate(value)]
        )
    return value


def _beside(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy on the parameter's device, sharded as the parameter is if it has its local shape."""
    if is_sharded(parameter) and value.shape == local(parameter).shape:
        whole = torch.empty_like(parameter, dtype=value.dtype)
        local(whole).copy_(value)
        return whole
    return value.to(parameter.device, copy=True)
