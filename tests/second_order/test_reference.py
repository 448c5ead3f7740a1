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


def test_blocks_are_each_a_matrix_of_its_own():
    """Cut at max_dim, as equal as can be; each block by the letters."""
    name = "Shampoo"
    weight = nn.Parameter(torch.zeros(7, 10, dtype=torch.float64))
    optimizer = getattr(gg, name)([weight], max_dim=4, **SETTINGS[name])
    rows, columns = ((0, 3), (3, 7)), ((0, 3), (3, 6), (6, 10))
    blocks = {
        (r, c): getattr(reference, name)(**LETTERS[name], T=10) for r in rows for c in columns
    }
    expected = torch.zeros(7, 10, dtype=torch.float64)
    for _ in range(STEPS):
        gradient = torch.randn(7, 10, dtype=torch.float64)
        weight.grad = gradient
        optimizer.step()
        for ((r0, r1), (c0, c1)), rule in blocks.items():
            part = expected[r0:r1, c0:c1].clone()
            expected[r0:r1, c0:c1] = rule.step(part, gradient[r0:r1, c0:c1])
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-7)


SHARES = [("SOAP", 0.1), ("KLShampoo", 1.0), ("Shampoo", 0.1)]


@pytest.mark.parametrize(("name", "share"), SHARES)
def test_a_quadratic_is_solved(name, share):
    """|A (W - C) B|^2, condition numbers of 100; KL-Shampoo bounds d^(-1/2) by 10 to 12 here."""
    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(n, n))[0] for n in (8, 12))
    a = left * torch.logspace(0, -2, 8) @ left.mT
    b = right * torch.logspace(0, -2, 12) @ right.mT
    wanted = torch.randn(8, 12)

    def train(make):
        weight = nn.Parameter(torch.zeros(8, 12))
        optimizer = make([weight])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        for _ in range(400):
            optimizer.zero_grad()
            loss = (a @ (weight - wanted) @ b).square().sum()
            loss.backward()
            optimizer.step()
            schedule.step()
        return loss.item()

    cls = getattr(gg, name)
    rates = (0.1, 0.03, 0.01)
    ours = min(train(lambda w, lr=lr: cls(w, lr=lr, weight_decay=0.0)) for lr in rates)
    adam = min(train(lambda w, lr=lr: torch.optim.Adam(w, lr=lr)) for lr in rates)
    assert ours < share * adam
