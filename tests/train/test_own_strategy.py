"""A strategy of one's own: one class and one line of the registry are all that it takes."""

import dataclasses
import warnings

import pytest
import torch

from gossipgrad import cli
from gossipgrad.cli._train import parse, parse_join
from gossipgrad.train import STRATEGIES, GossipConfig, TrainConfig, check, config_of_run
from gossipgrad.train._folder import claim
from gossipgrad.train._state import reopen
from gossipgrad.train.strategies import Strategy
from gossipgrad.train.strategies._local import Local
from support.alone import train_alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """How the toy decays weights."""

    every: int = 1
    """Steps between two decays."""
    decay: float = 0.5
    """What weights are multiplied by."""
    is_loud: bool = False
    """Whether it tells of itself."""


class Decaying(Local):
    """Multiplies the weights of a replica by a number every so many steps."""

    def __init__(self, model, options):
        super().__init__(model)
        self._options, self._begun = options, 0
        self.notes += ["it decays"] * options.is_loud

    def forward(self, x):
        self._begun += 1
        if self._begun % self._options.every == 0:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(self._options.decay)
        return super().forward(x)


class Toy(Strategy):
    """Replicas that decay, by an optimizer that comes along."""

    name, help, bytes_are = "toy", "decays weights", "none"
    section, options_type = "toy", ToyConfig
    may_change_on_resume = frozenset({"is_loud"})
    communicates = needs_every_rank = False

    def check(self, options, setting):
        if options.every > setting.total_steps:
            raise ValueError(f"every is {options.every}, but there are {setting.total_steps} steps")

    def unused(self, options, setting):
        return {"every": "decay is 1"} if options.decay == 1 else {}

    def make_optimizers(self, model, options, *, lr, weight_decay):
        return [torch.optim.Adagrad(model.parameters(), lr=lr)]

    def build(self, replica, setting, options):
        assert isinstance(replica.optimizers[0], torch.optim.Adagrad)
        return Decaying(replica.model, options)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "toy", Toy())


@pytest.fixture
def train(tmp_path):
    """Trains one rank as a command line says, in this process, or resumes it."""

    def train(*arguments, resumes=False):
        if resumes:
            config, run_dir = reopen(parse(["--resume", str(tmp_path / "run"), *arguments]))
        else:
            run_dir = claim(tmp_path / "run", name="", overwrite=True)
            chosen = ["--strategy", "toy", "--checkpoint-every", "10", "--lr-schedule", "constant"]
            config = parse([*chosen, *arguments, "--run-name", "it"])
        config = config.resolved(nproc=1, out=run_dir.path)
        config.write(run_dir.config)
        return train_alone(config, run_dir)

    return train


def test_options_of_one_name_stand_side_by_side(capsys):
    config = parse(["--toy.every", "3", "--gossip.every=2", "--decay", "0.25", "--is-loud"])
    assert config.options["toy"] == ToyConfig(every=3, decay=0.25, is_loud=True)
    assert config.options["gossip"] == GossipConfig(every=2)
    assert parse(["--no-is-loud"]).options["toy"] == ToyConfig()
    with pytest.raises(SystemExit):
        cli.main(["train", "--help-all"])
    assert "--toy.decay FLOAT" in capsys.readouterr().out


def test_a_short_spelling_that_is_of_two_strategies_is_the_chosen_ones_or_refused():
    assert parse(["--every", "3"]).options["gossip"] == GossipConfig(every=3)
    assert parse(["--every=3", "--strategy=toy"]).options["toy"] == ToyConfig(every=3)
    with pytest.raises(ValueError, match=r"--gossip\.every or --toy\.every"):
        parse(["--every", "3", "--strategy", "local"])
    with pytest.raises(ValueError, match=r"^--toy\.every is not for --join"):
        parse_join(["--join", "run", "--toy.every=3"])


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


def test_it_trains_and_goes_on_with_what_may_change(train, tmp_path):
    assert train("--epochs", "2", "--decay", "0").accuracy < 0.3
    found = train("--epochs", "2", "--decay", "1")
    assert found.accuracy > 0.8
    assert "it decays" not in found.notes
    with pytest.raises(ValueError, match=r"toy\.decay is 0\.9, but the run in .* has toy\.decay=1"):
        train("--decay", "0.9", resumes=True)
    assert config_of_run(tmp_path / "run").options["toy"] == ToyConfig(decay=1.0)
    resumed = train("--is-loud", "--epochs", "3", resumes=True)
    assert resumed.steps == 3 * found.steps // 2
    assert "it decays" in resumed.notes
