"""Narrowing of a full model to the shapes of one that has shrunk."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

__all__ = ["narrow"]


@torch.no_grad()
def narrow(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Shrink parameters and buffers to these shapes, in place, with values 0; local.

    The parameters stay the same objects, and torch modules show their new sizes. Tensors that are
    not named keep their shapes.

    Args:
        model: As it was built for the run.
        shapes: Shapes by the names of parameters and buffers.

    Raises:
        ValueError: A shape is wider than the model's, or has other dimensions; nothing is changed
            then.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in own.items():
        there, here = tuple(shapes.get(name, tensor.shape)), tuple(tensor.shape)
        if len(there) != len(here) or any(a > b for a, b in zip(there, here, strict=True)):
            raise ValueError(
                f"{name} has the shape {there} where the model has shrunk, and {here} here: build "
                "the model as wide as it was when the run began"
            )
    depthwise = {
        module
        for module in model.modules()
        if isinstance(module, _ConvNd) and module.groups == module.out_channels > 1
    }
    for name, tensor in own.items():
        if name in shapes and tuple(shapes[name]) != tuple(tensor.shape):
            tensor.grad = None
            small = torch.zeros(tuple(shapes[name]), dtype=tensor.dtype, device=tensor.device)
            tensor.set_(small)  # pyrefly: ignore[bad-argument-type]
    for module in model.modules():
        _fit(module, is_depthwise=module in depthwise)


def _fit(module: nn.Module, *, is_depthwise: bool) -> None:
    """Set a module's size attributes to those of its weights."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd):
        if is_depthwise:
            module.groups = module.in_channels = module.out_channels = len(module.weight)
        elif module.groups == 1 and not module.transposed:
            module.out_channels, module.in_channels = module.weight.shape[:2]
    elif isinstance(module, _BatchNorm) and module.running_mean is not None:
        module.num_features = len(module.running_mean)
    elif isinstance(module, _BatchNorm) and module.affine:
        module.num_features = len(module.weight)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
