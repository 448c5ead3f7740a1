import pytest
import torch
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


def test_only_running_statistics_have_a_mean_over_ranks():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2, 2), torch.finfo(torch.float32).min))
    assert [*statistics(model)] == ["1.running_mean", "1.running_var"]
