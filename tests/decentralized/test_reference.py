"""The reference keeps what its rules promise: means, bounds, counters, and the plain optimizer."""

import numpy as np
import pytest
import torch

from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import by_name, from_matrix
from support.vectors import (
    assert_near,
    fill_gradients,
    flat,
    flat_gradient,
    mean,
    replicas,
    sgd,
)

SCHEDULES = [
    pytest.param(name, p, id=f"{name}-{p}")
    for name in ("dissemination", "hypercube", "matching", "ring", "complete")
    for p in (2, 3, 5, 8)
    if name != "hypercube" or p & (p - 1) == 0
]


# The mean over ranks


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize(("name", "p"), SCHEDULES)
def test_mean_moves_as_without_communication(name: str, p: int, mode: str) -> None:
    models = replicas(p)
    reference = Reference(models, sgd(models, lr=0.1), by_name(name, p), mode=mode)
    expected = mean(models)
    for step in range(12):
        fill_gradients(models, step)
        expected = expected - 0.1 * torch.stack([flat_gradient(m) for m in models]).mean(0)
        reference.step()
    assert_near(mean(models), expected)


def test_the_schedules_weight_replaces_one_half() -> None:
    models = replicas(2)
    schedule = from_matrix(np.array([[0.8, 0.2], [0.2, 0.8]]))
    first, second = flat(models[0]), flat(models[1])
    fill_gradients(models, None)
    Reference(models, sgd(models), schedule, mode="sync").step()
    assert_near(flat(models[0]), 0.8 * first + 0.2 * second)
    assert_near(flat(models[1]), 0.8 * second + 0.2 * first)


# Narrow wires, narrow and wide parameters


def walk_in_bfloat16(residual: bool, average_every: int | None = None) -> float:
    """Distance of the mean from the sum of all updates after 100 noisy rounds."""
    models = replicas(4, torch.bfloat16)
    reference = Reference(
        models, sgd(models), by_name("ring", 4), mode="sync", average_every=average_every
    )
    if not residual:
        reference.e = [[None for _ in replica] for replica in reference.w]
    expected = mean(models)
    fill_gradients(models, None)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        before = mean(models)
        with torch.no_grad():
            for w in (w for model in models for w in model.parameters()):
                w += (0.05 * torch.randn(w.shape, generator=generator)).bfloat16()
        expected = expected + mean(models) - before
        reference.step()
    kept = torch.cat([v.flatten() for v in reference.consensus()])
    return (kept - expected).norm().item()


def test_residual_keeps_the_mean_of_bfloat16_parameters() -> None:
    assert walk_in_bfloat16(residual=True) < 1e-4
    assert walk_in_bfloat16(residual=True, average_every=3) < 1e-4
    assert walk_in_bfloat16(residual=False) > 1e-2


# Rounds


def test_a_round_of_three_steps_mixes_the_snapshot_of_its_start() -> None:
    models = replicas(2)
    reference = Reference(models, sgd(models), by_name("dissemination", 2), every=3)
    for _ in range(2):
        start = [flat(model) for model in models]
        dw = [torch.zeros_like(w) for w in start]
        for step in range(3):
            fill_gradients(models, step)
            dw = [u - 0.1 * flat_gradient(m) for u, m in zip(dw, models, strict=True)]
            reference.step()
            kept = torch.cat([v.flatten() for v in reference.consensus()])
            assert_near(kept, (sum(start) + sum(dw)) / 2)
            if step < 2:
                assert_near(flat(models[0]), start[0] + dw[0])
        assert_near(flat(models[0]), start[0] + dw[0] + 0.5 * (start[1] - start[0]))
    assert reference.rounds == 2
    assert reference.steps == 6


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("every", [1, 2])
def test_every_third_step_ends_in_the_exact_average(mode: str, every: int) -> None:
    models = replicas(5)
    reference = Reference(
        models, sgd(models), by_name("dissemination", 5), mode=mode, every=every, average_every=3
    )
    expected = mean(models)
    for step in range(1, 10):
        fill_gradients(models, step)
        expected = expected - 0.1 * torch.stack([flat_gradient(m) for m in models]).mean(0)
        reference.step()
        assert (reference.consensus_distance() == 0.0) == (step % 3 == 0)
        assert reference.rounds == step // every
    assert_near(mean(models), expected)


# Gradients


def test_gradients_are_averaged_before_the_update_and_weights_do_not_meet() -> None:
    models = replicas(2)
    reference = Reference(models, sgd(models), by_name("ring", 2), payload="gradients")
    start = [flat(model) for model in models]
    fill_gradients(models, 3)
    average = sum(flat_gradient(model) for model in models) / 2
    reference.step()
    for model, w in zip(models, start, strict=True):
        assert_near(flat(model), w - 0.1 * average)
