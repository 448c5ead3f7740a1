"""Every model takes a step of gossip; what comes out is the reference's rule, bit for bit."""

import copy

import pytest
import torch

import gossipgrad as gg
from gossipgrad.decentralized._reference import Reference
from gossipgrad.models import training_loss
from gossipgrad.topology import by_name
from support.ranks import run_ranks
from support.replicas import assert_same_bits
from support.small_models import INPUTS, make_batch, make_model

RANKS = 2


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("name", INPUTS)
def test_a_step_by_gossip(name):
    replicas = [make_model(name) for _ in range(RANKS)]
    twins = copy.deepcopy(replicas)

    def rank_main(rank, group):
        model, optimizer = replicas[rank], sgd(replicas[rank])
        with gg.gossip(model, optimizer, process_group=group, mode="sync"):
            loss = training_loss(model, *make_batch(name, seed=rank))
            loss.backward()
            optimizer.step()
        return loss.item(), [parameter.grad for parameter in model.parameters()]

    losses, gradients = zip(*run_ranks(RANKS, rank_main), strict=True)
    assert losses[0] != losses[1]
    for twin, held in zip(twins, gradients, strict=True):
        for parameter, gradient in zip(twin.parameters(), held, strict=True):
            parameter.grad = gradient
    start = [parameter.detach().clone() for parameter in twins[0].parameters()]
    Reference(
        twins, [sgd(twin) for twin in twins], by_name("dissemination", RANKS), mode="sync"
    ).step()
    ours, theirs = ([list(model.parameters()) for model in side] for side in (replicas, twins))
    assert_same_bits(ours, theirs)
    torch.testing.assert_close(*ours)  # a pair that has met is of one mind
    assert not any(torch.equal(a, b) for a, b in zip(ours[0], start, strict=True))


def test_batch_statistics_stay_a_ranks_own():
    """Steps mix no buffers; the consensus averages them."""
    name = "resnet20"
    alone = []
    for rank in range(RANKS):
        model = make_model(name)
        training_loss(model, *make_batch(name, seed=rank))
        alone.append([buffer.clone() for buffer in model.buffers()])
    replicas = [make_model(name) for _ in range(RANKS)]

    def rank_main(rank, group):
        model, optimizer = replicas[rank], sgd(replicas[rank])
        with gg.gossip(model, optimizer, process_group=group, mode="sync") as session:
            training_loss(model, *make_batch(name, seed=rank)).backward()
            optimizer.step()
            own = [buffer.clone() for buffer in model.buffers()]
            with session.consensus():
                return own, [buffer.clone() for buffer in model.buffers()]

    own, consensus = zip(*run_ranks(RANKS, rank_main), strict=True)
    torch.testing.assert_close(list(own), alone)
    for first, second, *both in zip(*own, *consensus, strict=True):
        if first.is_floating_point():
            assert not torch.equal(first, second)
            torch.testing.assert_close(both, [(first + second) / 2] * RANKS)
