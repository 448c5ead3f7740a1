"""Gradients that are not finite are left out: one would spoil weights and moments for ever."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad._messages import warn
from gossipgrad.comm import is_sharded, local, widened

__all__ = ["are_finite", "finite_flags", "parameters_to_update", "warn_of_nonfinite"]


def are_finite(
    parameters: Sequence[nn.Parameter], *, unsquared: Collection[int] = ()
) -> list[bool]:
    """Return for each parameter with a gradient whether the sum of its squares is finite.

    Of those whose ids are in `unsquared`, whether all elements are. A collective over the meshes of
    sharded parameters, so that all their ranks decide alike.
    """
    return finite_flags(parameters, unsquared=unsquared).tolist() if parameters else []


@torch.no_grad()
def finite_flags(parameters: Sequence[nn.Parameter], *, unsquared: Collection[int] = ()) -> Tensor:
    """Return the same as a tensor on the device of the first, without waiting for it."""
    alike: dict[tuple[torch.dtype, bool], list[int]] = {}
    norms: list[Tensor] = [torch.empty(0)] * len(parameters)
    for index, parameter in enumerate(parameters):
        is_largest = id(parameter) in unsquared and local(parameter).numel() > 0
        alike.setdefault((parameter.dtype, is_largest), []).append(index)
    for (dtype, is_largest), indices in alike.items():
        gradients = [local(grad) for i in indices if (grad := parameters[i].grad) is not None]
        if is_largest and gradients[0].device.type == "cpu":  # where that norm is slow
            found = [torch.stack(torch.aminmax(each)).abs().amax() for each in gradients]
        else:
            found = torch._foreach_norm(gradients, math.inf if is_largest else 2, widened(dtype))
        sizes = found if is_largest else torch._foreach_mul(found, found)
        for index, size in zip(indices, sizes, strict=True):
            norms[index] = size
    device = norms[0].device
    finite = torch.stack([norm.to(device) for norm in norms]).isfinite()
    if any(map(is_sharded, parameters)):
        _agree(finite, parameters)
    return finite


def parameters_to_update(
    optimizer: Any, *, unsquared: Collection[int] = ()
) -> list[list[nn.Parameter]]:
    """Return for each group the parameters whose gradients are finite; see `are_finite`.

    It counts the steps that leave out others in `optimizer.nonfinite_steps`, and warns in the
    first.
    """
    held = [[p for p in g["params"] if p.grad is not None] for g in optimizer.param_groups]
    parameters = [p for ps in held for p in ps]
    finite = are_finite(parameters, unsquared=unsquared)
    if all(finite):
        return held
    if not optimizer.nonfinite_steps:
        bad = [p for p, is_good in zip(parameters, finite, strict=True) if not is_good]
        warn_of_nonfinite(optimizer, bad)
    optimizer.nonfinite_steps += 1
    good = {id(p) for p, is_good in zip(parameters, finite, strict=True) if is_good}
    return [[p for p in ps if id(p) in good] for ps in held]


def warn_of_nonfinite(optimizer: Any, bad: Sequence[nn.Parameter]) -> None:
    """Warn of the first step that leaves out parameters; none: which ones is not known."""
    names = {
        id(p): name
        for group in optimizer.param_groups
        for name, p in zip(group.get("param_names", ()), group["params"], strict=False)
    }
    what = "the gradient of a parameter"
    if bad:
        what = names.get(id(bad[0]), f"a parameter of shape {tuple(bad[0].shape)}")
        what = f"the gradient of {what}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
    warn(
        f"{what} is not finite, or too large to be squared: the step leaves such parameters as "
        "they were. This is said once; optimizer.nonfinite_steps counts. Look for what makes the "
        "loss NaN, or clip gradients"
    )


def _agree(finite: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Set to False what is not finite in the shard of another rank."""
    from torch.distributed.tensor import DTensor, Partial  # takes 0.6 s, so only where needed

    meshes: dict[Any, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            meshes.setdefault(parameter.device_mesh, []).append(index)
    for mesh, indices in meshes.items():
        bad = (~finite[indices]).float()
        parts = DTensor.from_local(bad, mesh, [Partial("max")] * mesh.ndim, run_check=False)
        finite[indices] = parts.full_tensor() == 0
