"""One model of all replicas of a checkpoint; no worker is needed for it."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._layout import find, manifest_of, state_path
from ._load import load
from ._model import write_safetensors

# After the key of the weights: the names that the model's own `state_dict()` has for them.
_NAMES = "_names"
_OWN = "_own"  # buffers that have no mean over ranks
_RESIDUALS = "residuals"


def consensus(
    directory: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    key: str = "model",
) -> dict[str, Tensor]:
    """Return the mean over ranks of what they have saved: the model that a run has trained.

    Local, for one process that sees the parts of all ranks. Files are mapped, and tensors are
    averaged one after another: memory holds the mean, and one tensor in 64 bits.

    Args:
        directory: Where checkpoints lie.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        key: Where the state has the weights: a dict of tensors by name, as `model.state_dict()`.
            Where beside it, under `model_names` for `model`, there is a dict of names, the model
            gets those, each with the tensor under the name that it leads to: so that it has tied
            weights under all their names, and not what its own `state_dict()` leaves out. What
            rounding took away from narrow weights, under `residuals` in the state, is added.

    Returns:
        By name, on the CPU: floating-point and complex tensors are the mean over ranks, summed in
        64 bits and rounded once to their own type; others, and those that the state lists under
        `model_own` for `model`, are those of the lowest rank.

    Raises:
        ValueError: Ranks are missing (with their numbers), of unlike runs, or have unlike models;
            or a file is not what was saved, and which.
    """
    directory = Path(directory)
    whole = find(directory, step=step, run=run)
    return _mean(directory, whole.step, whole.members, key)


def export_safetensors(
    directory: str | PathLike[str],
    path: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    rank: int | None = None,
    key: str = "model",
    overwrite: bool = False,
) -> Path:
    """Write the consensus of a checkpoint, or the replica of one rank, as a safetensors file.

    Its metadata says which step and ranks it is of.

    Args:
        directory: Where checkpoints lie.
        path: The file to write.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        rank: None: the consensus; a rank: its replica as it was, without the others.
        key: As for `consensus`.
        overwrite: Whether an existing file may be replaced.

    Returns:
        The path written.

    Raises:
        ValueError: As for `consensus`; `path` exists; or a tensor is of a type that safetensors
            cannot hold.
        OSError: The file cannot be written; one that was there stays.
    """
    directory, path = Path(directory), Path(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: name another one, or allow to overwrite it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write into: make it first")
    if rank is None:
        whole = find(directory, step=step, run=run)
        tensors = _mean(directory, whole.step, whole.members, key)
        metadata = {"replica": f"consensus of ranks {', '.join(map(str, whole.members))}"}
    else:
        whole = manifest_of(directory, rank, step, run)
        tensors = _mean(directory, whole.step, (rank,), key)
        metadata = {"replica": f"rank {rank} of {whole.world_size}"}
    metadata |= {"step": str(whole.step), "run": whole.run}
    write_safetensors(path, tensors, metadata)
    return path


def _mean(directory: Path, step: int, ranks: Sequence[int], key: str) -> dict[str, Tensor]:
    """The mean of the weights of some ranks, with what rounding took away from them."""
    states = [load(directory, rank=rank, step=step, mmap=True) for rank in ranks]
    paths = [state_path(directory, step, rank) for rank in ranks]
    models = [_weights(path, state, key) for path, state in zip(paths, states, strict=True)]
    first, own = models[0], set(states[0].get(key + _OWN) or ())
    for path, weights in zip(paths, models, strict=True):
        _check_like(path, weights, paths[0], first, own)
    residuals = [state.get(_RESIDUALS) or {} for state in states]
    mean = {
        name: weight.clone()
        if name in own
        else _mean_of(
            [one[name] for one in models], [one[name] for one in residuals if name in one]
        )
        for name, weight in first.items()
    }
    names = states[0].get(key + _NAMES) or {name: name for name in mean}
    return {name: mean[kept] for name, kept in names.items()}


def _mean_of(weights: list[Tensor], residuals: list[Tensor]) -> Tensor:
    """The mean over ranks of one tensor, summed in 64 bits."""
    first = weights[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first.clone()
    total = torch.zeros(
        first.shape, dtype=torch.complex128 if first.is_complex() else torch.float64
    )
    for term in (*weights, *residuals):
        total += term
    return total.div_(len(weights)).to(first.dtype)


def _weights(path: Path, state: Any, key: str) -> dict[str, Tensor]:
    """The weights in the state of one rank."""
    if not isinstance(state, Mapping) or not isinstance(state.get(key), Mapping):
        raise ValueError(f"{path} has no dict under {key!r}: say where the weights lie")
    for name, tensor in state[key].items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path} has {name!r} of type {type(tensor).__name__} under {key!r}: weights are "
                "tensors by name"
            )
    return dict(state[key])


def _check_like(
    path: Path,
    weights: Mapping[str, Tensor],
    first_path: Path,
    first: Mapping[str, Tensor],
    own: set[str],
) -> None:
    """Refuse another model than that of the lowest rank."""
    if odd := sorted(weights.keys() ^ first.keys()):
        raise ValueError(f"{path} has another model than {first_path}: {odd[0]!r} is in one alone")
    for name in weights.keys() - own:
        one, other = weights[name], first[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"{path} has another model than {first_path}: {name!r} is {tuple(one.shape)} of "
                f"{one.dtype}, not {tuple(other.shape)} of {other.dtype}"
            )
