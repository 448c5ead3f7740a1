"""One model of all replicas of a checkpoint; no worker is needed for it."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._layout import find, manifest_of, state_path
from ._load import load
from ._model import write_safetensors
from ._save import sync_folder

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


def _mean(directory: Path, step: int, ranks: Sequence[int], key: str) -> dict[str, Tensor]:
    """The mean of the weights of some ranks, with what rounding took away from them."""
    states = [load(directory, rank=rank, step=step, mmap=True) for rank in ranks]
    paths = [state_path(directory, step, rank) for rank in ranks]
    parts = [_Part(path, state, key) for path, state in zip(paths, states, strict=True)]
    for part in parts[1:]:
        part.check_like(parts[0])
    first = parts[0]
    mean = {
        name: weight.clone()
        if name in first.own
        else _mean_of([list(part.terms(name)) for part in parts])
        for name, weight in first.weights.items()
    }
    return {name: mean[kept] for name, kept in parts[0].names.items()}


def _mean_of(terms: list[list[Tensor]]) -> Tensor:
    """The mean over ranks of one tensor, given what is to be added up on each."""
    first = terms[0][0]
    if not (first.is_floating_point() or first.is_complex()):
        return first.clone()
    total = torch.zeros(
        first.shape, dtype=torch.complex128 if first.is_complex() else torch.float64
    )
    for one in terms:
        for term in one:
            total += term
    return total.div_(len(terms)).to(first.dtype)


class _Part:
    """The weights in the state of one rank, checked."""

    def __init__(self, path: Path, state: Any, key: str) -> None:
        self.path = path
        self.weights = self._tensors(state, key)
        self.own = set(state.get(key + _OWN) or ())
        self.residuals = self._tensors(state, _RESIDUALS) if state.get(_RESIDUALS) else {}
        if unknown := sorted(set(self.residuals) - set(self.weights)):
            raise ValueError(
                f"{path} has {unknown[0]!r} under {_RESIDUALS!r}, but not under {key!r}"
            )
        names = state.get(key + _NAMES) or {name: name for name in self.weights}
        if not isinstance(names, Mapping) or not set(names.values()) <= set(self.weights):
            raise ValueError(
                f"{path} has under {key + _NAMES!r} no dict of names to names under {key!r}"
            )
        self.names = dict(names)

    def _tensors(self, state: Any, key: Any) -> dict[str, Tensor]:
        if not isinstance(state, Mapping) or not isinstance(state.get(key), Mapping):
            raise ValueError(f"{self.path} has no dict under {key!r}: say where the weights lie")
        for name, tensor in state[key].items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{self.path} has {name!r} of type {type(tensor).__name__} under {key!r}: "
                    "weights are tensors by name"
                )
        return dict(state[key])

    def check_like(self, first: "_Part") -> None:
        """Refuse another model than that of the lowest rank."""
        if odd := sorted(set(self.weights) ^ set(first.weights)):
            raise ValueError(
                f"{self.path} has another model than {first.path}: {odd[0]!r} is in one alone"
            )
        for name, tensor in self.weights.items():
            other = first.weights[name]
            if name in self.own:
                continue
            if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"{self.path} has another model than {first.path}: {name!r} is "
                    f"{tuple(tensor.shape)} of {tensor.dtype}, not {tuple(other.shape)} of "
                    f"{other.dtype}"
                )

    def terms(self, name: str) -> Iterator[Tensor]:
        """What adds up to the exact value of a weight."""
        yield self.weights[name]
        if name in self.residuals:
            yield self.residuals[name]
