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


@pytest.mark.parametrize("where", ["host", "auto"])
@pytest.mark.parametrize(("every", "delay"), [(10, 0), (1, 0), (8, 3), (6, 6), (1, 1)])
@pytest.mark.parametrize("name", ["SOAP", "KLShampoo", "Shampoo"])
def test_equals_the_papers_letters(name, every, delay, where):
    """Tall and wide, alone and stacked (two are alike, a third turned), and late refreshes."""
    shapes = [(5, 7), (7, 5), (5, 7), (4, 1), (6, 6)]
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    expected = [weight.detach().clone() for weight in weights]
    refresh = gg.Refresh(every, delay, where=where)
    optimizer = getattr(gg, name)(weights, refresh=refresh, **SETTINGS[name])
    # Three stacks, so six units, which share a window by the cubes of their sizes. In a turned
    # block the left one is the columns'.
    costs = [3 * 5**3, 3 * 7**3, 1, 4**3, 6**3, 6**3]
    phases = [int(every * (sum(costs[:u]) + costs[u] / 2) / sum(costs)) for u in range(6)]
    phases = [phases[:2], phases[1::-1], phases[:2], phases[3:1:-1], phases[4:]]
    rules = [
        getattr(reference, name)(**LETTERS[name], T=every, D=delay, p_L=left, p_R=right)
        for left, right in phases
    ]
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            weight.grad = gradients(shapes[i])[step] * (i + 1)
            expected[i] = rules[i].step(expected[i], weight.grad)
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-6, atol=1e-7)
    optimizer.close()


def test_a_mean_over_nodes_weighs_nodes_and_not_ranks():
    one, three = torch.eye(2), 3 * torch.eye(2)
    assert torch.equal(reference.hierarchical_mean([[one, one, one], [three]]), 2 * one)
