import contextlib

import pytest
import torch
from torch import nn

from gossipgrad.comm import mean_buffers
from gossipgrad.errors import GossipError
from support.ranks import run_ranks


def test_narrow_buffers_are_averaged_in_float32_and_taken_back_on_error():
    def rank_main(rank, group):
        model = nn.BatchNorm1d(1).bfloat16()
        own = (256.0, 1.0, 1.0, 1.0)[rank]  # in bfloat16, 256 + 1 is 256 again
        model.running_mean.fill_(own)
        model.num_batches_tracked.fill_(rank)
        shown = []
        with contextlib.suppress(KeyError), mean_buffers(model, group.mean_):
            shown += [float(model.running_mean), int(model.num_batches_tracked)]
            raise KeyError
        assert shown == [float(torch.tensor(259 / 4).bfloat16()), rank]
        assert shown[0] != 256 / 4
        assert float(model.running_mean) == own

    run_ranks(4, rank_main)


def test_buffers_are_a_ranks_own_again_where_the_mean_is_not_had():
    def mean(tensor):
        if tensor[0] == 1:
            raise GossipError("the variance has no mean")
        return tensor.add_(5.0)

    model = nn.BatchNorm1d(2)
    with pytest.raises(GossipError, match="no mean"), mean_buffers(model, mean):
        raise AssertionError("it was entered")
    assert model.running_mean.tolist() == [0.0, 0.0]
