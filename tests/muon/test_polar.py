"""Polar factors: exact and by Newton-Schulz, stacked and one by one."""

import pytest
import torch

from gossipgrad.muon import POLARS, polarise, resolve_polar

SHAPES = [(8, 5), (5, 8), (6, 6), (4, 32), (32, 4), (1, 7), (8, 5), (4, 40)]


def matrices(dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def one_by_one(matrix, steps):
    """The published iteration, in float64."""
    x = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    x = x / x.norm()
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def test_singular_values_give_the_exact_factor():
    for matrix, factor in zip(matrices(), polarise(matrices(), POLARS["svd"]), strict=True):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        torch.testing.assert_close(factor, u @ vh)


@pytest.mark.parametrize("name", [name for name, steps in POLARS.items() if steps])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_stacks_of_any_shape_equal_the_published_iteration(name, dtype):
    shapes = SHAPES if dtype is torch.float64 else [s for s in SHAPES if min(s) > 1]  # chaotic at 1
    found = polarise(matrices(dtype, shapes), POLARS[name])
    for matrix, factor in zip(matrices(dtype, shapes), found, strict=True):
        tolerance = 1e-10 if dtype is torch.float64 else 2e-4
        expected = one_by_one(matrix, POLARS[name])
        assert (factor.double() - expected).norm() <= tolerance * expected.norm()
        assert factor.dtype is dtype


@pytest.mark.parametrize("shape", [(3, 4), (128, 128), (300, 200), (2, 130, 140)])
@pytest.mark.parametrize("name", POLARS)
def test_zero_has_the_factor_zero_and_nothing_is_written(name, shape):
    held = [torch.zeros(shape), torch.ones(shape)]
    before = [matrix.clone() for matrix in held]
    zero, other = polarise(held, POLARS[name])
    assert not zero.any()
    assert other.isfinite().all()
    assert all(map(torch.equal, held, before))
    assert all(f.data_ptr() != m.data_ptr() for f, m in zip([zero], held, strict=False))


def test_large_matrices_equal_the_published_iteration():
    """They are multiplied by their Gram matrix, in blocks."""
    shapes = [(390, 400), (130, 650), (500, 390), (200, 200)]
    for polar in (POLARS["muon"], (*POLARS["muon"], *[(2.0, -1.5, 0.5)] * 4)):
        found = polarise(matrices(torch.float32, shapes), polar)
        for matrix, factor in zip(matrices(torch.float32, shapes), found, strict=True):
            expected = one_by_one(matrix, polar)
            assert (factor.double() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("name", POLARS)
def test_a_stack_equals_its_matrices(name):
    tall = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    wide = tall[0, 0].T.contiguous()
    whole, alone = polarise([tall, wide], POLARS[name])
    assert whole.shape == tall.shape
    for found, matrix in zip(whole.flatten(0, 1), tall.flatten(0, 1), strict=True):
        torch.testing.assert_close(found, polarise([matrix], POLARS[name])[0])
    torch.testing.assert_close(alone, whole[0, 0].T)


@pytest.mark.parametrize("polar", ["newton", [(1.0, 2.0)]])
def test_unknown_steps_are_refused(polar):
    with pytest.raises(ValueError, match="polar"):
        resolve_polar(polar)
