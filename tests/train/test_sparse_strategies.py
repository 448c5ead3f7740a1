"""Sparse gradients as a strategy of the command: warm-ups, momentum, dense plans."""

import dataclasses
import itertools

import pytest
from safetensors.torch import load_file

from gossipgrad import checkpoint
from gossipgrad.train import SparseConfig, config_of_run, run
from support.alone import events
from support.launched import config

pytestmark = pytest.mark.process


def train(out, *, momentum=0.9, strategy="sparse", **sparse):
    """The summary of eight steps."""
    options = {"sparse": SparseConfig(**sparse), "sgd": {"momentum": momentum}}
    how = {"nproc": 2, "max_steps": 8, "checkpoint_every": 4, "trace": 0, "epochs": 1}
    return run(config(out, strategy=strategy, options=options, **how)).summary


@pytest.mark.filterwarnings("ignore:density=1.0 is not used")
def test_with_nothing_left_out_every_plan_is_an_all_reduce(tmp_path):
    train(tmp_path / "dense", strategy="allreduce")
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    for plan in ("wfbp", "single", "optimal"):
        train(tmp_path / plan, plan=plan, density=1.0)
        found = load_file(tmp_path / plan / "model.safetensors")
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < 1e-6, (plan, name)


def test_the_density_falls_over_the_first_steps_as_it_is_told(tmp_path):
    for stage_steps, densities in (
        (0, [0.001] * 8),
        (2, [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.004, 0.004]),
    ):
        train(tmp_path, plan="single", density=0.001, density_warmup_steps=stage_steps)
        sent = [0, *(event["bytes_sent"] for event in events(tmp_path))]
        # A value and its index, or a bit for each coordinate.
        expected = [26_122 * min(8 * each, 4 * each + 1 / 8) for each in densities]
        found = [after - before for before, after in itertools.pairwise(sent)]
        assert found == pytest.approx(expected, rel=0.3)


@pytest.mark.filterwarnings("ignore:the checkpoint of step", "ignore:max_steps is 40")
def test_momentum_is_applied_before_selection_or_after_and_by_the_optimizer_of_one_rank(tmp_path):
    def momentum(name):
        state = checkpoint.load(tmp_path / name / "checkpoints", rank=0)
        return state["optimizers"][0]["groups"][0]["momentum"]

    models = []
    for is_corrected in (True, False):
        name = str(is_corrected)
        train(tmp_path / name, plan="single", density=0.1, momentum_correction=is_corrected)
        assert momentum(name) == (0.0 if is_corrected else 0.9)
        models.append(load_file(tmp_path / name / "model.safetensors"))
    assert any((models[0][name] != models[1][name]).any() for name in models[0])
    path = tmp_path / "True"
    run(dataclasses.replace(config_of_run(path), nproc=1, max_steps=40))
    assert momentum("True") == 0.9
