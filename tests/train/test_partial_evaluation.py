"""An evaluation that came about on one rank and broke on another."""

import threading

import pytest
import torch

from gossipgrad.errors import GossipError
from gossipgrad.report import Trace
from gossipgrad.train import STRATEGIES, GossipConfig, TrainConfig
from gossipgrad.train.strategies import Replica
from support.ranks import run_ranks
from support.replicas import backward, network, sgd

EPOCHS, STEPS = 5, 3


class Part:
    """What a strategy sees of the test part: here the metric is the first weight."""

    def sum_share(self, model, members=None):
        return torch.tensor([next(model.parameters()).flatten()[0].item(), 1.0])

    def weights(self, model, accuracy, *, final):
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    def accuracy(self, model):
        return float(self.sum_share(model)[0])


def break_after(group, times):
    """The n-th evaluation of this rank fails as its last collective is over for the others."""
    inner, counts = group.all_reduce_, []

    def all_reduce_(tensor):
        summed = inner(tensor)
        counts.append(tensor.shape == (2,))  # sum and number of an evaluation
        if counts[-1] and counts.count(True) == times:
            raise GossipError("the collective did not come about: a rank has died")
        return summed

    group.all_reduce_ = all_reduce_


@pytest.mark.parametrize(("mode", "broken_in"), [("overlap", 2), ("stale", EPOCHS - 1)])
def test_an_evaluation_that_broke_on_one_rank_alone_leaves_none_an_epoch_behind(mode, broken_in):
    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        options = GossipConfig(topology="matching", mode=mode)
        setting = TrainConfig(options={"gossip": options}).setting(2, total_steps=EPOCHS * STEPS)
        replica = Replica(
            model=model,
            optimizers=[optimizer],
            stop=threading.Event(),
            spans=Trace(rank),
            groups=lambda name: group,
        )
        strategy = STRATEGIES["gossip"].build(replica, setting, options)
        if rank == 1:
            break_after(strategy.session.group, broken_in)
        steps, found = 0, []
        for epoch in range(EPOCHS):
            while strategy.position(steps) < (epoch + 1) * STEPS:
                backward(model, rank, steps)
                optimizer.step()
                steps += 1
            found.append(strategy.evaluate(Part(), epoch=epoch + 1, final=epoch + 1 == EPOCHS))
        strategy.close()
        return found, strategy.position(steps), strategy.notes

    (whole, position, notes), (partial, other, said) = run_ranks(2, rank_main)
    assert position == other == EPOCHS * STEPS
    assert [each.is_consensus for each in whole] == [True] * EPOCHS
    missed = [number != broken_in for number in range(1, EPOCHS + 1)]
    assert [each.is_consensus for each in partial] == missed
    for one, two, both in zip(whole, partial, missed, strict=True):
        assert one.final == two.final
        assert not both or one.accuracy == two.accuracy
    assert all(value.equal(partial[-1].weights[key]) for key, value in whole[-1].weights.items())
    assert notes == []
    (note,) = said
    assert f"the evaluation after {broken_in} epochs broke on rank 1" in note
