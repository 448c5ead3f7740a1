"""Eigenbases and inverse roots of factors from training, rank-deficient ones among them."""

import pytest
import torch
from torch import nn

from gossipgrad.data import load_digits
from gossipgrad.second_order import (
    inverse_root,
    newton_db_inverse_root,
    newton_inverse_root,
    power_step,
)

ROOTS = [inverse_root, newton_inverse_root, newton_db_inverse_root]


@pytest.fixture(scope="module")
def factors():
    """Shampoo's factors of a perceptron on digits, after the first step and after 60 of them.

    The border of a digit is black, so inputs that are never seen make the first layer's factor rank
    deficient; after one step of a small batch all of them are.
    """
    torch.manual_seed(0)
    inputs, labels = load_digits()
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    means = [(torch.zeros(len(p), len(p)), torch.zeros(p.shape[1], p.shape[1])) for p in matrices]
    found = []
    for step in range(60):
        chosen = torch.randint(len(inputs), (8 if step == 0 else 64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        for p, (left, right) in zip(matrices, means, strict=True):
            left.lerp_(p.grad @ p.grad.T, 0.05)
            right.lerp_(p.grad.T @ p.grad, 0.05)
        optimizer.step()
        if step in (0, 59):
            found += [factor.clone().unsqueeze(0) for pair in means for factor in pair]
    return found


def exact_root(matrix, eps):
    values, vectors = torch.linalg.eigh(matrix.double())
    damped = values.clamp(min=0) + eps * values[..., -1:]
    return (vectors * damped.pow(-0.25).unsqueeze(-2)) @ vectors.mT


def test_factors_of_training_are_ill_conditioned(factors):
    values = [torch.linalg.eigvalsh(each.double())[0] for each in factors]
    assert sum(bool((v < 1e-7 * v[-1]).any()) for v in values) >= 6


@pytest.mark.parametrize("eps", [1e-3, 1e-6])
@pytest.mark.parametrize("find", ROOTS)
def test_inverse_roots_of_factors_from_training(factors, find, eps):
    """They whiten: roots differ from the exact ones by the bound of the largest eigenvalue."""
    for matrix in factors:
        found = find(matrix, eps)
        assert found.isfinite().all()
        exact = exact_root(matrix, eps)
        most = exact_root(matrix, 3 * eps)  # as if the largest eigenvalue were three times that
        difference = (found.double() - exact).norm()
        assert difference <= 1.2 * (most - exact).norm()


@pytest.mark.parametrize(
    ("condition", "bounds"), [(1e2, (1e-5, 1e-4, 1e-4)), (1e5, (1e-2, 1e-2, 1e-2))]
)
def test_inverse_roots_of_known_matrices(condition, bounds):
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(2, 128, 128, dtype=torch.float64))[0]
    d = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 128, dtype=torch.float64)
    truth = q * d.pow(-0.25) @ q.mT
    for find, bound in zip(ROOTS, bounds, strict=True):
        found = find((q * d @ q.mT).float(), 1e-9).double()
        assert (found - truth).norm() / truth.norm() < bound


def test_inverse_roots_of_large_factors_of_low_rank_and_of_zeros():
    """Of a size for which LAPACK gets a larger matrix."""
    torch.manual_seed(0)
    x = torch.randn(512, 30)
    factors = torch.stack([x @ x.mT, 1e-12 * x @ x.mT, torch.zeros(512, 512)])
    found = inverse_root(factors, 1e-6)
    for each, factor in zip(found[:2], factors, strict=False):
        exact = exact_root(factor, 1e-6)
        assert (each.double() - exact).norm() < 1e-2 * exact.norm()
    torch.testing.assert_close(found[2], torch.eye(512))


@pytest.mark.parametrize("find", ROOTS)
def test_a_matrix_that_fails_leaves_the_others_of_its_stack(find):
    good = torch.eye(8) + 0.1
    stack = torch.stack([good, torch.full((8, 8), torch.nan), torch.zeros(8, 8)])
    if find is inverse_root:
        stack = stack[[0, 0, 2]]  # LAPACK raises
    found = find(stack, 1e-6)
    torch.testing.assert_close(found[0].double(), exact_root(good, 1e-6), atol=1e-4, rtol=1e-3)
    assert torch.equal(found[2], torch.eye(8))
    assert find is inverse_root or found[1].isnan().all()


@pytest.mark.parametrize("is_sorted", [True, False])
def test_bases_by_cholesky_factors_are_those_of_householder(factors, is_sorted):
    """As orthogonal, and as near to eigenvectors, after steps on real factors."""
    for matrix in factors:
        off_diagonal = {}
        for on_host in (True, False):
            basis = torch.eye(matrix.shape[-1]).unsqueeze(0)
            for _ in range(12):
                basis, order = power_step(matrix, basis, is_sorted=is_sorted, on_host=on_host)
            assert sorted(order[0].tolist()) == list(range(matrix.shape[-1]))
            gram = basis.mT @ basis
            assert (gram - torch.eye(len(gram[0]))).abs().max() < 1e-5
            found = (basis.mT @ matrix @ basis)[0].double()
            off_diagonal[on_host] = float((found - found.diagonal().diag()).norm() / found.norm())
        assert off_diagonal[False] < 1.2 * off_diagonal[True] + 1e-4


def test_power_steps_converge_to_the_eigenbasis():
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(3, 12, 12, dtype=torch.float64))[0]
    d = torch.logspace(0, -4, 12, dtype=torch.float64)
    basis = torch.eye(12, dtype=torch.float64).expand(3, -1, -1)
    for _ in range(60):
        basis, order = power_step(q * d @ q.mT, basis, is_sorted=True, on_host=True)
    assert order.equal(torch.arange(12).expand(3, -1))
    found = basis.mT @ (q * d @ q.mT) @ basis
    torch.testing.assert_close(found, torch.diag_embed(d).expand(3, -1, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_basis_of_zeros_stays_orthogonal(on_host):
    """A layer that is not reached has factors of zeros."""
    basis, _ = power_step(
        torch.zeros(2, 40, 40), torch.eye(40).expand(2, -1, -1), is_sorted=True, on_host=on_host
    )
    torch.testing.assert_close(basis.mT @ basis, torch.eye(40).expand(2, -1, -1))
