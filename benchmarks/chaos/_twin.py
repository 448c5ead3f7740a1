"""Whether two runs came to the same, bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["differences"]


def differences(ours: Path, theirs: Path, ranks: int) -> list[str]:
    """Where the metrics of any rank, but for times, or the exported models differ; in words."""
    told = []
    for rank in range(ranks):
        mine, other = (_metrics(folder / f"metrics-rank{rank}.jsonl") for folder in (ours, theirs))
        if len(mine) != len(other):
            told.append(f"rank {rank} wrote {len(mine)} lines of metrics, its twin {len(other)}")
        pairs = enumerate(zip(mine, other, strict=False), 1)
        first = next((number for number, (a, b) in pairs if a != b), None)
        if first is not None:
            told.append(
                f"metrics of rank {rank} differ from its twin's in line {first}: "
                f"{mine[first - 1]} is not {other[first - 1]}"
            )
    models = [load_file(folder / "model.safetensors") for folder in (ours, theirs)]
    if models[0].keys() != models[1].keys():
        return [*told, "the models have other tensors than their twin's"]
    differ = [name for name, ours in models[0].items() if not _same_bits(ours, models[1][name])]
    if differ:
        told.append(f"the model differs from its twin's in {', '.join(differ)}")
    return told


def _same_bits(one: Tensor, other: Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(*(each.flatten().view(torch.uint8) for each in (one, other)))


def _metrics(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]
