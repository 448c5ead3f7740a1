import dataclasses
import json

import pytest

from gossipgrad.train import GossipConfig, TrainConfig

VERSIONS = {"python": "3"}


def resolved(tmp_path, **options):
    return TrainConfig(**options).resolved(nproc=2, out=tmp_path)


def test_file_gives_back_the_run_without_its_folder(tmp_path):
    config = resolved(
        tmp_path,
        strategy="allreduce",
        data_dir=tmp_path / "data",
        gossip=GossipConfig(topology="matching", every=3, average_every="log_p"),
    )
    config.write(tmp_path / "config.json", VERSIONS)
    read = TrainConfig.from_file(tmp_path / "config.json")
    assert read == dataclasses.replace(config, out=None)


def test_file_states_what_the_learning_rate_does(tmp_path):
    resolved(tmp_path).write(tmp_path / "config.json", VERSIONS)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["lr"] == 0.1
    assert content["lr_rule"] == "lr * (1 + cos(pi * step / steps)) / 2, every step"
    assert content["versions"] == VERSIONS


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adamw", 1e-3)])
def test_learning_rate_follows_the_optimizer(tmp_path, optimizer, lr):
    assert resolved(tmp_path, optimizer=optimizer).lr == lr
    assert resolved(tmp_path, optimizer=optimizer, lr=7.0).lr == 7.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0, but must be at least 1"),
        ({"batch_size": -1}, "batch_size is -1, but must be at least 1"),
        ({"nproc": 0}, "nproc is 0, but must be at least 1"),
        ({"lr": 0.0}, "lr is 0.0, but must be above 0"),
        ({"lr": float("nan")}, "lr is nan, but must be above 0"),
        ({"lr": float("inf")}, "lr is inf, but must be above 0 and finite"),
        ({"weight_decay": float("inf")}, "weight_decay is inf, but must be finite"),
        ({"weight_decay": float("nan")}, "weight_decay is nan, but must be at least 0"),
        ({"momentum": 1.0}, "momentum is 1.0, but must be at least 0 and below 1"),
        ({"trace": -1}, "trace is -1, but must be at least 0"),
    ],
)
def test_refuses_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"strategy": "gosip"}', "strategy is 'gosip', but must be one of gossip, allreduce, lo"),
        ('{"gossip": {"mode": 3}}', "mode is 3, but must be one of overlap, sync, lagged"),
        ('{"gossip": {"every": 0}}', "every is 0, but must be at least 1"),
        ('{"gossip": {"average_every": 0}}', "average_every is 0, but must be at least 1"),
        ('{"epoch": 3}', "option 'epoch' is not known to TrainConfig"),
        ("[]", "holds no options"),
        ("{", "is not JSON"),
    ],
)
def test_refuses_a_broken_file_and_names_it(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        TrainConfig.from_file(path)


def test_missing_file_names_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*x\.json.*name the config\.json of a run"):
        TrainConfig.from_file(tmp_path / "x.json")


def test_warns_of_options_without_effect():
    config = TrainConfig(strategy="local", gossip=GossipConfig(every=4))
    with pytest.warns(UserWarning, match="every=4 is not used: strategy is local"):
        config.warn_of_unused()
    with pytest.warns(UserWarning, match="momentum=0.5 is not used: optimizer is adamw"):
        TrainConfig(optimizer="adamw", momentum=0.5).warn_of_unused()
    TrainConfig(gossip=GossipConfig(every=4)).warn_of_unused()
