"""The groups of a plan, made anew, and what those before them carry over."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gossipgrad.errors import GossipError
from gossipgrad.planning import Group as Merge
from gossipgrad.sparsification._held import Held
from gossipgrad.sparsification._merged import MergedGroup
from gossipgrad.sparsification._settings import Settings

__all__ = ["gradients_of", "held_by", "made_anew"]


def made_anew(
    merges: Sequence[Merge],
    parameters: Mapping[str, nn.Parameter],
    held: Mapping[str, Held],
    settings: Settings,
    world_size: int,
) -> list[MergedGroup]:
    """The groups of parameters, in the order of backward, with what is carried over by name."""
    groups = []
    names = list(parameters)
    for merge in merges:
        of = names[merge.start : merge.stop]
        made = MergedGroup(
            [parameters[name] for name in of],
            merge.method,
            world_size=world_size,
            per_tensor=settings.select == "per_tensor",
            value_dtype=settings.value_dtype,
            momentum=settings.momentum_correction,
        )
        made.load([held.get(name, Held()) for name in of])
        groups.append(made)
    return groups


def gradients_of(
    merge: Merge, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> list[Tensor | None]:
    """What each parameter of a group brings to a round; None if nothing.

    It is all that `.grad` holds, also where this pass left out the parameter: on ranks where it did
    not, the mean of an earlier pass is part of the gradient, and so it must be on all.

    Raises:
        GossipError: One is sparse.
    """
    grads: list[Tensor | None] = []
    for place in range(merge.start, merge.stop):
        grad = parameters[place].grad
        if grad is not None and grad.layout is not torch.strided:
            raise GossipError(
                f"the gradient of {names[place]!r} is sparse ({grad.layout}): make its module with "
                "sparse=False; what is sent of it is a choice of its elements"
            )
        grads.append(grad)
    return grads


def held_by(
    merges: Sequence[Merge], groups: Sequence[MergedGroup], names: Sequence[str]
) -> dict[str, Held]:
    """What groups carry over, by name of the parameter, in the order of backward."""
    return {
        name: held
        for merge, made in zip(merges, groups, strict=True)
        for name, held in zip(names[merge.start : merge.stop], made.held(), strict=True)
    }
