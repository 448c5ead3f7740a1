"""The reference keeps what its rules promise: means, bounds, counters, and the plain optimizer."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import by_name, from_matrix


class Vectors(nn.Module):
    """Two parameters of unlike shape, drawn from the seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(7, generator=generator).to(dtype))


def replicas(p: int, dtype: torch.dtype = torch.float32, same: bool = False) -> list[nn.Module]:
    return [Vectors(0 if same else rank, dtype) for rank in range(p)]


def sgd(models: list[nn.Module], lr: float = 0.1, **options: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=lr, **options) for model in models]


def fill_gradients(models: list[nn.Module], seed: int | None) -> None:
    """Random gradients, other ones on each rank; zeros where the seed is None."""
    for rank, model in enumerate(models):
        generator = torch.Generator().manual_seed((seed or 0) * 100 + rank)
        for w in model.parameters():
            g = torch.randn(w.shape, generator=generator).to(w.dtype)
            w.grad = torch.zeros_like(w) if seed is None else g


def flat(model: nn.Module) -> Tensor:
    return torch.cat([w.detach().double().flatten() for w in model.parameters()])


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([w.grad.double().flatten() for w in model.parameters()])


def mean(models: list[nn.Module]) -> Tensor:
    return torch.stack([flat(model) for model in models]).mean(0)


def buffer(optimizer: torch.optim.Optimizer, w: Tensor, key: str = "momentum_buffer") -> Tensor:
    return optimizer.state[w][key].clone()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)


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


# Optimizer state


def test_second_moments_are_clamped_and_step_counters_stay() -> None:
    models = replicas(2)
    optimizers = [torch.optim.Adam(m.parameters(), betas=(0.9, 0.1)) for m in models]
    reference = Reference(models, optimizers, by_name("ring", 2), payload="weights+state")
    for step in range(4):
        fill_gradients(models, None)
        for w in models[0].parameters():
            w.grad.fill_(10.0 if step == 0 else 0.0)
        reference.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            for w in model.parameters():
                assert buffer(optimizer, w, "exp_avg_sq").min() >= 0.0
                assert buffer(optimizer, w, "step") == step + 1
    assert reference.clamps > 0
