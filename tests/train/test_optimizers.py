"""The optimizers that options name: what they train, and with which rates."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gossipgrad import checkpoint
from gossipgrad.train import Job, LeNet, TrainConfig, check
from support.alone import run_alone
from support.jobs import name_job


def first_step(out, **options):
    """The summary, and the groups of each optimizer after a step."""
    summary = run_alone(out, max_steps=1, checkpoint_every=1, **options).summary
    saved = checkpoint.load(out / "checkpoints", rank=0, step=1)["optimizers"]
    return summary, [group for one in saved for group in one["groups"]]


@pytest.fixture
def job(monkeypatch):
    """Makes the job of a model, by its name."""

    def of(model, x=None):
        x = torch.ones(8, 2, dtype=torch.long) if x is None else x
        points = TensorDataset(x, torch.zeros(8, dtype=torch.long))
        made = Job(model=model, train=points, test=points, loss=nn.functional.cross_entropy)
        return name_job(monkeypatch, lambda: made)

    return of


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


class Tied(nn.Module):
    """An embedding that a layer shares, a hidden layer, and a head that it names."""

    def __init__(self):
        super().__init__()
        self.table, self.tied = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.tied.weight = self.table.weight
        self.hidden, self.last = nn.Linear(7, 70), nn.Linear(70, 10)
        self.head_modules = (self.last,)

    def forward(self, x):
        return self.last(self.hidden(self.tied(self.table(x).mean(1))))


def test_embeddings_and_heads_are_not_for_muon_even_where_a_layer_shares_them(tmp_path, job):
    summary, _ = first_step(tmp_path, optimizer="muon", job=job(Tied()))
    assert any(f"Muon trains {7 * 70:,} of " in note for note in summary["notes"])
    # Nor are convolutions.
    images = torch.rand(8, 1, 28, 28)
    summary, _ = first_step(tmp_path, optimizer="muon", job=job(LeNet(10), images))
    assert any("Muon trains 58,080 of 61,706" in note for note in summary["notes"])


def test_muon_with_almost_nothing_to_do_warns_and_with_nothing_is_refused(job):
    embedding, head = nn.Embedding(99, 99), nn.Linear(3, 10)
    small = nn.Sequential(embedding, nn.Flatten(), nn.Linear(198, 3), head)
    with pytest.warns(UserWarning, match=r"Muon trains 594, .* Use --optimizer adamw"):
        check(TrainConfig(optimizer="muon", job=job(small)), 2)
    none = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(6, 10))
    with pytest.raises(ValueError, match=r"muon, but the model has no .*; use optimizer adamw"):
        check(TrainConfig(optimizer="muon", job=job(none)), 2)


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "soap"])
def test_every_optimizer_follows_the_schedule(tmp_path, optimizer):
    """After half of the steps of a cosine half of the rate is left, after all of them nothing."""
    options = {"optimizer": optimizer, "lr": 0.02, "epochs": 2, "batch_size": 100}
    run_alone(tmp_path, checkpoint_every=15, **options)
    for step, left in ((15, 0.01), (30, 0.0)):
        saved = checkpoint.load(tmp_path / "checkpoints", rank=0, step=step)["optimizers"]
        rates = [group["lr"] for one in saved for group in one["groups"]]
        assert rates == pytest.approx([left] * len(rates))
