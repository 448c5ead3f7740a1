"""The weights in the parts of a checkpoint: of one rank, and the mean of all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._layout import folder_of, manifest
from ._load import read_state
from ._manifest import Manifest

__all__ = ["mean_of", "replica_of"]

# Behind the key of the weights: the names that the model's own `state_dict()` has for them.
_NAMES = "_names"
_Kinds = dict[str, tuple[tuple[int, ...], torch.dtype]]


def replica_of(folder: Path, part: Manifest, key: str) -> dict[str, Tensor]:
    """The weights of one rank, as they were."""
    state = read_state(folder, part, (key, key + _NAMES))
    weights = _weights(folder, state, key)
    return _named(weights, _names(folder, state, key))


def mean_of(directory: Path, whole: Manifest, key: str, residuals: str) -> dict[str, Tensor]:
    """The mean of the weights of all ranks, with what rounding took away from them."""
    sums: dict[str, Tensor] = {}
    kinds: _Kinds = {}
    names: dict[str, str] = {}
    for rank in whole.members:
        # In a call of its own: what was read of one rank goes before that of the next is read.
        found = _add(sums, kinds, directory, rank, whole.step, key, residuals)
        names = names or found
    count = len(whole.members)
    mean = {
        name: total if _wide(kinds[name][1]) is None else (total / count).to(kinds[name][1])
        for name, total in sums.items()
    }
    return _named(mean, names)


def _add(
    sums: dict[str, Tensor],
    kinds: _Kinds,
    directory: Path,
    rank: int,
    step: int,
    key: str,
    residuals: str,
) -> dict[str, str]:
    """Adds a rank to the sums, and gives the names that it tells."""
    folder = folder_of(directory, step, rank)
    state = read_state(
        folder, manifest(directory, rank=rank, step=step), (key, residuals, key + _NAMES)
    )
    weights = _weights(folder, state, key)
    own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    if not kinds:
        kinds |= own
    _check_alike(folder, own, kinds)
    narrow = _weights(folder, state, residuals) if state.get(residuals) else {}
    if unknown := sorted(set(narrow) - set(weights)):
        raise ValueError(f"{folder} has {unknown[0]!r} under {residuals!r}, but not under {key!r}")
    for name, tensor in weights.items():
        if (wide := _wide(tensor.dtype)) is None:
            sums.setdefault(name, tensor)
            continue
        total = sums.setdefault(name, torch.zeros(tensor.shape, dtype=wide))
        total += tensor.to(wide)
        if name in narrow:
            total += narrow[name].to(wide)
    return _names(folder, state, key)


def _wide(kind: torch.dtype) -> torch.dtype | None:
    """What is added up in; None of what has no mean, of which the lowest rank's is taken."""
    if kind.is_complex:
        return torch.complex128
    return torch.float64 if kind.is_floating_point else None


def _named(weights: dict[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {name: weights[kept] for name, kept in names.items()} if names else weights


def _names(folder: Path, state: Mapping[str, Any], key: str) -> dict[str, str]:
    names = state.get(key + _NAMES) or {}
    good = isinstance(names, Mapping) and all(
        isinstance(name, str) and isinstance(kept, str) and kept in state[key]
        for name, kept in names.items()
    )
    if not good:
        raise ValueError(
            f"{folder} has under {key + _NAMES!r} what is no dict of names to names under {key!r}"
        )
    return dict(names)


def _weights(folder: Path, state: Any, key: str) -> dict[str, Tensor]:
    if not isinstance(state, Mapping) or key not in state:
        raise ValueError(f"{folder} has nothing under {key!r}: say where the weights lie")
    weights = state[key]
    if not isinstance(weights, Mapping):
        raise ValueError(f"{folder} has a {type(weights).__name__} under {key!r}, no dict")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"{folder} has {name!r} of type {type(tensor).__name__} under {key!r}: weights are "
                "tensors by name"
            )
    return dict(weights)


def _check_alike(folder: Path, own: _Kinds, first: _Kinds) -> None:
    if odd := sorted(set(own) ^ set(first)):
        raise ValueError(f"{folder} has another model than the lowest rank: {odd[0]!r} is of one")
    for name, (shape, kind) in own.items():
        if (shape, kind) != first[name]:
            raise ValueError(
                f"{folder} has another model than the lowest rank: {name!r} is {shape} of {kind}, "
                f"not {first[name][0]} of {first[name][1]}"
            )
