"""Selection is exact: each method against a stable sort, on inputs that are hard on it."""

import math
import re

import numpy as np
import pytest
import torch

from gossipgrad.compression import SparseFormat, top_k

METHODS = ("auto", "partition", "threshold")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def expected(values, count):
    """By the rule alone: magnitude descending, index ascending; NaN above all, by its bits."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.view(width).numpy().astype(np.int64)
    bits &= torch.iinfo(width).max
    return torch.from_numpy(np.sort(np.argsort(-bits, kind="stable")[:count]))


def gaussian(numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def spikes_in_one_block(numel):
    values = 1e-3 * gaussian(numel)
    values[numel // 2 : numel // 2 + 64] *= 1e6
    return values


def with_non_finite(numel):
    values = gaussian(numel)
    indices = torch.randperm(numel, generator=torch.Generator().manual_seed(1))
    for index, value in zip(indices, (math.nan, math.inf, -math.inf, -math.nan), strict=False):
        values[index] = value
    return values


INPUTS = {
    "gaussian": gaussian,
    "constant": lambda numel: torch.full((numel,), -0.25),
    "all zero": torch.zeros,
    "zeros of both signs": lambda numel: 0.0 * gaussian(numel),
    "all NaN": lambda numel: torch.full((numel,), math.nan),
    "all inf": lambda numel: torch.full((numel,), -math.inf),
    "denormal": lambda numel: 1e-43 * gaussian(numel),
    "not finite": with_non_finite,
    "heavy tails": lambda numel: gaussian(numel) / gaussian(numel + 1)[1:],
    "few levels": lambda numel: gaussian(numel).round(),
    "mostly zero": lambda numel: gaussian(numel) * (torch.arange(numel) % 97 == 5),
    "ascending": lambda numel: torch.arange(1.0, numel + 1),
    "descending": lambda numel: -torch.arange(float(numel), 0, -1),
    "spikes in one block": spikes_in_one_block,
    "rows in step": lambda numel: (torch.arange(numel) % 61 == 0) * gaussian(numel).abs(),
}


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces so small that a few thousand values have many."""
    for name, size in (("_CHUNK_BYTES", 1 << 11), ("_SAMPLE", 512)):
        monkeypatch.setattr(f"gossipgrad.compression._top_k.{name}", size)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", INPUTS)
def test_selects_as_a_stable_sort_does(kind, method, small_pieces):
    for dtype in DTYPES:
        for numel in (1, 7, 5003):
            values = INPUTS[kind](numel).to(dtype)
            before = values.clone()
            for count in {1, -(-numel // 1000), -(-numel // 60), numel // 2 + 1, numel}:
                found = top_k(values, count, method=method)
                assert found.dtype == torch.int64
                assert torch.equal(found, expected(values, count)), (dtype, numel, count)
            assert torch.equal(values.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_selected_from_is_refused():
    values = gaussian(100)
    for refused, named in ((values[::2], "stride"), (values.int(), "int32")):
        with pytest.raises(ValueError, match=named):
            top_k(refused, 3)
    for count in (0, -1, 101):
        with pytest.raises(ValueError, match=f"count is {count}"):
            top_k(values, count)
    with pytest.raises(ValueError, match="count is 1: of 0 values"):
        top_k(values[:0], 1)
    with pytest.raises(ValueError, match="'best'"):
        top_k(values, 3, method="best")


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("count", [1.0, 2.5, math.nan, True, "3", None, torch.tensor(3)])
def test_counts_are_whole_numbers(count):
    for make in (lambda: top_k(gaussian(100), count), lambda: SparseFormat(100, count)):
        with pytest.raises(ValueError, match=re.escape(f"count is {count!r}")):
            make()
    with pytest.raises(ValueError, match=r"numel is 100\.0"):
        SparseFormat(100.0, 3)
    assert top_k(gaussian(100), np.int64(3)).numel() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", INPUTS)
def test_selects_as_large_ones_on_a_gpu(kind):
    """Ascending, and of the same magnitudes; among equals it may choose others."""
    for dtype in DTYPES:
        for numel in (7, 5003, 300_001):
            values = INPUTS[kind](numel).to(dtype)
            for count in {1, -(-numel // 1000), -(-numel // 60), numel}:
                found = top_k(values.cuda(), count)
                assert found.is_cuda
                assert count == 1 or bool((found.diff() > 0).all())
                chosen = [
                    values[each].abs().sort().values
                    for each in (found.cpu(), expected(values, count))
                ]
                torch.testing.assert_close(*chosen, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for():
    values = gaussian(1_000_000).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        top_k(values, 1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_sample_that_misleads_costs_no_exactness(monkeypatch):
    # The guess is private: whether it misleads is up to the values, in a way that no test can hold.
    values = gaussian(1 << 20)
    monkeypatch.setattr(
        "gossipgrad.compression._top_k._guess", lambda bits, count: int(bits.max()) - 2
    )
    assert torch.equal(top_k(values, 1000, method="threshold"), expected(values, 1000))
