"""One model of all replicas of a checkpoint; no worker is needed for it."""

import secrets
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._files import sync_folder
from ._layout import Manifest, folder_of, manifest, whole_of
from ._load import read_state
from ._model import check_types, write_safetensors

# Behind the key of the weights: the names that the model's own `state_dict()` has for them.
_NAMES = "_names"
_Kinds = dict[str, tuple[tuple[int, ...], torch.dtype]]


def consensus(
    directory: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    key: str = "model",
    residuals: str = "residuals",
) -> dict[str, Tensor]:
    """The mean over ranks of what they have saved: the model that a run has trained.

    Local, for one process that sees the parts of all ranks. They are read one after another: memory
    holds the weights of one, and their sum in 64 bits.

    Args:
        directory: Where checkpoints lie.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        key: Where the state has the weights: a dict of tensors by name, as `model.state_dict()`.
            Where beside it, under `model_names` for `model`, there is a dict of names, the model
            gets those, each with the tensor under the name that it leads to: so that it has tied
            weights under all their names, and not what its own `state_dict()` leaves out.
        residuals: Where the state has what rounding took away from narrow weights, by the same
            names, as far as there is any; it is added.

    Returns:
        By name, on the CPU: floating-point and complex tensors are the mean over ranks, summed in
        64 bits and rounded once to their own type; others are those of the lowest rank.

    Raises:
        ValueError: Ranks are missing (with their numbers), of unlike runs, or have unlike models;
            or a file is not what was saved, and which.
    """
    return _mean_of(Path(directory), whole_of(Path(directory), step, run), key, residuals)


def export_safetensors(
    directory: str | PathLike[str],
    path: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    rank: int | None = None,
    key: str = "model",
    residuals: str = "residuals",
    overwrite: bool = False,
) -> Path:
    """Write the consensus of a checkpoint, or the replica of one rank, as a safetensors file.

    The file is there when it is whole, or not at all. What it is of stands in its metadata.

    Args:
        directory: Where checkpoints lie.
        path: The file to write.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        rank: None: the consensus; a rank: its replica as it was, without the others.
        key: As for `consensus`.
        residuals: As for `consensus`; replicas are written without it.
        overwrite: Whether a file that is there may be replaced.

    Returns:
        The path written.

    Raises:
        ValueError: As for `consensus`; `path` exists; or a tensor is of a type that safetensors
            cannot hold.
        OSError: The file cannot be written; one that was there stays.
    """
    path = _target_of(path, overwrite)
    directory = Path(directory)
    if rank is None:
        whole = whole_of(directory, step, run)
        tensors = _mean_of(directory, whole, key, residuals)
        metadata = {"replica": f"consensus of ranks {', '.join(map(str, whole.members))}"}
    else:
        whole = manifest(directory, rank=rank, step=step, run=run)
        folder = folder_of(directory, whole.step, rank)
        tensors = _replica_of(folder, whole, key)
        metadata = {"replica": f"rank {rank} of {whole.world_size}"}
    try:
        check_types(tensors)
    except ValueError as error:
        raise ValueError(f"{error}: use consensus() or load(), which do") from None
    metadata |= {"format": "pt", "step": str(whole.step), "run": whole.run}
    # Of no name that somebody else may have: a file that is there is never touched.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        write_safetensors(partial, tensors, metadata)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def _target_of(path: str | PathLike[str], overwrite: bool) -> Path:
    """Where to write; refused before anything is read."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: name another one, or allow to overwrite it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write into: make it first")
    return path


def _replica_of(folder: Path, part: Manifest, key: str) -> dict[str, Tensor]:
    """The weights of one rank, as they were."""
    state = read_state(folder, part, (key, key + _NAMES))
    weights = _weights(folder, state, key)
    return _named(weights, _names(folder, state, key))


def _mean_of(directory: Path, whole: Manifest, key: str, residuals: str) -> dict[str, Tensor]:
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
    """Adds a rank to the sums, and gives the names that it has."""
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
