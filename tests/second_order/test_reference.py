"""The fast optimizers against the papers' letters, in float64."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.second_order import _reference as reference

STEPS = 34
SETTINGS = {
    "SOAP": {"lr": 0.02, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "weight_decay": 0.1},
    "KLShampoo": {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "Shampoo": {"lr": 0.02, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "weight_decay": 0.1},
}
LETTERS = {
    "SOAP": {"a": 0.02, "b1": 0.9, "b2": 0.95, "b": 0.8, "w": 0.1},
    "KLShampoo": {"a": 0.02, "b1": 0.9, "b": 0.95, "w": 0.1},
    "Shampoo": {"a": 0.02, "b1": 0.9, "b2": 0.95, "b": 0.8, "w": 0.1},
}


def gradients(shape, steps=STEPS):
    """Noise within a square: eigenvectors that see a gradient are then unique but for signs."""
    generator = torch.Generator().manual_seed(shape[0] * 100 + shape[1])
    scales = torch.logspace(0, -2, shape[0], dtype=torch.float64)[:, None]
    square = torch.zeros(shape, dtype=torch.float64)
    square[: min(shape), : min(shape)] = 1
    return [
        scales * square * torch.randn(shape, generator=generator, dtype=torch.float64)
        for _ in range(steps)
    ]


@pytest.mark.parametrize(
    ("refresh", "period", "late"),
    [
        (gg.Synchronous(10), 10, 0),
        (gg.Background(10, 0), 10, 0),
        (gg.Synchronous(1), 1, 0),
        (gg.Background(8, 5, executor=gg.Deterministic(3)), 8, 3),
        (gg.Background(6, 4, fixed_delay=True), 6, 4),
    ],
)
@pytest.mark.parametrize("name", ["SOAP", "KLShampoo", "Shampoo"])
def test_equals_the_papers_letters(name, refresh, period, late):
    """Tall and wide, alone and stacked (two are alike, a third turned), and a late refresh."""
    shapes = [(5, 7), (7, 5), (5, 7), (4, 1), (6, 6)]
    if late:
        shapes = [(5, 7)]  # the first unit is due in steps that are multiples of the period
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    expected = [weight.detach().clone() for weight in weights]
    optimizer = getattr(gg, name)(weights, refresh=refresh, **SETTINGS[name])
    rules = [getattr(reference, name)(**LETTERS[name], T=period, D=late) for _ in shapes]
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            weight.grad = gradients(shapes[i])[step] * (i + 1)
            expected[i] = rules[i].step(expected[i], weight.grad)
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-6, atol=1e-7)
    optimizer.close()
