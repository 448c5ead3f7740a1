"""Checks of a model and its optimizers before a rank meets the others."""

import gc
from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import check_ranks, is_sharded, parameters_of
from gossipgrad.engine._claims import is_claimed

__all__ = ["check_model", "check_replica", "is_averaged"]

_MOST_NAMED = 3
# Of torch and, the second, of fairscale: compared by name, as importing them takes long.
_COLLECTIVE = {"ZeroRedundancyOptimizer", "OSS", "PostLocalSGDOptimizer"}


def check_model(model: object) -> None:
    """Raise `ValueError` unless it is a model with values; local."""
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", None)
        what = type(model).__name__ if name is None else f"{type(model).__name__} {name}"
        raise ValueError(
            f"model must be a torch.nn.Module, got {what}: give the module whose parameters the "
            "optimizer trains"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is a ScriptModule, which has no hooks on its state: train the module that "
            "was scripted, and script it afterwards"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "a session that is made under torch.inference_mode() cannot train: make it outside of "
            "that block"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} of the model has no shape yet (a lazy module): call the model once on "
                "an example batch, then make the optimizer and the session"
            )
        if tensor.is_inference():
            raise ValueError(
                f"{name!r} of the model was made under torch.inference_mode(), so it cannot be "
                "trained: make the model outside of that block"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, where tensors have no values: call "
                "model.to_empty(device=...) and initialise or load the weights first, then make "
                "the optimizer"
            )


def check_replica(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    call: str,
    process_group: object = None,
    mesh: object = None,
    warns: bool = True,
) -> None:
    """Refuse models that DistributedDataParallel averages, and optimizers of other models; local.

    Warn of parameters that need gradients and are in no session: no rank sends them.

    Args:
        model: The model.
        optimizers: The session's optimizers.
        call: The function that makes the session, for messages.
        process_group: The ranks that take part, as given to it.
        mesh: Instead of `process_group`.
        warns: Whether to warn; otherwise the session does when they have gradients.

    Raises:
        ValueError: It refuses them, or as `check_model` and `check_ranks`.
    """
    check_ranks(process_group, mesh)
    check_model(model)
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for each in optimizers for parameter in parameters_of(each)}
    if held and not held & own.keys():
        raise ValueError(
            f"the optimizers train {len(held)} parameters, and none is one of this "
            f"{type(model).__name__}: give the model that they were made for. A copy of a model, "
            "or one whose layers were replaced, needs an optimizer of its own"
        )
    for optimizer in optimizers:
        if (name := _averages_itself(optimizer)) is not None:
            raise ValueError(
                f"{name} expects gradients or weights that all ranks have averaged, and exchanges "
                f"with all of them in its step(), which {call}() is there to avoid: each parameter "
                "would be trained on the data of one rank. Give the optimizer that it wraps, such "
                "as torch.optim.AdamW(model.parameters()); to split a model's optimizer state, use "
                "FSDP2 inside a replica (mesh=...)"
            )
        if call in ("gossip", "join") and getattr(optimizer, "sharding", None) is not None:
            raise ValueError(
                f"share_roots(shard=True) sends one rank's weights to all, so it is for equal "
                f"replicas (DistributedDataParallel), and {call}() has replicas that differ: call "
                "share_roots(optimizer) without shard=True"
            )
    reduced = _reduced_over(own, process_group, mesh)
    if len(reduced) > 1:
        raise ValueError(
            f"DistributedDataParallel averages the gradients of this model over ranks {reduced}, "
            f"so {call}() would exchange on top of it, at the cost of both. Give {call}() the "
            "plain module (model.module), and drop the wrapper or do not wrap at all"
        )
    rest = [
        own[id(p)]
        for p in model.parameters()
        if p.requires_grad and id(p) not in held and not is_claimed(p)
    ]
    if rest and warns:
        more = f" and {len(rest) - _MOST_NAMED} more" if len(rest) > _MOST_NAMED else ""
        warn(
            f"{len(rest)} parameters of the model need gradients and are in no optimizer given to "
            f"{call}() ({', '.join(map(repr, rest[:_MOST_NAMED]))}{more}): no rank sends "
            "them, so if something else trains them they drift apart. Pass all optimizers as "
            "one sequence, or call requires_grad_(False) on what is not trained"
        )


def _averages_itself(optimizer: Optimizer) -> str | None:
    """Return the name of an optimizer that exchanges with all ranks itself, None for others."""
    names = {each.__name__ for each in type(optimizer).__mro__}
    return min(names & _COLLECTIVE, default=None)


def _reduced_over(own: Container[int], process_group: object, mesh: object) -> list[int]:
    """Return the session's ranks over which a live DistributedDataParallel averages gradients.

    Parameters do not show it, as its reducer is in C++. So this searches all live objects, once.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    if isinstance(mesh, DeviceMesh):
        process_group = mesh.get_group()
    ours = None
    if isinstance(process_group, dist.ProcessGroup):
        ours = {*dist.get_process_group_ranks(process_group)}
    if over := _reduced_by_living(own):
        gc.collect()  # a dropped wrapper may be part of a cycle
        over = _reduced_by_living(own)
    return sorted(over if ours is None else over & ours)


def is_averaged(model: nn.Module, island: dist.ProcessGroup) -> bool:
    """Whether torch averages a model's gradients over an island; raises for other ranks."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        return True
    own = {id(parameter) for parameter in model.parameters()}
    over, ranks = _reduced_by_living(own), {*dist.get_process_group_ranks(island)}
    if over and over != ranks:
        raise ValueError(
            f"DistributedDataParallel averages the gradients of this model over ranks "
            f"{sorted(over)}, and its island has ranks {sorted(ranks)}: pass it "
            "process_group=mesh['node'].get_group() of the same mesh as island="
        )
    return bool(over)


def _reduced_by_living(own: Container[int]) -> set[int]:
    over: set[int] = set()
    classes = _with_subclasses(DistributedDataParallel)
    for each in gc.get_referrers(*classes):  # an object refers to its class
        if type(each) in classes and any(id(parameter) in own for parameter in each.parameters()):
            over |= {*dist.get_process_group_ranks(each.process_group)}
    return over


def _with_subclasses(base: type) -> list[type]:
    return [base, *(each for sub in base.__subclasses__() for each in _with_subclasses(sub))]
