"""Eigenbases and inverse roots, by themselves."""

import pytest
import torch

from gossipgrad.second_order import eigenbasis, inverse_root, newton_inverse_root, power_step


def spectrum(n, condition, count=1, dtype=torch.float64):
    """Symmetric matrices with eigenvalues from 1 to 1 / condition, and these roots' truth."""
    torch.manual_seed(n)
    q = torch.linalg.qr(torch.randn(count, n, n, dtype=torch.float64))[0]
    d = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)
    return (q * d @ q.mT).to(dtype), q, d


@pytest.mark.parametrize(
    ("condition", "eigh_bound", "newton_bound"), [(1e2, 1e-6, 1e-5), (1e5, 1e-4, 1e-2)]
)
def test_inverse_roots_of_fp32_matrices(condition, eigh_bound, newton_bound):
    """The table of the published implementations, n = 256; see benchmarks/second_order_roots.py."""
    matrices, q, d = spectrum(256, condition, 2, torch.float32)
    truth = q * d.pow(-0.25) @ q.mT
    for find, bound in ((inverse_root, eigh_bound), (newton_inverse_root, newton_bound)):
        found = find(matrices, 4, 1e-12).double()
        assert found.dtype == torch.float64
        assert (found - truth).norm() / truth.norm() < bound


def test_a_rank_deficient_matrix_has_a_finite_symmetric_root():
    x = torch.randn(1, 64, 8)
    for find in (inverse_root, newton_inverse_root):
        found = find(x @ x.mT, 4, 1e-5)
        assert found.isfinite().all()
        torch.testing.assert_close(found, found.mT, rtol=1e-2, atol=1e-3)
    assert inverse_root(x @ x.mT, 4, 1e-12).isfinite().all()
    with pytest.raises(RuntimeError, match="finite"):
        inverse_root(x @ x.mT * torch.nan, 4, 1e-5)


def test_newton_says_what_did_not_converge():
    wild = torch.randn(2, 32, 32)
    wild[1] = spectrum(32, 10.0, 1, torch.float32)[0][0]
    wild[0] = -wild[0] @ wild[0].T
    found = newton_inverse_root(wild, 4, 1e-6)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_power_steps_converge_to_the_eigenbasis():
    matrices, _, d = spectrum(12, 1e4, 3)
    basis = eigenbasis(matrices + 0.01 * torch.eye(12, dtype=torch.float64))
    basis = torch.linalg.qr(basis + 0.1 * torch.randn_like(basis))[0]
    for _ in range(60):
        basis, order = power_step(matrices, basis, is_sorted=True)
    assert order.equal(torch.arange(12).expand(3, -1))
    found = basis.mT @ matrices @ basis
    torch.testing.assert_close(found, torch.diag_embed(d).expand(3, -1, -1), rtol=0, atol=1e-6)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(12).double().expand(3, -1, -1))
