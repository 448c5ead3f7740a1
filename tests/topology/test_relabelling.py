"""The relabellings are a wire format: every rank, platform and version computes the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.topology._relabelling import identity, relabelling, splitmix64


def test_splitmix64_is_the_published_generator():
    states = np.array([0, 1234567], np.uint64)
    assert splitmix64(states).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]


@pytest.mark.parametrize(
    ("world_size", "seed", "index", "rank_at"),
    [
        (1, 0, 0, [0]),
        (8, 0, 0, [0, 1, 6, 3, 5, 4, 2, 7]),
        (8, 0, 1, [3, 0, 1, 5, 2, 7, 4, 6]),
        (12, 7, 3, [2, 9, 1, 7, 6, 3, 8, 11, 4, 0, 10, 5]),
        (5, 2**64 - 1, 10**9, [0, 2, 4, 1, 3]),
    ],
)
def test_pinned(world_size, seed, index, rank_at):
    assert relabelling(world_size, seed, index).rank_at.tolist() == rank_at


def test_the_same_as_in_plain_python():
    def hashed(value: int) -> int:
        mask = 2**64 - 1
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    seed, index = 0xDEADBEEFDEADBEEF, 2**62 + 3
    keys = [hashed(hashed(hashed(seed) ^ index) ^ rank) for rank in range(100)]
    expected = sorted(range(100), key=keys.__getitem__)
    assert relabelling(100, seed, index).rank_at.tolist() == expected


@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1))
def test_a_permutation_with_its_inverse(world_size, seed, index):
    for labels in (relabelling(world_size, seed, index), identity(world_size)):
        ranks = np.arange(world_size)
        assert np.array_equal(labels.position_of[labels.rank_at], ranks)
        assert np.array_equal(labels.rank_at[labels.position_of], ranks)


def test_kept_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        relabelling(4, 0, 0).rank_at[0] = 3


def test_places_are_even_over_many_relabellings():
    places = np.array([relabelling(8, 0, index).position_of for index in range(4000)])
    counts = np.stack([(places == place).mean(axis=0) for place in range(8)])
    # 1/8 +- five standard deviations of 4000 draws.
    assert np.abs(counts - 1 / 8).max() < 5 * np.sqrt(1 / 8 * 7 / 8 / 4000)
