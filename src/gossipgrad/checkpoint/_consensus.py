"""One model of all replicas of a checkpoint; no worker is needed for it."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._encode import DTYPE_NAMES
from ._files import tensor_chunks, write_file
from ._layout import all_steps, folder_of, manifest, newest
from ._load import read_state
from ._manifest import Manifest

__all__ = ["consensus", "export_safetensors", "target_of"]


def consensus(
    directory: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    key: str = "model",
    owed: str = "outstanding",
) -> dict[str, Tensor]:
    """The mean over ranks of what they have saved: the model that a run has trained.

    Local, for one process that sees the parts of all ranks. They are read one after another; held
    are the weights of one, and their sum in 64 bits.

    Args:
        directory: Where checkpoints lie.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        key: Where the state has the weights: a dict of tensors by name, as `model.state_dict()`.
        owed: Where the state has what is still to be added to weights (parts that had come and
            were not mixed yet), by the same names, as far as there is any.

    Returns:
        By name, on the CPU: floating-point and complex tensors are the mean over ranks, summed in
        64 bits and rounded once to their own type; others are those of the lowest rank.

    Raises:
        ValueError: Ranks are missing (with their numbers), of unlike runs, or have unlike models;
            or a file is not what was saved, and which.
    """
    return _mean(Path(directory), _whole(Path(directory), step, run), key, owed)


def export_safetensors(
    directory: str | PathLike[str],
    path: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    rank: int | None = None,
    key: str = "model",
    owed: str = "outstanding",
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
        owed: As for `consensus`; replicas are written without it.
        overwrite: Whether a file that is there may be replaced.

    Returns:
        The path written.

    Raises:
        ValueError: As for `consensus`; `path` exists; or a tensor is of a type that safetensors
            cannot hold.
        OSError: The file cannot be written; one that was there stays.
    """
    path = target_of(path, overwrite)
    directory = Path(directory)
    if rank is None:
        whole = _whole(directory, step, run)
        tensors = _mean(directory, whole, key, owed)
        told = {"replica": f"consensus of ranks {', '.join(map(str, whole.members))}"}
    else:
        whole = manifest(directory, rank=rank, step=step, run=run)
        folder = folder_of(directory, whole.step, rank)
        tensors = _weights(folder, read_state(folder, whole, (key,)), key)
        told = {"replica": f"rank {rank} of {whole.world_size}"}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name!r} is of {tensor.dtype}, which safetensors files do not hold: use "
                "consensus() or load(), which do"
            )
    told |= {"format": "pt", "step": str(whole.step), "run": whole.run}
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        write_file(partial, tensor_chunks(tensors, told))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def target_of(path: str | PathLike[str], overwrite: bool) -> Path:
    """Where to write; refused before anything is read."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: name another one, or allow to overwrite it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write into: make it first")
    return path


def _whole(directory: Path, step: int | None, run: str | None) -> Manifest:
    """One manifest of a complete checkpoint."""
    if step is None:
        return newest(directory, run)
    steps = {found.step: found for found in all_steps(directory)}
    if step not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
        raise ValueError(f"there is no checkpoint of step {step} in {directory}; {there}")
    for whole in steps[step].complete():
        if run in (None, whole.run):
            return whole
    raise ValueError(
        f"the checkpoint of step {step} in {directory} is not complete, it "
        f"{steps[step].lacks(run)}: name a step that is, or one rank for its replica"
    )


def _mean(directory: Path, whole: Manifest, key: str, owed: str) -> dict[str, Tensor]:
    first: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    for rank in whole.members:
        folder = folder_of(directory, whole.step, rank)
        own = manifest(directory, rank=rank, step=whole.step)
        state = read_state(folder, own, (key, owed))
        weights = _weights(folder, state, key)
        if rank == whole.members[0]:
            first = weights
        _check_alike(folder, weights, first)
        outstanding = _weights(folder, state, owed) if state.get(owed) else {}
        if unknown := sorted(set(outstanding) - set(weights)):
            raise ValueError(f"{folder} has {unknown[0]!r} under {owed!r}, but not under {key!r}")
        for name, tensor in weights.items():
            if tensor.is_floating_point() or tensor.is_complex():
                wide = torch.complex128 if tensor.is_complex() else torch.float64
                total = sums.setdefault(name, torch.zeros(tensor.shape, dtype=wide))
                total += tensor.to(wide)
                if name in outstanding:
                    total += outstanding[name].to(wide)
    for name, total in sums.items():
        first[name] = (total / len(whole.members)).to(first[name].dtype)
    return first


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


def _check_alike(folder: Path, weights: dict[str, Tensor], first: dict[str, Tensor]) -> None:
    if odd := sorted(set(weights) ^ set(first)):
        raise ValueError(f"{folder} has another model than the lowest rank: {odd[0]!r} is of one")
    for name, tensor in weights.items():
        if tensor.shape != first[name].shape or tensor.dtype != first[name].dtype:
            raise ValueError(
                f"{folder} has another model than the lowest rank: {name!r} is "
                f"{tuple(tensor.shape)} of {tensor.dtype}, not {tuple(first[name].shape)} of "
                f"{first[name].dtype}"
            )
