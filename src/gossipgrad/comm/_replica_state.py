"""A replica's parameters by name, and its whole state as plain values, to save and load."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm._buckets import is_sharded, local
from gossipgrad.comm._mean import statistics
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


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield all parameters of an optimizer's groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def all_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Return the model's and the optimizers' parameters by name; tied ones once."""
    named = dict(model.named_parameters())
    known = {id(p) for p in named.values()}
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"optimizer {number}, parameter {index}"] = parameter
    return named


def trained_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizers train, by name, in the model's order.

    Frozen parameters are left out: they are equal on all ranks after the start.
    """
    owned = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    named = all_parameters(model, optimizers)
    return {name: p for name, p in named.items() if id(p) in owned and p.requires_grad}


def replica_state(
    model: nn.Module, optimizers: Sequence[Optimizer], *, copy: bool = True
) -> dict[str, Any]:
    """Return all state that training changes in a replica, in host memory; local.

    This includes buffers (also non-persistent ones) and the modules' `get_extra_state`, but no
    gradients. Of sharded tensors it holds this rank's shard. With `copy` False, tensors that are in
    host memory already are not copied.

    Returns:
        `"model"`: tensors by name. `"model_names"`: by names of the model's own `state_dict()`, the
        name in `"model"` of the same tensor: tied tensors have several, non-persistent buffers
        none. `"model_own"`: names of the buffers that have no mean over ranks.
        `"extra"`: extra states by name of the module. `"optimizers"`:
        the kind, hyper-parameters and state of each. `"shard"`: index and number of shards on each
        axis of the mesh; None for whole tensors.

    Raises:
        GossipError: An optimizer or a module holds a value that is not plain.
    """
    named, averaged = _named(model, optimizers), statistics(model)
    return {
        "model": {name: _to_host(tensor, copy) for name, tensor in named.items()},
        "model_names": _own_names(model, named),
        "model_own": [name for name, _ in model.named_buffers() if name not in averaged],
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
    """Return why a state cannot be loaded into these objects, None if it can."""
    named = _named(model, optimizers)
    if (was := state["shard"]) != (here := _shard_of(named.values())):
        return (
            f"it is of {_described(was)}, here is {_described(here)}: save each shard in a "
            "directory of its own, and load it from there"
        )
    if odd := sorted(set(state["extra"]) ^ set(_with_extra(model))):
        where = "here" if odd[0] in state["extra"] else "in what was saved"
        return f"the module {odd[0]!r} has no extra state {where}"
    saved, own = _shapes(state["model"]), _shapes(named)
    for name in _caches(model):  # they are made again
        saved.pop(name, None)
        own.pop(name, None)
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
    """Load the result of `replica_state`, in place and bit for bit; local.

    `misfit` must have returned None. A non-persistent buffer (a cache) of another shape stays.
    """
    caches = _caches(model)
    for name, tensor in _named(model, optimizers).items():
        saved = state["model"].get(name) if name in caches else state["model"][name]
        if saved is not None and (name not in caches or saved.shape == local(tensor).shape):
            local(tensor).copy_(saved)
    for optimizer, each in zip(optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, each)
    for name, module in _with_extra(model).items():
        module.set_extra_state(_copied(state["extra"][name]))


def plain(value: Any, what: str, copy: bool) -> Any:
    """Return a value of tensors, numbers, text and None, with its tensors in host memory.

    Raises:
        GossipError: It contains anything else.
    """
    if isinstance(value, Tensor):
        return _to_host(value, copy)
    if value is None:
        return None
    for kind, bare in _PLAIN:
        if isinstance(value, kind):  # drops a subclass, such as numpy's float64
            return value if type(value) is kind else bare(value)
    if isinstance(value, Mapping):
        return {key: plain(each, what, copy) for key, each in value.items()}
    if type(value) in (list, tuple, torch.Size):
        made = [plain(each, what, copy) for each in value]
        return made if isinstance(value, list) else tuple(made)
    raise GossipError(
        f"{what} is a {type(value).__name__}, which is not a plain value: a state holds tensors, "
        "numbers, text, bytes, None, and lists, tuples and dicts of these"
    )


def kept_by(optimizer: Optimizer, what: str, copy: bool) -> list[list[Any]]:
    """Return an optimizer's state, by index of the parameter or by name; local."""
    indices = {id(parameter): index for index, parameter in enumerate(parameters_of(optimizer))}
    kept: list[list[Any]] = []
    # Some optimizers keep a part elsewhere, and have both this and `take_state`.
    with getattr(optimizer, "filled_state", nullcontext)():
        for key, held in optimizer.state.items():
            if isinstance(key, Tensor):
                if id(key) in indices and held:  # entries of other parameters are unused
                    values = {k: plain(v, f"{what} state {k!r}", copy) for k, v in held.items()}
                    kept.append([indices[id(key)], values])
            elif isinstance(key, str):
                kept.append([key, plain(held, f"{what} state {key!r}", copy)])
            else:
                raise GossipError(
                    f"{what} state has the key {key!r}, neither a parameter nor text: it cannot "
                    "be found again when the state is loaded"
                )
    return sorted(kept, key=lambda entry: (isinstance(entry[0], str), entry[0]))


def take_state(optimizer: Optimizer) -> None:
    """Let an optimizer that keeps part of its state elsewhere read it from `state`."""
    if hasattr(optimizer, "take_state"):
        optimizer.take_state()


def put_back(optimizer: Optimizer, kept: Iterable[Sequence[Any]]) -> None:
    """Load the result of `kept_by`, on the parameters' devices by torch's own rule.

    A step count stays in host memory, unless the optimizer is fused or capturable. An optimizer
    says what else does by `stays_on_host(name)`.
    """
    stays = getattr(optimizer, "stays_on_host", lambda name: False)
    parameters, state_of = list(parameters_of(optimizer)), cast(dict[Any, Any], optimizer.state)
    on_device = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for key, values in kept:
        if isinstance(key, str):
            state_of[key] = _beside(parameters[0], values)
            continue
        parameter = parameters[key]
        state_of[parameter] = {
            name: _copied(value)
            if (name == "step" and id(parameter) not in on_device) or stays(name)
            else _beside(parameter, value)
            for name, value in values.items()
        }


def _optimizer_state(number: int, optimizer: Optimizer, copy: bool) -> dict[str, Any]:
    what = f"of optimizer {number} ({type(optimizer).__name__})"
    has_own = type(optimizer).state_dict is not Optimizer.state_dict
    if has_own and not hasattr(optimizer, "filled_state"):
        warn(
            f"{type(optimizer).__name__} has a state_dict() of its own: what it keeps there beside "
            "its state and groups is not in this state. Save and load it separately"
        )
    groups = [
        {k: plain(value, f"{what} {k!r}", copy) for k, value in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__name__,
        "sizes": _group_sizes(optimizer),
        "groups": groups,
        "state": kept_by(optimizer, what, copy),
    }


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # a scheduler may hold the same tensor
            else:
                group[key] = _copied(value)
    optimizer.state.clear()
    put_back(optimizer, saved["state"])
    take_state(optimizer)


def _group_sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _to_host(tensor: Tensor, copy: bool) -> Tensor:
    """Return a tensor or its local shard in host memory; `copy` False: itself if possible."""
    return local(tensor.detach()).to("cpu", copy=copy)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, change) for each in value])
    return value


def _copied(value: Any) -> Any:
    return _mapped(value, torch.clone)


def _beside(parameter: Tensor, value: Any) -> Any:
    """Copy a value to the parameter's device, sharded like it if it has its local shape."""

    def bring(tensor: Tensor) -> Tensor:
        if is_sharded(parameter) and tensor.shape == local(parameter).shape:
            whole = torch.empty_like(parameter, dtype=tensor.dtype)
            local(whole).copy_(tensor)
            return whole
        return tensor.to(parameter.device, copy=True)

    return _mapped(value, bring)


def _own_names(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    kept = {id(tensor): name for name, tensor in named.items()}
    return {name: kept[id(tensor)] for name, tensor in saved_tensors(model).items()}


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `state_dict()` by name without calling it: its hooks may communicate.

    Tied tensors are the same object under several names. Extra states are left out.
    """
    saved: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        own: dict[str, Tensor] = dict(
            module.named_parameters(path, recurse=False, remove_duplicate=False)
        )
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                own[before + name] = buffer
        saved |= own
    return saved


def _caches(model: nn.Module) -> set[str]:
    """Return the names of non-persistent buffers, which a rank may make again at any length."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _with_extra(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _described(shard: Mapping[str, Sequence[int]] | None) -> str:
    if shard is None:
        return "a whole replica"
    parts = [f"{at} of {size} on axis {axis!r}" for axis, (at, size) in shard.items()]
    return f"shard {' and '.join(parts)}"


def _named(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    return {**all_parameters(model, optimizers), **dict(model.named_buffers())}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    held = {name: local(tensor) for name, tensor in tensors.items()}
    return {name: f"{tuple(t.shape)} of {t.dtype}" for name, t in held.items()}


def _shard_of(tensors: Iterable[Tensor]) -> dict[str, list[int]] | None:
    """Return this rank's index and number of shards on each sharded mesh axis; None without."""
    positions: dict[str, list[int]] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            sharded: Any = tensor  # a DTensor, which is not imported here
            mesh = sharded.device_mesh
            names = mesh.mesh_dim_names or range(mesh.ndim)
            axes = zip(names, sharded.placements, mesh.get_coordinate(), mesh.shape, strict=True)
            for axis, placement, at, size in axes:
                if size > 1 and not placement.is_replicate():
                    positions[str(axis)] = [at, size]
    return positions or None
