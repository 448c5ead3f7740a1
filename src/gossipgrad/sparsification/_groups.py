"""The groups of a plan, made anew, and what those before them carry over."""

from collections.abc import Mapping, Sequence

from torch import nn

from gossipgrad.planning import Group as Merge
from gossipgrad.sparsification._held import Held
from gossipgrad.sparsification._merged import MergedGroup
from gossipgrad.sparsification._settings import Settings

__all__ = ["held_by", "made_anew"]


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


def held_by(
    merges: Sequence[Merge], groups: Sequence[MergedGroup], names: Sequence[str]
) -> dict[str, Held]:
    """What groups carry over, by name of the parameter, in the order of backward."""
    return {
        name: held
        for merge, made in zip(merges, groups, strict=True)
        for name, held in zip(names[merge.start : merge.stop], made.held(), strict=True)
    }
