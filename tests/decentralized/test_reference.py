"""The reference keeps what its rules promise: means, bounds, counters, and the plain optimizer."""

import math

import numpy as np
import pytest
import torch

from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import by_name, dissemination, from_matrix
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


@pytest.mark.parametrize(("name", "p"), SCHEDULES)
def test_lagged_halves_the_mean_step_of_ranks_that_meet(name: str, p: int) -> None:
    models = replicas(p)
    schedule = by_name(name, p)
    reference = Reference(models, sgd(models, lr=0.1), schedule, mode="lagged")
    for step in range(6):
        fill_gradients(models, step)
        before = mean(models)
        share = [1.0 if schedule.peers(step, r).recv_from is None else 0.5 for r in range(p)]
        dw = torch.stack([-0.1 * a * flat_gradient(m) for a, m in zip(share, models, strict=True)])
        reference.step()
        assert_near(mean(models), before + dw.mean(0))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["dissemination", "hypercube"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_gradients_reach_the_exact_average_in_one_period(p: int, name: str, seed: int) -> None:
    models = replicas(p)
    schedule = by_name(name, p, seed=seed)
    reference = Reference(models, sgd(models), schedule, mode="sync")
    expected = mean(models)
    fill_gradients(models, None)
    for _ in range(int(math.log2(p))):
        assert reference.consensus_distance() > 0.1
        reference.step()
    for model in models:
        assert_near(flat(model), expected)


def test_a_rank_takes_from_the_one_it_receives_from() -> None:
    models = replicas(3)
    start = [flat(model) for model in models]
    fill_gradients(models, None)
    Reference(models, sgd(models), dissemination(3, rotate=False), mode="sync").step()
    for rank, model in enumerate(models):
        assert_near(flat(model), (start[rank] + start[(rank + 1) % 3]) / 2)


def test_the_schedules_weight_replaces_one_half() -> None:
    models = replicas(2)
    schedule = from_matrix(np.array([[0.8, 0.2], [0.2, 0.8]]))
    first, second = flat(models[0]), flat(models[1])
    fill_gradients(models, None)
    Reference(models, sgd(models), schedule, mode="sync").step()
    assert_near(flat(models[0]), 0.8 * first + 0.2 * second)
    assert_near(flat(models[1]), 0.8 * second + 0.2 * first)


# Narrow wires, narrow and wide parameters


def test_float64_parameters_are_mixed_in_float64() -> None:
    models = replicas(4, torch.float64)
    reference = Reference(models, sgd(models), by_name("dissemination", 4), mode="sync")
    expected = mean(models)
    fill_gradients(models, None)
    for _ in range(2):
        reference.step()
    assert reference.consensus_distance() < 1e-14
    assert_near(mean(models), expected, 1e-14)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_narrow_wire_keeps_the_mean(mode: str) -> None:
    models = replicas(4)
    schedule = by_name("dissemination", 4)
    reference = Reference(models, sgd(models), schedule, mode=mode, wire_dtype=torch.bfloat16)
    expected = mean(models)
    fill_gradients(models, None)
    for _ in range(4):
        reference.step()
    assert_near(mean(models), expected)
    assert reference.consensus_distance() > 1e-4  # bfloat16 is coarse: the wire was narrow


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


@pytest.mark.parametrize("mode", ["overlap", "lagged"])
def test_an_average_inside_a_round_applies_what_is_outstanding(mode: str) -> None:
    models = replicas(3)
    reference = Reference(models, sgd(models), by_name("dissemination", 3), mode=mode, every=2)
    fill_gradients(models, 1)
    reference.step()
    kept = torch.cat([v.flatten() for v in reference.consensus()])
    assert mode == "overlap" or (kept - mean(models)).norm() > 1e-2
    reference.average_()
    assert_near(flat(models[2]), kept)
    fill_gradients(models, None)
    reference.step()
    assert reference.rounds == 1
    assert reference.consensus_distance() == 0.0


@pytest.mark.parametrize(("p", "steps"), [(1, 1), (2, 1), (5, 3), (8, 3), (9, 4)])
def test_log_p_averages_every_period(p: int, steps: int) -> None:
    models = replicas(p)
    schedule = by_name("dissemination", p)
    assert Reference(models, sgd(models), schedule, average_every="log_p").average_every == steps


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


def test_gradients_meet_in_the_last_step_of_a_round() -> None:
    models = replicas(2)
    reference = Reference(models, sgd(models), by_name("ring", 2), payload="gradients", every=2)
    for apart in (True, False):
        fill_gradients(models, 3)
        reference.step()
        assert apart != torch.allclose(flat_gradient(models[0]), flat_gradient(models[1]))


def test_gradients_and_weights_meet_in_the_same_round() -> None:
    models = replicas(2)
    reference = Reference(models, sgd(models), by_name("ring", 2), payload="gradients+weights")
    start = mean(models)
    fill_gradients(models, 3)
    average = sum(flat_gradient(model) for model in models) / 2
    reference.step()
    for model in models:
        assert_near(flat(model), start - 0.1 * average)
