"""Which parameters of a model are polarised, and which are left to AdamW."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["ADAMW", "MUON", "choose_roles"]

MUON, ADAMW = "muon", "adamw"


def choose_roles(
    model: nn.Module, *, muon: Sequence[str] = (), adamw: Sequence[str] = ()
) -> dict[str, str]:
    """The role of each parameter that is trained, by name; a shared one has its first name.

    Polarised are matrices, and the kernels of convolutions flattened to one row an output, unless
    they belong to an embedding, or to the head: the last linear layer, where there are matrices
    before it. Everything else is AdamW's: vectors, scalars, and tensors of more dimensions that no
    convolution owns (positional embeddings, stacked experts).

    Args:
        model: The model.
        muon: Patterns of names, such as `"blocks.*.experts"`, polarised whatever they are.
        adamw: Patterns of names that are AdamW's, whatever they are.

    Raises:
        ValueError: A pattern fits no parameter, two fit one, or a vector would be polarised.
    """
    roles: dict[str, str] = {}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
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
        roles[name] = MUON if is_matrix else ADAMW
    head = _head(model)
    if head is not None and any(
        role == MUON and named[name] is not head for name, role in roles.items()
    ):
        roles |= {name: ADAMW for name, parameter in named.items() if parameter is head}
    chosen_muon, chosen_adamw = _fitting(named, muon, "muon"), _fitting(named, adamw, "adamw")
    if both := sorted(chosen_muon & chosen_adamw):
        raise ValueError(f"{both[0]!r} fits a pattern of muon= and one of adamw=: name it in one")
    for name in sorted(chosen_muon):
        if named[name].ndim < 2:
            raise ValueError(
                f"muon= names {name!r} of shape {tuple(named[name].shape)}: only matrices are "
                "polarised, and tensors of more dimensions flattened to one row a first index"
            )
    return roles | dict.fromkeys(chosen_muon, MUON) | dict.fromkeys(chosen_adamw, ADAMW)


def _head(model: nn.Module) -> Tensor | None:
    """The weight of the last linear layer."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1].weight if linear else None


def _fitting(named: Iterable[str], patterns: Sequence[str], argument: str) -> set[str]:
    if isinstance(patterns, str):
        raise ValueError(f"{argument}={patterns!r} is one text: give a list of patterns of names")
    found: set[str] = set()
    for pattern in patterns:
        fits = {name for name in named if fnmatchcase(name, pattern)}
        if not fits:
            some = ", ".join(map(repr, list(named)[:4]))
            raise ValueError(
                f"{argument}= names {pattern!r}, which fits no trained parameter; the model has "
                f"{some}, ..."
            )
        found |= fits
    return found
