"""An evaluation that came about on one rank and broke on another."""

import pytest
import torch

from gossipgrad.data import Dataset, DatasetInfo, TensorSamples
from gossipgrad.errors import GossipError
from gossipgrad.train import GossipConfig, TrainConfig
from gossipgrad.train._evaluate import TestPart
from support.jobs import job_on
from support.ranks import run_ranks
from support.replicas import backward, network, sgd
from support.strategies import build

EPOCHS, STEPS = 5, 3


def toy():
    generator = torch.Generator().manual_seed(0)
    samples = TensorSamples(torch.randn(60, 6, generator=generator), torch.arange(60) % 3)
    info = DatasetInfo(
        name="toy", input_shape=(6,), num_classes=3, train_samples=60, test_samples=60
    )
    return Dataset(info=info, train=samples, test=samples)


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
        config = TrainConfig(options={"gossip": GossipConfig(topology="matching", mode=mode)})
        strategy = build(config, model, optimizer, rank=rank, world_size=2, group=group)
        test = TestPart(job_on(toy()), rank=rank, world_size=2)
        if rank == 1:
            break_after(strategy._session.group, broken_in)
        steps, found = 0, []
        for epoch in range(EPOCHS):
            while strategy.position(steps) < (epoch + 1) * STEPS:
                backward(model, rank, steps)
                optimizer.step()
                steps += 1
            found.append(strategy.evaluate(test, epoch=epoch + 1, final=epoch + 1 == EPOCHS))
            if found[-1].final:
                break
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
    assert whole[-1].final
    assert all(value.equal(partial[-1].weights[key]) for key, value in whole[-1].weights.items())
    assert notes == []
    (note,) = said
    assert f"the evaluation after {broken_in} epochs broke on rank 1" in note
