"""Decentralized Muon as a strategy: what it refuses, what it trains with, and a run of two."""

from pathlib import Path

import pytest
import torch

import gossipgrad as gg
from gossipgrad.train import MLP, STRATEGIES, TrainConfig
from gossipgrad.train._optimizers import make_optimizers
from support.ranks import run_ranks
from support.replicas import network
from support.strategies import build, loss_of


def config_of(optimizer="muon", **options):
    config = TrainConfig(strategy="suda", optimizer=optimizer, options={"suda": options})
    return config, config.setting(4, total_steps=10)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "sgd"}, "--optimizer muon"),
        ({"backbone": "ed"}, "semi-atc-gt"),
        ({"backbone": "ed", "topology": "ring", "mode": "overlap"}, "sync"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(options, says):
    config, setting = config_of(**options)
    with pytest.raises(ValueError, match=says):
        config.traits.check(config.strategy_options, setting)


def test_options_are_checked_as_they_are_made():
    for options in ({"backbone": "dgd"}, {"deadline_seconds": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            config_of(**options)
    config, setting = config_of(backbone="ed", topology="ring")
    config.traits.check(config.strategy_options, setting)
    assert STRATEGIES["suda"].describe(config.strategy_options)["backbone"] == "ed"


def test_heads_that_the_model_names_are_adamws():
    config, _ = config_of()
    (optimizer,) = make_optimizers(config.resolved(nproc=4, out=Path()), MLP(8, 16))
    muon, adamw = optimizer.param_groups
    assert (muon["role"], adamw["role"]) == ("muon", "adamw")
    assert len(muon["params"]) == 2
    assert muon["lr"] == adamw["lr"] == 1e-3


def test_two_ranks_train_and_count():
    def rank_main(rank, group):
        model = network()
        strategy = build(
            config_of()[0], model, gg.Muon(model), rank=rank, world_size=2, group=group
        )
        for step in range(6):
            strategy.backward(loss_of(model, rank, step))
            for optimizer in strategy.session.replica.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        label, traffic = strategy.checkpoint_label(6), strategy.traffic()
        distance = strategy.session.consensus_distance()
        strategy.close()
        return label, traffic, distance, torch.cat([p.flatten() for p in model.parameters()])

    for label, traffic, distance, weights in run_ranks(2, rank_main):
        assert label == 6
        assert traffic.bytes_sent > 0
        assert distance < 1e-3
        assert torch.isfinite(weights).all()
