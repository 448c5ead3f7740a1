import pytest
from torch import nn

from gossipgrad.comm import mean_inside, statistics
from gossipgrad.errors import GossipError


def test_statistics_are_a_ranks_own_again_where_the_mean_is_not_had():
    def mean(tensor):
        if tensor[0] == 1:
            raise GossipError("the variance has no mean")
        return tensor.add_(5.0)

    model = nn.BatchNorm1d(2)
    with (
        pytest.raises(GossipError, match="no mean"),
        mean_inside(statistics(model).values(), mean),
    ):
        raise AssertionError("it was entered")
    assert model.running_mean.tolist() == [0.0, 0.0]
