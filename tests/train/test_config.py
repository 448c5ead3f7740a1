import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from gossipgrad.train import AllReduceConfig, GossipConfig, SparseConfig, TrainConfig, check


def resolved(tmp_path, **options):
    return TrainConfig(**options).resolved(nproc=2, out=tmp_path)


def test_file_gives_back_the_run_without_its_folder(tmp_path):
    config = resolved(
        tmp_path,
        strategy="allreduce",
        data_dir=tmp_path / "data",
        options={
            "gossip": GossipConfig(topology="matching", every=3, average_every="log_p"),
            "sparse": SparseConfig(plan="single", density=0.25, density_warmup_steps=3),
        },
    )
    config.write(tmp_path / "config.json")
    read = TrainConfig.from_file(tmp_path / "config.json")
    assert read == dataclasses.replace(config, out=None)


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adamw", 1e-3), ("muon", 1e-3)])
def test_learning_rate_follows_the_optimizer(tmp_path, optimizer, lr):
    assert resolved(tmp_path, optimizer=optimizer).lr == lr
    assert resolved(tmp_path, optimizer=optimizer, lr=7.0).lr == 7.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("epochs", {"epochs": 0}),
        ("lr", {"lr": 0.0}),
        ("weight_decay", {"weight_decay": float("nan")}),
        ("momentum", {"options": {"sgd": {"momentum": 1.0}}}),
        ("warmup_epochs", {"warmup_epochs": 5, "epochs": 5}),
        ("lr_step_epochs", {"lr_schedule": "step", "lr_step_epochs": 2, "warmup_epochs": 4}),
        ("lr_gamma", {"lr_gamma": 1.0}),
        ("max_staleness", {"options": {"gossip": {"max_staleness": 16}}}),
        ("patience_seconds", {"options": {"gossip": {"patience_seconds": math.inf}}}),
        ("refresh_delay", {"options": {"second_order": {"refresh_delay": 11}}}),
        ("compress", {"options": {"gossip": {"compress": "a tenth"}}}),
        *((name, {name: 0}) for name in ("accumulate", "max_steps", "evaluate_every")),
        ("clip_norm", {"clip_norm": 0.0}),
        ("wandb", {"wandb": ""}),
        ("apoptosis", {"apoptosis": 2.0}),
        ("apoptosis", {"apoptosis": 0.05, "optimizer": "soap"}),
    ],
)
def test_refuses_what_cannot_be(name, options):
    with pytest.raises(ValueError, match=rf"{name}\b"):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"strategy": "gosip"}', "strategy is 'gosip', but must be one of gossip, allreduce, sp"),
        ('{"gossip": {"average_every": "foo"}}', "average_every is 'foo', but must be log_p or"),
        ('{"epoch": 3}', "option 'epoch' is not known to TrainConfig"),
        ('{"epochs": 2.5}', "epochs is 2.5, but must be a whole number"),
        ('{"lr": "0.1"}', "lr is '0.1', but must be a number or None"),
        ('{"gossip": 3}', "gossip is 3, but must hold options by their names"),
        ("[]", "holds no options"),
        ("{", "is not JSON"),
    ],
)
def test_refuses_a_broken_file_and_names_it(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        TrainConfig.from_file(path)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"epochs": True}, "epochs is True, but must be a whole number"),
        ({"quiet": "no"}, "quiet is 'no', but must be true or false"),
        ({"out": 3}, "out is 3, but must be a path or None"),
        ({"options": {"gosip": {}}}, "options has 'gosip', but there is no such section"),
        ({"options": {"gossip": {"evry": 2}}}, "option 'evry' is not known to GossipConfig"),
        ({"options": {"sgd": {"momentum": False}}}, "momentum is False, but must be a number"),
        ({"options": 3}, "options is 3, but must be a dict"),
    ],
    ids=str,
)
def test_refuses_what_an_option_does_not_take(build, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**build)


@pytest.mark.usefixtures("unchecked_types")
def test_numbers_of_numpy_and_folders_as_text_are_stored_plainly(tmp_path):
    config = TrainConfig(
        seed=np.int64(3),
        epochs=np.uint8(2),
        lr=np.float32(0.5),
        nproc=2,
        out="runs/x",
        data_dir="sets",
        options={
            "gossip": GossipConfig(
                every=np.int64(2), average_every=np.int64(4), patience_seconds=3
            ),
            "sgd": {"momentum": np.float64(0.5)},
        },
    )
    assert (config.out, config.data_dir) == (Path("runs/x"), Path("sets"))
    config.write(tmp_path / "config.json")
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["seed"], told["epochs"], told["lr"]) == (3, 2, 0.5)
    assert told["sgd"] == {"momentum": 0.5}
    assert (told["gossip"]["every"], told["gossip"]["average_every"]) == (2, 4)


@pytest.mark.parametrize("script", ["", " ; "])
def test_a_script_without_faults_is_none(script):
    assert GossipConfig(faults=script).faults is None
    assert AllReduceConfig(faults=script).faults is None


@pytest.mark.parametrize("script", ["drop rank=0 round=1", "kill rank=0 round=1"])
def test_all_reduce_takes_delays_alone(script):
    with pytest.raises(ValueError, match="--strategy gossip"):
        AllReduceConfig(faults=f"delay rank=1 round=0 seconds=0.5; {script}")


def test_missing_file_names_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*x\.json.*name the config\.json of a run"):
        TrainConfig.from_file(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "local", "options": {"gossip": {"every": 4}}}, "every=4 .*strategy is local"),
        (
            {"optimizer": "adamw", "options": {"sgd": {"momentum": 0.5}}},
            "momentum=0.5 is not used",
        ),
        (
            {"strategy": "sparse", "options": {"sparse": {"plan": "wfbp", "density": 0.02}}},
            "density=0.02 is not us",
        ),
        ({"strategy": "local", "lr_rule": "sqrt"}, "lr_rule=sqrt is not used: strategy is local"),
        *(
            ({"strategy": "sparse", **options}, "momentum_correction=True is not used")
            for options in (
                {"options": {"sgd": {"momentum": 0.0}, "sparse": {"momentum_correction": True}}},
                {"options": {"sparse": {"momentum_correction": True}}, "optimizer": "adamw"},
            )
        ),
        ({"lr_step_epochs": 3}, "lr_step_epochs=3 is not used: lr_schedule is cosine"),
        (
            {"options": {"sgd": {"momentum": 0.0}, "gossip": {"payload": "weights+state"}}},
            "payload=wei",
        ),
        ({"options": {"gossip": {"max_staleness": 3}}}, "max_staleness=3 .* mode is overlap"),
        ({"lr_schedule": "step", "lr_step_epochs": 20}, "the rate never drops: lr_step_epochs is"),
    ],
)
def test_warns_of_options_without_effect(options, message):
    with pytest.warns(UserWarning, match=message):
        TrainConfig(**options).warn_of_unused()


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "sparse", "options": {"sparse": {"density": 0.02}}},
        {"options": {"gossip": {"every": 4, "payload": "weights+state"}}},
        {"lr_schedule": "step", "lr_step_epochs": 3, "lr_gamma": 0.5, "lr_rule": "sqrt"},
    ],
)
def test_is_silent_of_options_that_have_an_effect(options):
    TrainConfig(**options).warn_of_unused()


def test_steps_of_the_rate_are_thirds_of_the_run_unless_given(tmp_path):
    assert resolved(tmp_path, lr_schedule="step", epochs=20).lr_step_epochs == 7
    assert resolved(tmp_path, lr_schedule="step", lr_step_epochs=4).lr_step_epochs == 4
    assert resolved(tmp_path, lr_schedule="cosine").lr_step_epochs is None


def test_a_secret_that_is_no_good_is_told_before_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"cannot read GOSSIPGRAD_SECRET_FILE=.*missing"):
        check(TrainConfig(), 2)


def test_config_json_names_what_is_not_used(tmp_path):
    resolved(tmp_path, strategy="local").write(tmp_path / "config.json")
    unused = json.loads((tmp_path / "config.json").read_text())["unused"]
    assert {"lr_rule", "gossip.every", "sparse.density"} <= {*unused}
    assert not {"lr", "sgd.momentum", "batch_size"} & {*unused}
