"""The training of every script: short, and converged, so that a point of accuracy means something.

A subset of Fashion-MNIST that the network learns by heart, judged on test images it has never seen:
a rank that trains alone from the first step on comes out where all together do, to a third of a
point, and a thousand test images more or less right would be seen.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossipgrad import data
from gossipgrad.data import Dataset, TensorSamples
from gossipgrad.train import GossipConfig, TrainConfig

from ._script import Script

_NAME = "fashion-mnist"
_TRAIN_SAMPLES, _TEST_SAMPLES = 2400, 5000
_BATCH_SIZE = 32
_EPOCHS_PER_RANK = 6
STEPS = _EPOCHS_PER_RANK * _TRAIN_SAMPLES // _BATCH_SIZE  # of each rank, roughly
LONGER = 4  # where others are to join: they need a second or two to come in
EVALUATIONS = 3 * _EPOCHS_PER_RANK  # of the smallest world


def config_for(script: Script, out: Path) -> TrainConfig:
    """The options of `gossipgrad train`: as many steps whatever the world size."""
    setting = script.setting
    return TrainConfig(
        data=_NAME,
        model="mlp",
        epochs=(LONGER if script.joins else 1) * _EPOCHS_PER_RANK * setting.world_size,
        batch_size=_BATCH_SIZE,
        lr=0.05,
        weight_decay=5e-3,
        nproc=setting.world_size,
        out=out,
        overwrite=True,
        quiet=True,
        log_every=1,
        trace=0,
        checkpoint_every=script.checkpoint_every,
        lost_after_seconds=script.lost_after_seconds,
        options={"gossip": GossipConfig(topology=setting.topology, mode=setting.mode)},
    )


def save_subset(path: Path) -> None:
    """Writes the subset down once; workers then need not read the whole set."""
    whole = data.load(_NAME)
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(0))
    x, y = whole.train.batch(order[:_TRAIN_SAMPLES])
    test_x, test_y = whole.test.batch(torch.arange(_TEST_SAMPLES))
    save_file({"x": x, "y": y, "test_x": test_x, "test_y": test_y}, path)


def load_subset(path: Path, *_: Any, **__: Any) -> Dataset:
    """The subset, instead of what `data.load` was asked for."""
    parts = load_file(path)
    info = replace(data.info(_NAME), train_samples=_TRAIN_SAMPLES, test_samples=_TEST_SAMPLES)
    return Dataset(
        info=info,
        train=TensorSamples(parts["x"], parts["y"]),
        test=TensorSamples(parts["test_x"], parts["test_y"]),
    )


def differences(ours: Path, twin: Path, ranks: int) -> list[str]:
    """Where the metrics of any rank, but for times, or the exported models differ in any bit."""
    found = []
    for rank in range(ranks):
        mine, other = (_metrics(folder / f"metrics-rank{rank}.jsonl") for folder in (ours, twin))
        if len(mine) != len(other):
            found.append(f"rank {rank} wrote {len(mine)} lines of metrics, its twin {len(other)}")
        pairs = enumerate(zip(mine, other, strict=False), 1)
        first = next((number for number, (a, b) in pairs if a != b), None)
        if first is not None:
            found.append(
                f"metrics of rank {rank} differ from its twin's in line {first}: "
                f"{mine[first - 1]} is not {other[first - 1]}"
            )
    one, other = (load_file(folder / "model.safetensors") for folder in (ours, twin))
    if one.keys() != other.keys():
        return [*found, "the models have other tensors than their twin's"]
    if differ := [name for name, tensor in one.items() if not _same_bits(tensor, other[name])]:
        found.append(f"the model differs from its twin's in {', '.join(differ)}")
    return found


def _same_bits(one: Tensor, other: Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(*(each.flatten().view(torch.uint8) for each in (one, other)))


def _metrics(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]
