"""Decentralized Muon as a strategy: what it refuses, what it trains with, and a run of two."""

import pytest

from gossipgrad.train import TrainConfig, check, run
from support.launched import config


@pytest.mark.parametrize(
    ("optimizer", "options", "says"),
    [
        ("sgd", {}, "--optimizer muon"),
        ("muon", {"backbone": "ed"}, "semi-atc-gt"),
        ("muon", {"backbone": "ed", "topology": "ring", "mode": "overlap"}, "sync"),
        ("muon", {"backbone": "dgd"}, "backbone"),
        ("muon", {"patience_seconds": 0.0}, "patience_seconds"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(optimizer, options, says):
    with pytest.raises(ValueError, match=says):
        check(TrainConfig(strategy="suda", optimizer=optimizer, options={"suda": options}), 4)


@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"backbone": "ed", "topology": "ring"}, marks=pytest.mark.slow)],
)
def test_two_ranks_train_hidden_layers_by_muon_and_heads_by_adamw(tmp_path, options):
    how = {"strategy": "suda", "optimizer": "muon", "options": {"suda": options}, "trace": 0}
    summary = run(config(tmp_path, nproc=2, epochs=2, checkpoint_every=20, **how)).summary
    assert summary["accuracy"] > 0.85
    assert summary["model_is_consensus"]
    assert summary["bytes_sent_per_step"] > 0
    assert any("Muon trains 24,576 of 26,122" in note for note in summary["notes"])
