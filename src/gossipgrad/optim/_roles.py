"""The choice of parameters that an optimizer of matrices updates; AdamW updates the rest."""

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gossipgrad._messages import warn

__all__ = ["ADAMW", "choose_roles"]

ADAMW = "adamw"


def choose_roles(
    model: nn.Module,
    role: str,
    *,
    matrices: Sequence[str] = (),
    adamw: Sequence[str] = (),
    with_head: bool = False,
    argument: str = "matrices",
) -> dict[str, str]:
    """Return the role of each parameter by name; a shared one has its first name.

    Frozen parameters have a role, too: they may be trained later.

    `role` goes to matrices, and to the kernels of convolutions, flattened to one row per output,
    unless they belong to an embedding or to the head. The head is the last linear layer, if there
    are matrices before it, and no earlier block has one of that name and shape. AdamW updates
    everything else: vectors, scalars, and tensors of more dimensions that belong to no convolution
    (positional embeddings, stacked experts).

    Args:
        model: The model.
        role: The role of matrices.
        matrices: Patterns of names, such as `"blocks.*.experts"`, that always get `role`.
        adamw: Patterns of names that AdamW always updates.
        with_head: Whether the head counts as a matrix, unless it is tied to an embedding.
        argument: The public name of `matrices`, for messages.

    Raises:
        ValueError: A pattern fits no parameter, two fit one, or a vector would get `role`.
    """
    roles: dict[str, str] = {}
    named = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad or p.is_floating_point()  # frozen integers are never trained
    }
    owners = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    embedded = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters(recurse=False)
    }
    for name, parameter in named.items():
        is_kernel = parameter.ndim == 2 or isinstance(owners[id(parameter)], _ConvNd)
        is_matrix = parameter.ndim >= 2 and is_kernel and id(parameter) not in embedded
        roles[name] = role if is_matrix else ADAMW
    head = None if with_head else _head(model)
    if head is not None and any(
        each == role and named[name] is not head for name, each in roles.items()
    ):
        roles |= {name: ADAMW for name, parameter in named.items() if parameter is head}
    chosen, chosen_adamw = _fitting(named, matrices, argument), _fitting(named, adamw, "adamw")
    if both := sorted(chosen & chosen_adamw):
        raise ValueError(
            f"{both[0]!r} fits a pattern of {argument}= and one of adamw=: name it in one"
        )
    for name in sorted(chosen):
        if named[name].ndim < 2:
            raise ValueError(
                f"{argument}= names {name!r} of shape {tuple(named[name].shape)}: it takes "
                "matrices, and tensors of more dimensions flattened to one row a first index"
            )
        rows, *others = shape = tuple(named[name].shape)
        if rows > 1 < len(others) and not isinstance(owners[id(named[name])], _ConvNd):
            warn(
                f"{argument}= names {name!r} of shape {shape}, which is updated as one matrix of "
                f"{rows} x {math.prod(others)}. If it is a stack of matrices, such as experts, "
                "keep each as a parameter of its own, or name it in adamw="
            )
    return roles | dict.fromkeys(chosen, role) | dict.fromkeys(chosen_adamw, ADAMW)


def _head(model: nn.Module) -> Tensor | None:
    """Return the last linear layer's weight, unless it belongs to a repeated block."""
    linear = [
        (re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    if not linear:
        return None
    *before, (name, head) = linear
    return None if any((name, head.shape) == (n, each.shape) for n, each in before) else head


def _fitting(named: Iterable[str], patterns: Sequence[str], argument: str) -> set[str]:
    if isinstance(patterns, str):
        raise ValueError(f"{argument}={patterns!r} is one text: give a list of patterns of names")
    found: set[str] = set()
    for pattern in patterns:
        fits = {name for name in named if fnmatchcase(name, pattern)}
        if not fits:
            some = ", ".join(map(repr, list(named)[:4]))
            raise ValueError(
                f"{argument}= names {pattern!r}, which fits no parameter; the model has {some}, ..."
            )
        found |= fits
    return found
