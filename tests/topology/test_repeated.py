"""A schedule at another pace."""

import numpy as np
import pytest

from gossipgrad.topology import among, dissemination, matching, repeated


def test_rounds_last_several_times_with_a_share_of_the_weight():
    inner = dissemination(6, seed=3)
    slow = repeated(inner, 3, share=0.5)
    assert slow.period == 3 * inner.period
    assert slow.symmetric == inner.symmetric
    for round in range(20):
        expected = (np.eye(6) + inner.mixing_matrix(round // 3)) / 2
        np.testing.assert_allclose(slow.mixing_matrix(round), expected)


def test_the_living_go_on_at_the_same_pace():
    slow = among(repeated(matching(8), 2), [0, 2, 3, 5, 6])
    inner = among(matching(8), [0, 2, 3, 5, 6])
    for round in range(20):
        for rank in (0, 2, 3, 5, 6):
            assert slow.peers(round, rank) == inner.peers(round // 2, rank)
    assert slow.describe() != repeated(inner, 3).describe()


@pytest.mark.parametrize(("times", "share"), [(0, 1.0), (1, 0.0), (1, 1.5)])
def test_what_cannot_be_is_refused(times, share):
    with pytest.raises(ValueError, match=f"times={times}"):
        repeated(matching(4), times, share=share)
