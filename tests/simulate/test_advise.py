"""Advice: the fastest that loses little, DistributedDataParallel where that is as fast."""

import copy

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import Network, Workers
from support.ranks import run_ranks

PROFILE = Profile.load("vgg16")


def network(gigabits):
    return Network(
        exchange=AffineCost.from_rate(rate_bits_per_second=1e9 * gigabits, latency_seconds=5e-5)
    )


def test_on_fast_links_data_parallel_is_recommended_and_on_slow_ones_not():
    fast = gg.advise(PROFILE, network=network(1000), world_size=2, workers=Workers())
    slow = gg.advise(PROFILE, network=network(1), world_size=16)
    assert "DistributedDataParallel" in fast.best.settings
    assert "gg." in slow.best.settings
    assert slow.best.prediction.step_seconds < 0.5 * next(
        choice.prediction.step_seconds
        for choice in slow.choices
        if choice.settings == "DistributedDataParallel"
    )


@pytest.mark.parametrize("most_loss", [0.0, 2.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
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


def test_what_was_not_measured_is_not_called_measured():
    told = str(gg.advise(PROFILE, network=network(2), world_size=5000))
    assert "not measured: 5,000 ranks" in told
    assert "not measured" not in str(gg.advise(PROFILE, network=network(2), world_size=100))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for optimizer, known in (
        (torch.optim.Adafactor(model.parameters()), False),
        (torch.optim.AdamW(model.parameters()), True),
    ):
        found = gg.advise(
            model,
            optimizer,
            [torch.randn(4, 8)],
            lambda model, x: model(x).mean(),
            network=network(2),
            world_size=8,
        )
        assert ("not measured" in str(found)) is not known


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
