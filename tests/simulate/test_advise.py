"""Advice: the fastest of what is known to lose little, with the evidence and its bound."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import Profile
from gossipgrad.simulate import Network, Workers
from support.ranks import run_ranks

PROFILE = Profile.load("vgg16")
RESULTS = Path(__file__).parents[2] / "benchmarks/results/equal_accuracy.json"


def network(gigabits):
    return Network.from_rate(1e9 * gigabits)


def test_on_fast_links_data_parallel_is_recommended_and_on_slow_ones_not():
    fast = gg.advise(PROFILE, network=network(1000), world_size=2, workers=Workers())
    slow = gg.advise(PROFILE, network=network(1), world_size=8)
    assert "DistributedDataParallel" in fast.best.settings
    assert "gg." in slow.best.settings
    assert slow.best.prediction.step_seconds < 0.5 * next(
        choice.prediction.step_seconds
        for choice in slow.choices
        if choice.settings == "DistributedDataParallel"
    )


@pytest.mark.parametrize("most_loss", [0.0, 2.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "other"])
@pytest.mark.parametrize("world_size", [8, 300])
def test_nothing_is_recommended_that_loses_more_or_is_slower_than_something_allowed(
    most_loss, optimizer, world_size
):
    found = gg.advise(
        PROFILE, optimizer, network=network(2), world_size=world_size, most_loss=most_loss
    )
    allowed = [c for c in found.choices if c.loss is not None and c.loss <= most_loss]
    assert found.best in allowed
    assert found.best.prediction.step_seconds <= 1.05 * min(
        choice.prediction.step_seconds for choice in allowed
    )
    assert found.second in allowed
    assert found.second is not found.best


def by_strategy(advice):
    return {choice.prediction.strategy: choice for choice in advice.choices}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_no_accuracy_is_claimed_past_the_ranks_that_were_measured(optimizer):
    found = by_strategy(gg.advise(PROFILE, optimizer, network=network(10), world_size=5000))
    known = {name for name, choice in found.items() if choice.loss is not None}
    assert known == {"allreduce", "allreduce, fp16"}
    assert "nobody measured more ranks" in found["gossip"].evidence
    assert "was not measured" in found["allreduce, fp16"].evidence
    assert found["allreduce, fp16"].is_assumed


@pytest.mark.skipif(not RESULTS.exists(), reason="the results are not in this copy")
def test_losses_are_those_that_were_measured():
    names = {
        ("mlp", "overlap, weights"): ("sgd", "gossip"),
        ("mlp", "sync, weights"): ("sgd", "gossip-sync"),
        ("mlp", "sync, momentum"): ("sgd", "gossip-sync, momentum"),
        ("mlp-adam", "overlap, weights"): ("adam", "gossip"),
        ("mlp-adam", "sync, weights"): ("adam", "gossip-sync"),
        ("mlp-adam", "sync, GossipAdamW"): ("adam", "gossip-sync, momentum"),
    }
    compared = 0
    for row in json.loads(RESULTS.read_text())["rows"]:
        if (row["task"], row["way"]) not in names:
            continue
        optimizer, strategy = names[row["task"], row["way"]]
        ranks = row["ranks"]
        found = by_strategy(gg.advise(PROFILE, optimizer, network=network(10), world_size=ranks))
        assert found[strategy].loss == pytest.approx(max(0.0, -row["difference"]), abs=0.06)
        assert f"on {ranks} ranks" in found[strategy].evidence
        compared += 1
    assert compared >= 12


def test_a_model_is_recorded_and_stays_as_it_was():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    found = gg.advise(
        model,
        optimizer,
        [torch.randn(4, 8)],
        lambda model, x: model(x).square().mean(),
        network=network(1),
        world_size=4,
    )
    assert found.best.settings in str(found)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ranks_measure_their_network_and_agree():
    def rank_main(rank, group):
        return gg.advise(PROFILE, process_group=group).to_json()

    one, other = run_ranks(2, rank_main)
    assert one == other


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((PROFILE,), {"network": network(1)}),
        ((PROFILE,), {"world_size": 4}),
        ((PROFILE, "lion"), {"network": network(1), "world_size": 4}),
        ((PROFILE,), {"network": network(1), "world_size": 4, "most_loss": -1.0}),
        ((nn.Linear(2, 1),), {"network": network(1), "world_size": 4}),
    ],
)
def test_what_is_missing_or_unknown_is_named(arguments, options):
    with pytest.raises(ValueError, match=r"world_size|network|optimizer|most_loss|batch"):
        gg.advise(*arguments, **options)
