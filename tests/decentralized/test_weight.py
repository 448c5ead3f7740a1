"""Ranks that count unequally: exchanges keep the weighted mean, and averages are weighted."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad import topology
from support.ranks import run_ranks
from support.replicas import flat, network, plain_sgd, transport_by_name
from support.sessions import no_gradients

WEIGHTS = [4.0, 1.0, 2.0, 2.0]


def sessions(use, weights=WEIGHTS, **settings):
    """What `use(model, optimizer, session)` returns on each rank; replicas begin apart."""
    link = transport_by_name("in-process", len(weights))
    settings = {"bucket_bytes": 100, "heartbeats": None, "transport": link, **settings}

    def rank_main(rank, group):
        model = network()
        optimizer = plain_sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, weight=weights[rank], **settings
        ) as session:
            generator = torch.Generator().manual_seed(rank)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=generator))
            found = use(model, optimizer, session)
            group.barrier()
            return found

    return run_ranks(len(weights), rank_main)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": gg.Sync(momentum=0.9), "exchanges": 2},
        {"mode": "stale"},
        {"compress": "shared-mask:0.5"},
    ],
    ids=str,
)
def test_the_weighted_mean_is_kept_and_is_the_consensus(settings):
    def use(model, optimizer, session):
        before = flat(model)
        for step in range(12):
            no_gradients(model, session.rank, step)
            optimizer.step()
        session.wait()
        distance = session.consensus_distance()
        with session.consensus():
            consensus = flat(model)
        session.average_()
        return before, consensus, flat(model), distance

    found = sessions(use, **settings)
    total = sum(weight * before for weight, (before, *_) in zip(WEIGHTS, found, strict=True))
    expected = total / sum(WEIGHTS)
    for _, consensus, after, distance in found:
        torch.testing.assert_close(consensus, expected)
        torch.testing.assert_close(after, expected)
        assert distance < 1.0 or settings.get("mode") == "stale", "replicas have come nearer"
    starts = [before for before, *_ in found]
    assert not torch.allclose(sum(starts) / len(starts), expected)


def test_equal_weights_change_no_bit():
    def use(model, optimizer, session):
        for step in range(6):
            no_gradients(model, session.rank, step)
            optimizer.step()
        return flat(model)

    for one, other in zip(sessions(use, [1.0] * 4), sessions(use, [32] * 4), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_a_number_above_0(weight):
    with pytest.raises(ValueError, match="above 0"):
        sessions(lambda *_: None, [1.0, weight])


def test_a_topology_without_pairs_is_refused():
    with pytest.raises(ValueError, match="choose matching"):
        sessions(lambda *_: None, topology="dissemination")


def test_survivors_keep_their_weights():
    schedule = topology.weighted(topology.matching(4), WEIGHTS)
    left = topology.among(schedule, [0, 2])
    assert left.peers(3, 0).send_to == 2
    assert left.weight(3, 0) == pytest.approx(2 / 6)
    assert left.weight(3, 2) == pytest.approx(4 / 6)
