"""A strategy of one's own: one class and one line of the registry are all that it takes."""

import dataclasses
import warnings

import pytest
import torch

from gossipgrad import cli
from gossipgrad.train import STRATEGIES, GossipConfig, TrainConfig, check, config_of_run
from gossipgrad.train.strategies import Strategy
from support.alone import resume_alone, run_alone
from support.commands import given


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """How the toy decays weights."""

    every: int = 1
    """Steps between two decays."""
    decay: float = 0.5
    """What weights are multiplied by."""
    is_loud: bool = False
    """Whether it tells of itself."""


class Toy(Strategy):
    """Replicas of strategy local that decay."""

    name, help, bytes_are = "toy", "decays weights", "none"
    section, options_type = "toy", ToyConfig
    may_change_on_resume = frozenset({"is_loud"})
    communicates = needs_every_rank = False

    def check(self, options, setting):
        if options.every > setting.total_steps:
            raise ValueError(f"every is {options.every}, but there are {setting.total_steps} steps")

    def unused(self, options, setting):
        return {"every": "decay is 1"} if options.decay == 1 else {}

    def build(self, replica, setting, options):
        @torch.no_grad()
        def decay(model, inputs):
            for parameter in model.parameters() if model.training else ():
                parameter.mul_(options.decay)

        replica.model.register_forward_pre_hook(decay)
        running = STRATEGIES["local"].build(replica, setting, None)
        running.notes += ["it decays"] * options.is_loud
        return running


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "toy", Toy())


def train(out, **options):
    usual = {"strategy": "toy", "checkpoint_every": 10, "lr_schedule": "constant", "epochs": 2}
    return run_alone(out, **usual, options={"toy": options}).summary


def test_options_of_one_name_stand_side_by_side(capsys):
    config = given("--toy.every", "3", "--gossip.every=2", "--decay", "0.25", "--is-loud")
    assert config.options["toy"] == ToyConfig(every=3, decay=0.25, is_loud=True)
    assert config.options["gossip"] == GossipConfig(every=2)
    assert given("--no-is-loud").options["toy"] == ToyConfig()
    with pytest.raises(SystemExit):
        cli.main(["train", "--help-all"])
    assert "--toy.decay FLOAT" in capsys.readouterr().out


def test_a_short_spelling_that_is_of_two_strategies_is_the_chosen_ones_or_refused(capsys):
    assert given("--every", "3").options["gossip"] == GossipConfig(every=3)
    assert given("--every=3", "--strategy=toy").options["toy"] == ToyConfig(every=3)
    assert given("--every", "3", "--strategy", "local") is None
    assert "--gossip.every or --toy.every" in capsys.readouterr().err


def test_it_is_checked_before_the_start():
    with pytest.raises(ValueError, match="every is 999, but there are"):
        check(TrainConfig(strategy="toy", epochs=1, options={"toy": {"every": 999}}), 2)
    options = {"toy": ToyConfig(every=3, decay=1.0)}
    with pytest.warns(UserWarning, match="every=3 is not used: decay is 1"):
        TrainConfig(strategy="toy", options=options).warn_of_unused()
    with pytest.warns(UserWarning, match="every=3 is not used: strategy is gossip"):
        TrainConfig(options={"toy": ToyConfig(every=3)}).warn_of_unused()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainConfig(strategy="toy", options={"toy": ToyConfig(every=3)}).warn_of_unused()


def test_it_trains_and_is_resumed_with_what_may_change(tmp_path):
    assert train(tmp_path, decay=0.0)["accuracy"] < 0.3
    found = train(tmp_path, decay=1.0)
    assert found["accuracy"] > 0.8
    assert found["notes"] == []
    with pytest.raises(ValueError, match=r"toy\.decay is 0\.9, but the run in .* has toy\.decay=1"):
        resume_alone(tmp_path, options={"toy": ToyConfig(decay=0.9)})
    assert config_of_run(tmp_path).options["toy"] == ToyConfig(decay=1.0)
    loud = {"toy": ToyConfig(decay=1.0, is_loud=True)}
    resumed = resume_alone(tmp_path, epochs=3, options=loud).summary
    assert resumed["steps"] == 3 * found["steps"] // 2
    assert "rank 0: it decays" in resumed["notes"]
