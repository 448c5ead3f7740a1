"""Selection is exact: each method against a stable sort, on inputs that are hard on it."""

import math
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.compression import _threshold as threshold_module
from gossipgrad.compression._partition import scratch

METHODS = ("auto", "partition", "threshold", "blocks")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def expected(values, count):
    """By the rule alone: magnitude descending, place ascending; NaN above all, by its bits."""
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
    places = torch.randperm(numel, generator=torch.Generator().manual_seed(1))
    for place, value in zip(places, (math.nan, math.inf, -math.inf, -math.nan), strict=False):
        values[place] = value
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
    for module in ("_partition", "_threshold"):
        monkeypatch.setattr(f"gossipgrad.compression.{module}.CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr("gossipgrad.compression._threshold.SAMPLE", 512)
    monkeypatch.setattr("gossipgrad.compression._blocks._PIECE", 1 << 10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", INPUTS)
def test_selects_as_a_stable_sort_does(kind, method, small_pieces):
    for dtype in DTYPES:
        for numel in (1, 7, 1000, 5003):
            values = INPUTS[kind](numel).to(dtype)
            before = values.clone()
            for count in {
                1,
                min(2, numel),
                -(-numel // 1000),
                -(-numel // 60),
                numel // 2 + 1,
                numel,
            }:
                found = top_k(values, count, method=method)
                assert found.dtype == torch.int64
                assert torch.equal(found, expected(values, count)), (dtype, numel, count)
            assert torch.equal(values.view(torch.uint8), before.view(torch.uint8))


def test_selects_what_torch_topk_does():
    values = gaussian(300_000)
    found = top_k(values, 300)
    assert torch.equal(found, values.abs().topk(300).indices.sort().values)


@pytest.mark.parametrize("method", METHODS)
def test_selects_random_inputs(method, small_pieces):
    rng = random.Random(3)
    for _ in range(150):
        numel = rng.randint(1, rng.choice([20, 600, 6000]))
        count = rng.randint(1, rng.choice([1, min(8, numel), numel]))
        values = gaussian(numel) * 10 ** rng.uniform(-30, 3)
        values = values * (torch.rand(numel) < rng.random())
        if rng.random() < 0.3:
            values[rng.randrange(numel) :] *= 1e4
        values = values.to(rng.choice(DTYPES))
        assert torch.equal(top_k(values, count, method=method), expected(values, count))


def test_a_sample_that_misleads_costs_a_second_pass_alone(monkeypatch):
    values = gaussian(1 << 20)
    passes = []
    scan = threshold_module._found
    monkeypatch.setattr(threshold_module, "_found", lambda *a: passes.append(a[2]) or scan(*a))
    monkeypatch.setattr(threshold_module, "_guess", lambda bits, count: int(bits.max()) - 2)
    assert torch.equal(top_k(values, 1000, method="threshold"), expected(values, 1000))
    assert passes[1:] == [-1]
    monkeypatch.undo()


@pytest.fixture
def passes(monkeypatch):
    """What the passes by a threshold have found."""
    passes = []
    scan = threshold_module._found
    monkeypatch.setattr(
        threshold_module, "_found", lambda *a: passes.append(scan(*a)) or passes[-1]
    )
    return passes


def test_a_sample_is_enough_for_one_pass(passes):
    for kind in ("gaussian", "heavy tails", "few levels", "rows in step", "ascending"):
        for count in (50, 1000, 5000):
            passes.clear()
            top_k(INPUTS[kind](1 << 19), count, method="threshold")
            ((places, _),) = passes
            assert places.size < 2 * count + 3000 or kind == "few levels", (kind, count)


@pytest.mark.parametrize("column", range(8))
def test_rows_as_long_as_the_stride_of_the_sample_do_not_mislead_it(passes, column):
    numel = 1 << 19
    stride = numel // threshold_module.SAMPLE
    assert stride == 8
    values = gaussian(numel) * (torch.arange(numel) % stride == column)
    assert torch.equal(top_k(values, 1000, method="threshold"), expected(values, 1000))
    ((places, _),) = passes
    assert places.size < 2000


def test_candidates_are_bounded_whatever_comes():
    """Ascending values are candidates each, as each is the largest so far."""
    candidates = threshold_module._Candidates(10, 64, -1, np.dtype(np.int32))
    for start in range(0, 6400, 64):
        piece = np.arange(start, start + 64, dtype=np.int32)
        candidates.add(start, np.arange(64), piece)
        assert candidates.all()[0].size <= 2 * 10 + 64
    places, magnitudes = candidates.all()
    assert {*range(6390, 6400)} <= {*places.tolist()}
    assert candidates.bound >= 6300
    assert places.tolist() == magnitudes.tolist()


def test_scratch_memory_is_each_threads_own():
    both = threading.Barrier(2)

    def magnitudes(value):
        found = scratch.magnitudes(np.full(100, value, np.int32))
        both.wait(30)
        return found.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(magnitudes, (1, -1))] == [[1] * 100, [(1 << 31) - 1] * 100]


def test_threads_select_at_the_same_time():
    inputs = [gaussian(300_000 + number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda values: [top_k(values, 400) for _ in range(3)], inputs)]
    for values, choices in zip(inputs, found, strict=True):
        assert all(torch.equal(choice, expected(values, 400)) for choice in choices)


def test_a_parameter_is_selected_from_without_a_graph():
    values = torch.nn.Parameter(gaussian(100))
    assert not top_k(values, 3).requires_grad


def test_what_cannot_be_selected_from_is_refused():
    values = gaussian(100)
    with pytest.raises(ValueError, match=r"shape \(50,\) and stride \(2,\) are not flat"):
        top_k(values[::2], 3)
    for count in (0, -1, 101):
        with pytest.raises(ValueError, match=f"count is {count}: of 100 values, 1 to 100"):
            top_k(values, count)
    with pytest.raises(ValueError, match="count is 1: of 0 values"):
        top_k(values[:0], 1)
    with pytest.raises(ValueError, match="no selection method 'best': choose among auto"):
        top_k(values, 3, method="best")


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("count", [1.0, 2.5, math.nan, True, "3", None, torch.tensor(3)])
def test_counts_are_whole_numbers(count):
    message = re.escape(f"count is {count!r}: give a whole number of values, such as max(1, int(")
    with pytest.raises(ValueError, match=message):
        top_k(gaussian(100), count)
    with pytest.raises(ValueError, match=message):
        SparseFormat(100, count)
    with pytest.raises(ValueError, match=r"numel is 100\.0: give a whole number of elements"):
        SparseFormat(100.0, 3)
    assert top_k(gaussian(100), np.int64(3)).numel() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", INPUTS)
def test_selects_the_same_on_a_gpu(kind):
    for dtype in DTYPES:
        for numel in (7, 5003, 300_001):
            values = INPUTS[kind](numel).to(dtype)
            for count in {1, -(-numel // 1000), -(-numel // 60), numel}:
                found = top_k(values.cuda(), count)
                assert found.is_cuda
                assert torch.equal(found.cpu(), expected(values, count)), (dtype, numel, count)


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for():
    values = gaussian(1_000_000).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        top_k(values, 1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
