import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from gossipgrad.train import MLP, LeNet, TrainConfig, check
from gossipgrad.train._optimizers import (
    make_optimizers,
    make_schedulers,
    muon_parameters,
    muon_share,
    notes_on_muon,
)


def made(tmp_path, model, **options):
    config = TrainConfig(**options).resolved(nproc=4, out=tmp_path)
    return config, make_optimizers(config, model)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_options_take_effect(tmp_path, name):
    options = {"optimizer": name, "lr": 0.25, "weight_decay": 0.125}
    options["options"] = {"sgd": {"momentum": 0.5}}
    _, (optimizer,) = made(tmp_path, MLP(2, 2), **options)
    (group,) = optimizer.param_groups
    assert len(group["params"]) == 6
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)
    assert group.get("momentum", 0.5) == 0.5


def test_muon_and_adamw_share_the_parameters_and_the_rate(tmp_path):
    model = LeNet(10)
    options = {"optimizer": "muon", "lr": 0.25, "lr_rule": "sqrt", "weight_decay": 0.125}
    _, (muon, adamw) = made(tmp_path, model, **options)
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    shapes = [tuple(p.shape) for p in muon.param_groups[0]["params"]]
    assert shapes == [(120, 400), (84, 120)]  # not the convolutions, not the head
    together = [p for o in (muon, adamw) for p in o.param_groups[0]["params"]]
    assert len(together) == len({id(p) for p in together}) == len(list(model.parameters()))
    for optimizer in (muon, adamw):
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"]) == (0.5, 0.125)
    assert muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_embeddings_are_not_for_muon_even_where_a_layer_shares_them():
    model = nn.ModuleDict({"table": nn.Embedding(7, 4), "tied": nn.Linear(4, 7, bias=False)})
    model["tied"].weight = model["table"].weight
    model["hidden"] = nn.Linear(4, 5)
    model["head"] = nn.Linear(5, 5)
    assert muon_parameters(model) == [model["hidden"].weight]


def shapes_for_muon(model):
    return [tuple(parameter.shape) for parameter in muon_parameters(model)]


def test_heads_are_what_the_model_says_whatever_their_size():
    assert shapes_for_muon(MLP(64, 128)) == [(128, 64), (128, 128)]
    assert shapes_for_muon(LeNet(84)) == [(120, 400), (84, 120)]


def test_says_what_muon_trains_and_what_is_left_to_adamw(tmp_path):
    _, optimizers = made(tmp_path, LeNet(10), optimizer="muon")
    assert muon_share(optimizers) == (58080, 61706)
    assert notes_on_muon(optimizers) == [
        "Muon trains 58,080 of 61,706 parameters, and AdamW the others"
    ]
    assert notes_on_muon(made(tmp_path, LeNet(10))[1]) == []


def test_muon_with_almost_nothing_to_do_warns(monkeypatch):
    def build(name, info):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 2, bias=False), nn.Embedding(99, 99), nn.Linear(2, 10)
        )

    monkeypatch.setattr("gossipgrad.train._tasks.build_model", build)
    warned = r"of the 9,959 parameters of the model Muon trains 128, .* Use --optimizer adamw"
    with pytest.warns(UserWarning, match=warned):
        check(TrainConfig(optimizer="muon"), 2)


def test_muon_with_nothing_to_do_is_refused_before_the_start(tmp_path, monkeypatch):
    headed = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.LazyLinear(10))
    headed(torch.ones(2, 1, 8, 8))
    monkeypatch.setattr("gossipgrad.train._tasks.build_model", lambda name, info: headed)
    with pytest.raises(ValueError, match=r"muon, but the model has no .*; use optimizer adamw"):
        check(TrainConfig(optimizer="muon"), 2)


def test_every_optimizer_follows_the_schedule(tmp_path):
    config, optimizers = made(tmp_path, MLP(2, 2), optimizer="muon", lr=2.0, epochs=2)
    schedulers = make_schedulers(config, optimizers, steps_per_epoch=2)
    found = []
    for _ in range(4):
        found.append([o.param_groups[0]["lr"] for o in optimizers])
        for step in (*optimizers, *schedulers):
            step.step()
    for rates in zip(*found, strict=True):
        assert rates == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
