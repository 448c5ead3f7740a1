"""The optimizers that options name: what they train, and with which rates."""

import pytest

from gossipgrad import checkpoint
from support.alone import run_alone


def first_step(out, **options):
    """The summary, and the groups of each optimizer after a step."""
    summary = run_alone(out, max_steps=1, checkpoint_every=1, **options).summary
    saved = checkpoint.load(out / "checkpoints", rank=0, step=1)["optimizers"]
    return summary, [group for one in saved for group in one["groups"]]


@pytest.mark.parametrize("name", ["sgd", "adamw", "gossip-adamw"])
def test_options_take_effect(tmp_path, name):
    options = {"optimizer": name, "lr": 0.25, "lr_schedule": "constant", "weight_decay": 0.125}
    options["options"] = {"sgd": {"momentum": 0.5}} if name == "sgd" else {}
    _, (group,) = first_step(tmp_path, **options)
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)
    assert group.get("momentum", 0.5) == 0.5


def test_muon_and_adamw_share_the_parameters_and_the_rate(tmp_path):
    options = {"optimizer": "muon", "lr": 0.25, "lr_schedule": "constant", "weight_decay": 0.125}
    summary, groups = first_step(tmp_path, **options)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.25, 0.125)] * 2
    # Two hidden layers of 128, without biases and the head.
    (note,) = summary["notes"]
    assert f"Muon trains {128 * 64 + 128 * 128:,} of 26,122 parameters" in note


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "soap"])
def test_every_optimizer_follows_the_schedule(tmp_path, optimizer):
    """After half of the steps of a cosine half of the rate is left, after all of them nothing."""
    options = {"optimizer": optimizer, "lr": 0.02, "epochs": 2, "batch_size": 100}
    run_alone(tmp_path, checkpoint_every=15, **options)
    for step, left in ((15, 0.01), (30, 0.0)):
        saved = checkpoint.load(tmp_path / "checkpoints", rank=0, step=step)["optimizers"]
        rates = [group["lr"] for one in saved for group in one["groups"]]
        assert rates == pytest.approx([left] * len(rates))
