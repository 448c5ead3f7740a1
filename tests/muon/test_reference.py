"""The reference against the stacked primal-dual form, and the paper's counter-examples."""

import math

import pytest
import torch

from gossipgrad.muon import BACKBONES, make_backbone
from gossipgrad.muon._reference import NAMES, Neighbours, Reference, Stacked, msgn
from gossipgrad.topology import dissemination

SURVIVORS = ("atc-gt", "semi-atc-gt", "non-atc-gt", "paper-extra", "demuon")
PAIR = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)


def ring(n, weight=0.25):
    W = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        W[i, i] += 1 - 2 * weight
        W[i, (i + 1) % n] += weight
        W[i, (i - 1) % n] += weight
    return W


def same_start(n, *shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, *shape, generator=generator, dtype=torch.float64).repeat(n, 1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_neighbour_form_equals_the_primal_dual_form(name):
    W, X = ring(8), same_start(8, 4, 3)
    stacked, local = Stacked(name, W, X), Neighbours(name, X)
    generator, mean = torch.Generator().manual_seed(5), X.mean(0)
    for k in range(60):
        U = msgn(torch.randn(8, 4, 3, generator=generator, dtype=torch.float64))
        U *= 0.1 / (1 + k) ** 0.5
        assert (stacked.step(U) - local.step(U, W)).abs().max() < 1e-10
        mean = mean - U.mean(0)
        assert (local.X.mean(0) - mean).abs().max() < 1e-11


@pytest.mark.parametrize("name", BACKBONES)
def test_the_fast_form_keeps_to_the_reference_over_thousands_of_steps(name):
    """In fp32, with messages in fp32 and in bf16: 5,000 updates, and then 500 steps at rate 0."""
    steps, X = 5000, same_start(8, 1, 16)
    W = ring(8)
    x = X.float().expand(8, 2, 16).clone()  # the second row is sent in bf16
    rule, reference = make_backbone(name, [x]), Neighbours(name, X)
    rule.begin([x])
    generator = torch.Generator().manual_seed(0)

    def exchange(names):
        for each in names:
            (held,) = rule.held[each]
            sent = held.float().double()
            sent[:, 1] = held[:, 1].bfloat16().double()
            held += ((W - torch.eye(8)) @ sent.flatten(1)).view_as(held).to(held.dtype)

    mean, at_rest = x.double().mean(0), torch.empty(())
    for k in range(steps + 500):
        if k == steps:
            at_rest = x.double().mean(0)
        updated = x - 0.01 * max(0, 1 - k / steps) * torch.randn(8, 1, 16, generator=generator)
        U = (x - updated).double()
        mean = mean - U.mean(0)
        exchange(rule.before([x]))
        after = rule.after([x], [updated])
        try:
            while True:
                exchange(next(after))
        except StopIteration as end:
            (x,) = end.value
        reference.step(U[:, :1], W)
    assert (x[:, :1] - reference.X).abs().max() < 2e-5
    assert (x.double().mean(0) - mean).abs().max() < 2e-5  # roundings of weights of size 1
    assert (x.double().mean(0) - at_rest).abs().max() < 1e-6
    for dual in rule.duals:
        assert dual.mean(0).abs().max() < 1e-12


class Logistic:
    """Example 4.1: two agents whose gradients have one polar factor, with opposite signs."""

    def __init__(self, a=2.0, b=1.0):
        generator = torch.Generator().manual_seed(1)
        u, v = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (6, 4))
        self.U, self.a, self.b = torch.outer(u / u.norm(), v / v.norm()), a, b

    def gradients(self, X):
        t = (X * self.U).sum((1, 2))
        of_two = self.a * torch.sigmoid(t[0]), -self.b * torch.sigmoid(-t[1])
        return torch.stack([factor * self.U for factor in of_two])

    def gap(self, mean):
        """f of the mean, less its least value, which is at t = ln(b / a)."""
        softplus = torch.nn.functional.softplus

        def f(t):
            return 0.5 * (self.a * softplus(t) + self.b * softplus(-t))

        best = torch.tensor(math.log(self.b / self.a), dtype=torch.float64)
        return (f((mean * self.U).sum()) - f(best)).item()


@pytest.mark.parametrize("name", NAMES)
def test_without_tracking_the_mean_never_leaves_the_start(name):
    """Proposition 4.5: msgn cancels, though the gradient of the mean is 0.25 there."""
    problem, X = Logistic(), torch.zeros(2, 6, 4, dtype=torch.float64)
    reference = Reference(name, X, b=0.9, tracks=False)
    for _ in range(60):
        X = reference.step(problem.gradients(X), 0.05, PAIR)
    assert X.mean(0).norm() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_with_tracking_the_gap_closes(name):
    problem, X = Logistic(), torch.zeros(2, 6, 4, dtype=torch.float64)
    reference = Reference(name, X, b=0.9, polar=by_norm)  # of rank one they are the same
    for k in range(300):
        X = reference.step(problem.gradients(X), 0.05 * 0.98**k, PAIR)
    assert problem.gap(X.mean(0)) < 1e-6


def by_norm(H):
    return H / H.norm(dim=(1, 2), keepdim=True).clamp_min(1e-300)


class Quadratic:
    """f_i(X) = 1/2 tr (X - T_i)' A_i (X - T_i), with minima far apart."""

    def __init__(self, n=8):
        generator = torch.Generator().manual_seed(1)
        options = {"generator": generator, "dtype": torch.float64}
        self.T = 3 * torch.randn(n, 8, 5, **options)
        Q = torch.randn(n, 8, 8, **options)
        self.A = Q @ Q.mT / 8 + 0.1 * torch.eye(8, dtype=torch.float64)

    def gradients(self, X):
        return self.A @ (X - self.T)

    def slope(self, X):
        """Nuclear norm of the gradient of the mean function at the mean."""
        G = (self.A @ (X.mean(0) - self.T)).mean(0)
        return torch.linalg.matrix_norm(G, "nuc").item()


def slope_after(name, weights, steps=120):
    problem, X = Quadratic(), torch.zeros(8, 8, 5, dtype=torch.float64)
    reference = Reference(name, X, b=0.9)
    for k in range(steps):
        X = reference.step(problem.gradients(X), 0.3 / (1 + k) ** 0.75, weights(k))
        if not X.abs().max() < 1e6:
            return math.inf
    return problem.slope(X)


@pytest.mark.parametrize("name", NAMES)
def test_which_backbones_survive_rotating_partners(name):
    """From a slope of 21 those that do not grow without bound."""
    schedule = dissemination(8, rotate=False)
    matrices = [torch.from_numpy(schedule.mixing_matrix(k)) for k in range(3)]
    assert slope_after(name, lambda k: ring(8)) < 10
    assert (slope_after(name, lambda k: matrices[k % 3]) < 10) == (name in SURVIVORS)
