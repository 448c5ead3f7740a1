"""A replica: its parameters by name, and all of its state as plain values, copied and put back."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm._buckets import is_sharded, local
from gossipgrad.errors import GossipError

__all__ = [
    "all_parameters",
    "kept_by",
    "load_replica",
    "misfit",
    "parameters_of",
    "plain",
    "put_back",
    "replica_state",
    "take_state",
    "trained_parameters",
]

_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (bool, bool),
    (int, int),
    (float, float),
    (str, str.__str__),
    (bytes, bytes),
)
Path = tuple[Any, ...]  # the keys that lead to a value inside of another


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """All parameters of its groups, in their order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def all_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The model's parameters, and those that only an optimizer holds, by name; tied ones once."""
    named = dict(model.named_parameters())
    known = {id(p) for p in named.values()}
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"optimizer {number}, parameter {place}"] = parameter
    return named


def trained_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, nn.Parameter]:
    """The parameters that the optimizers train, by name, in the model's order.

    Frozen parameters stay out: they are equal on all ranks after the start.
    """
    owned = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    named = all_parameters(model, optimizers)
    return {name: p for name, p in named.items() if id(p) in owned and p.requires_grad}


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
        "model": {name: _to_host(tensor, copy) for name, tensor in named.items()},
        "model_names": _own_names(model, named),
        "extra": {
            name: plain(module.get_extra_state(), f"the extra state of module {name!r}", copy)
            for name, module in _with_extra(model).items()
        },
        "optimizers": [_optimizer_state(number, o, copy) for number, o in enumerate(optimizers)],
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
        saved_sizes, sizes = each["sizes"], _group_sizes(optimizer)
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
    for name, module in _with_extra(model).items():
        module.set_extra_state(_copied(state["extra"][name]))


def plain(value: Any, what: str, copy: bool) -> Any:
    """A value that is made of tensors, numbers, text and None, with its tensors in host memory.

    Raises:
        GossipError: It is made of something else.
    """
    if isinstance(value, Tensor):
        return _to_host(value, copy)
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


def kept_by(optimizer: Optimizer, what: str, copy: bool) -> tuple[list[list[Any]], list[list[Any]]]:
    """State of an optimizer: what it keeps of parameters, and what it keeps under names; local.

    Args:
        optimizer: Whose.
        what: It is, in messages.
        copy: Whether tensors that are in host memory are copied.

    Returns:
        For each parameter in order its place, its state, and the paths of tensors in it that were
        in host memory; where those are cannot be known before the first step. The same with names
        in place of places.

    Raises:
        GossipError: Something is no plain value, or stands under a key that is no name.
    """
    with filled(optimizer):
        return _kept_by(optimizer, what, copy)


def filled(optimizer: Optimizer) -> AbstractContextManager[object]:
    """Inside, `state` has all, also of an optimizer that keeps part of it elsewhere.

    Such a one has a context manager `filled_state()`, and `take_state()`, which takes it back.
    """
    return getattr(optimizer, "filled_state", nullcontext)()


def take_state(optimizer: Optimizer) -> None:
    """Has an optimizer that keeps part of its state elsewhere take it from `state`, as filled."""
    if hasattr(optimizer, "take_state"):
        optimizer.take_state()


def _kept_by(
    optimizer: Optimizer, what: str, copy: bool
) -> tuple[list[list[Any]], list[list[Any]]]:
    places = {id(parameter): place for place, parameter in enumerate(parameters_of(optimizer))}
    kept: list[list[Any]] = []
    named: list[list[Any]] = []
    for key, held in optimizer.state.items():
        if isinstance(key, Tensor):
            if id(key) in places and held:  # of others it holds what it has no use for
                values = {k: plain(v, f"{what} state {k!r}", copy) for k, v in held.items()}
                kept.append([places[id(key)], values, _on_host(held)])
        elif isinstance(key, str):
            named.append([key, plain(held, f"{what} state {key!r}", copy), _on_host(held)])
        else:
            raise GossipError(
                f"{what} state has the key {key!r}, which is no parameter and no text: it cannot "
                "be reported again where the state is loaded"
            )
    return sorted(kept, key=lambda entry: entry[0]), named


def put_back(
    optimizer: Optimizer, kept: Iterable[Sequence[Any]], named: Iterable[Sequence[Any]]
) -> None:
    """Gives an optimizer what `kept_by` returned: on the parameters' devices, or where it was."""
    parameters = list(parameters_of(optimizer))
    for place, values, on_host in kept:
        optimizer.state[parameters[place]] = _beside(parameters[place], values, on_host)
    for name, value, on_host in named:
        optimizer.state[name] = _beside(parameters[0], value, on_host)


def _optimizer_state(number: int, optimizer: Optimizer, copy: bool) -> dict[str, Any]:
    what = f"of optimizer {number} ({type(optimizer).__name__})"
    has_own = type(optimizer).state_dict is not Optimizer.state_dict
    if has_own and not hasattr(optimizer, "filled_state"):
        warnings.warn(
            f"{type(optimizer).__name__} has a state_dict() of its own: what it keeps there beside "
            "its state and groups is not in this state. Save and load it beside this one",
            stacklevel=3,
        )
    kept, named = kept_by(optimizer, what, copy)
    groups = [
        {k: plain(value, f"{what} {k!r}", copy) for k, value in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__name__,
        "sizes": _group_sizes(optimizer),
        "groups": groups,
        "state": kept,
        "named": named,
    }


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # a scheduler may hold the same tensor
            else:
                group[key] = _copied(value)
    optimizer.state.clear()
    put_back(optimizer, saved["state"], saved["named"])
    take_state(optimizer)


def _group_sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _to_host(tensor: Tensor, copy: bool) -> Tensor:
    """What this rank holds of a tensor, in host memory; with `copy` False itself if it can be."""
    return local(tensor.detach()).to("cpu", copy=copy)


def _mapped(value: Any, change: Callable[[Tensor, Path], Any], at: Path = ()) -> Any:
    """A value with its tensors changed, each by itself and its path."""
    if isinstance(value, Tensor):
        return change(value, at)
    if isinstance(value, Mapping):
        return {key: _mapped(each, change, (*at, key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, change, (*at, n)) for n, each in enumerate(value)])
    return value


def _copied(value: Any) -> Any:
    return _mapped(value, lambda tensor, _: tensor.clone())


def _on_host(value: Any) -> list[list[Any]]:
    """The paths of tensors in host memory."""
    paths: list[list[Any]] = []
    _mapped(value, lambda t, at: paths.append([*at]) if t.device.type == "cpu" else None)
    return paths


def _beside(parameter: Tensor, value: Any, on_host: Iterable[Sequence[Any]]) -> Any:
    """A copy on the parameter's device, sharded as the parameter is if it has its local shape.

    What was in host memory is there again.
    """
    paths = {tuple(path) for path in on_host}

    def bring(tensor: Tensor, at: Path) -> Tensor:
        if is_sharded(parameter) and tensor.shape == local(parameter).shape:
            whole = torch.empty_like(parameter, dtype=tensor.dtype)
            local(whole).copy_(tensor)
            return whole
        if at in paths:
            return tensor.clone()
        return tensor.to(parameter.device, copy=True)

    return _mapped(value, bring)


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
