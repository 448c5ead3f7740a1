"""Narrowing of a full model to the shapes of one that has shrunk."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

__all__ = ["fit_sizes", "narrow"]


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
    before = {name: tensor.shape for name, tensor in own.items()}
    for name, tensor in own.items():
        there, here = tuple(shapes.get(name, tensor.shape)), tuple(tensor.shape)
        if len(there) != len(here) or any(a > b for a, b in zip(there, here, strict=True)):
            raise ValueError(
                f"{name} has the shape {there} where the model has shrunk, and {here} here: build "
                "the model as wide as it was when the run began"
            )
    for name, tensor in own.items():
        if name in shapes and tuple(shapes[name]) != tuple(tensor.shape):
            tensor.grad = None
            small = torch.zeros(tuple(shapes[name]), dtype=tensor.dtype, device=tensor.device)
            tensor.set_(small)  # pyrefly: ignore[bad-argument-type]
    fit_sizes(model, before)


def fit_sizes(model: nn.Module, before: Mapping[str, Sequence[int]]) -> None:
    """Set the size attributes of torch's modules to those of their weights.

    Args:
        model: The model.
        before: The shapes of parameters when the attributes were right, by name.
    """
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            weight = getattr(module, "running_mean", None)
        name = f"{path}.weight" if path else "weight"
        if not isinstance(weight, Tensor) or tuple(weight.shape) == tuple(before.get(name, ())):
            continue
        length = len(weight) if weight.ndim else 1
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.embedding_dim = weight.shape
        elif isinstance(module, _ConvNd):
            if module.groups > 1:
                module.groups = module.groups * length // before[name][0]
            others = module.groups * weight.shape[1]
            sizes = (length, others) if module.transposed else (others, length)
            module.in_channels, module.out_channels = sizes
        elif isinstance(module, _NormBase):
            module.num_features = length
        elif isinstance(module, nn.GroupNorm):
            module.num_groups = module.num_groups * length // before[name][0]
            module.num_channels = length
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.normalized_shape = tuple(weight.shape)
        elif isinstance(module, nn.PReLU):
            module.num_parameters = length
        elif hasattr(module, "nf"):  # Conv1D of transformers
            module.nf = weight.shape[1]  # pyrefly: ignore[bad-argument-type]
