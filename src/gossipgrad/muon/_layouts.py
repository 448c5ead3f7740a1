"""Which matrices a parameter holds: the last two dimensions, unless its layer says otherwise."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from gossipgrad.optim import owners_of

__all__ = ["PLAIN", "Layout", "Split", "layouts_of", "matrices_of", "sides_of", "tensor_of"]

Layout = tuple[Any, ...]
"""A kind, and the parts of the output dimension: their number or their sizes.

`"rows"`: `(..., out, in)`. `"columns"`: `(..., in, out)`. `"kernel"`: `(out, in / groups, ...)`, a
matrix per group. `"transposed kernel"`: `(in, out / groups, ...)`, likewise.
"""

Split = Mapping[str, int | Sequence[int]]

PLAIN: Layout = ("rows", 1)


def layouts_of(model: nn.Module, split: Split) -> dict[str, Layout]:
    """Return the layout of each parameter by name.

    Raises `ValueError` if a pattern of `split` fits no matrix, or its parts not the outputs.
    """
    named, layouts = dict(model.named_parameters()), {}
    unused = set(split)
    for name, (path, module, leaf) in owners_of(model).items():
        layout = _layout_of(module, leaf, named[name])
        for pattern, parts in split.items():
            around = path.rpartition(".")[2]
            if named[name].ndim < 2 or not any(
                fnmatchcase(each, pattern) for each in (name, path, around)
            ):
                continue
            unused.discard(pattern)
            layout = (layout[0], parts if isinstance(parts, int) else tuple(parts))
            outputs = named[name].shape[-1 if layout[0] == "columns" else -2]
            if isinstance(parts, int):
                fits = parts > 0 and outputs % parts == 0
            else:
                fits = sum(parts) == outputs and min(parts) > 0
            if not fits or "kernel" in layout[0]:
                raise ValueError(
                    f"split={{{pattern!r}: {parts!r}}} does not divide {name!r} of shape "
                    f"{tuple(named[name].shape)}, with {outputs} outputs: give a number of equal "
                    "parts, or sizes that sum to the outputs of a linear layer"
                )
        layouts[name] = layout
    if unused:
        raise ValueError(
            f"split= names {min(unused)!r}, which fits no matrix: it takes names of parameters or "
            f"of their modules, and the model has {', '.join(map(repr, list(named)[:4]))}, ..."
        )
    return layouts


def matrices_of(tensor: Tensor, layout: Layout) -> list[Tensor]:
    """Return the matrices of a parameter or of its update, as stacks `(..., out, in)`."""
    kind, parts = layout
    if kind == "kernel":
        return [tensor.unflatten(0, (parts, -1)).flatten(2)]
    if kind == "transposed kernel":
        return [tensor.unflatten(0, (parts, -1)).transpose(1, 2).flatten(2)]
    if kind == "columns":
        tensor = tensor.mT
    if parts == 1:
        return [tensor]
    if isinstance(parts, int):
        return [tensor.unflatten(-2, (parts, -1))]
    return list(tensor.split(parts, -2))


def tensor_of(matrices: Sequence[Tensor], layout: Layout, shape: torch.Size) -> Tensor:
    """Return the parameter's tensor: the inverse of `matrices_of`."""
    kind, parts = layout
    if kind == "transposed kernel":
        inputs, _, *window = shape
        stack = matrices[0].unflatten(2, (inputs // parts, *window))
        return stack.transpose(1, 2).reshape(shape)
    if isinstance(parts, int):
        (whole,) = matrices
        whole = whole.flatten(-3, -2) if kind != "kernel" and parts > 1 else whole
    else:
        whole = torch.cat(list(matrices), -2)
    return (whole.mT if kind == "columns" else whole).reshape(shape)


def sides_of(shape: Sequence[int], layout: Layout) -> list[tuple[int, int, int]]:
    """Return how many matrices each of its stacks has, and their outputs and inputs."""
    stacks = matrices_of(torch.empty(shape, device="meta"), layout)
    return [(s[..., 0, 0].numel(), s.shape[-2], s.shape[-1]) for s in stacks]


def _layout_of(module: nn.Module, leaf: str, parameter: Tensor) -> Layout:
    if isinstance(module, _ConvTransposeNd):
        return "transposed kernel", module.groups
    if isinstance(module, _ConvNd):
        return "kernel", module.groups
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return "rows", 3
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and not leaf.startswith("weight_hr"):
        return "rows", max(1, parameter.shape[0] // module.hidden_size)  # its gates
    # GPT-2's, of the library transformers: inputs x outputs.
    is_conv1d = any(each.__name__ == "Conv1D" for each in type(module).__mro__)
    return ("columns", 1) if is_conv1d else PLAIN
