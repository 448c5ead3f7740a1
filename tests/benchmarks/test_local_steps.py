"""The contestants of `benchmarks.local_steps`, on noise."""

import math

import pytest
import torch

from benchmarks.local_steps import CONTESTANTS, NUMEL, run


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(1024, 196, generator=generator), torch.arange(1024) % 10
    return {"train": (x, y), "test": (x[:100], y[:100])}


def train(name, p, images, *, outer_lr=0.7):
    return run(CONTESTANTS[name], p, 4, 12, 0.01, outer_lr, 0, images)


@pytest.mark.parametrize("name", [name for name, kind in CONTESTANTS.items() if 8 in kind.periods])
def test_each_trains(name, images):
    found = train(name, 4, images)
    assert math.isfinite(found["loss"])
    assert found["megabytes"] > 0


def test_two_ranks_are_dilocos(images):
    diloco = train("DiLoCo", 2, images)
    ours = train("ours", 2, images)
    assert ours["loss"] == pytest.approx(diloco["loss"], rel=1e-4)
    assert ours["megabytes"] == pytest.approx(3 * NUMEL * 4 / 1e6)
    assert ours["megabytes"] == diloco["megabytes"]  # a ring of two sends each weight once


def test_two_exchanges_of_four_ranks_are_dilocos(images):
    diloco = train("DiLoCo", 4, images)
    assert train("ours, two exchanges", 4, images)["loss"] == pytest.approx(
        diloco["loss"], rel=1e-4
    )
