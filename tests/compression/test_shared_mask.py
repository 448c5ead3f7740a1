"""A shared mask covers everything evenly, and is the same for everybody."""

import math

import pytest
import torch

from gossipgrad.compression import SharedMask

WORD = (1 << 64) - 1


def splitmix64(state):
    mixed = state + 0x9E3779B97F4A7C15 & WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & WORD
    return mixed ^ mixed >> 31


def expected(stripe, numel, seed, round):
    """In whole numbers of any size, stripe by stripe."""
    cycle, turn = divmod(round, stripe)
    state = splitmix64(splitmix64(seed ^ int.from_bytes(b"masks\0\0\0")) ^ cycle)
    for number in range(-(-numel // stripe)):
        first = (splitmix64(state ^ number) >> 32) * stripe >> 32
        index = number * stripe + (first + turn) % stripe
        if index < numel:
            yield index


@pytest.mark.parametrize("numel", [1, 2, 9, 10, 11, 1000, 33_003])
@pytest.mark.parametrize("density", [1, 0.6, 0.1, 0.013])
def test_the_mask_is_that_of_whole_numbers(numel, density):
    mask = SharedMask(density)
    stripe = min(math.ceil(1 / density), numel)
    for seed in (0, 7, WORD):
        for round in (0, 1, stripe, 10**6 + 3):
            found = mask.indices(numel, seed=seed, round=round)
            assert found.dtype == torch.int64
            assert found.tolist() == [*expected(stripe, numel, seed, round)]


@pytest.mark.parametrize("numel", [3, 100, 1003])
@pytest.mark.parametrize("density", [1, 0.3, 0.05])
def test_a_cycle_covers_everything_once(numel, density):
    mask = SharedMask(density)
    rounds = min(mask.cycle_rounds, numel)
    for cycle in range(3):
        taken = [mask.indices(numel, seed=1, round=cycle * rounds + turn) for turn in range(rounds)]
        assert torch.equal(torch.cat(taken).sort().values, torch.arange(numel))
        sizes = {indices.numel() for indices in taken}
        largest = mask.largest_count(numel)
        assert sizes <= {largest, largest - 1}
        assert min(sizes) >= 1


def test_densities_out_of_range_are_refused():
    assert SharedMask(1e-300).indices(9, seed=0, round=0).numel() == 1
    for density in (0, -0.1, 1.01, math.nan, math.inf, 1e-310):
        with pytest.raises(ValueError, match=f"density is {density}"):
            SharedMask(density)
    assert hash(SharedMask(0.1)) == hash(SharedMask(0.1))


@pytest.mark.usefixtures("unchecked_types")
def test_masks_that_cannot_be_are_refused():
    mask = SharedMask(0.1)
    for numel, seed, round in (
        *((0, 0, 0), (9, -1, 0), (9, 1 << 64, 0), (9, 0, -1), (9, 0, 1 << 64)),
        *((1.5, 0, 0), (9.0, 0, 0), (9, 0.5, 0), (9, 0, 2.0), (True, 0, 0), ("9", 0, 0)),
    ):
        with pytest.raises(ValueError, match=f"for {numel!r} elements in round {round!r} of seed"):
            mask.indices(numel, seed=seed, round=round)


@pytest.mark.gpu
def test_a_mask_is_put_where_it_is_wanted():
    found = SharedMask(0.1).indices(1000, seed=0, round=3, device="cuda")
    assert torch.equal(found.cpu(), SharedMask(0.1).indices(1000, seed=0, round=3))
