"""What people look for first in a training command; two processes where ranks make a difference."""

import json

import pytest
import torch
from safetensors.torch import load_file

from gossipgrad.train import run
from support.alone import resume_alone, run_alone
from support.launched import config

PLAIN = {
    "options": {"sgd": {"momentum": 0.0}},
    "weight_decay": 0.0,
    "lr_schedule": "constant",
    "trace": 0,
}


def weights(folder, **options):
    assert run_alone(folder, **PLAIN | options).exit_code == 0
    return load_file(folder / "model.safetensors")


def weights_of_two(folder, **options):
    assert run(config(folder, nproc=2, **PLAIN | options)).exit_code == 0
    return load_file(folder / "model.safetensors")


def distance(one, other):
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


def events(folder, kind="epoch"):
    lines = (folder / "metrics-rank0.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy",
    ["gossip", *(pytest.param(s, marks=pytest.mark.slow) for s in ("allreduce", "sparse"))],
)
def test_accumulated_passes_make_the_step_of_the_whole_batch(tmp_path, strategy):
    options = {"strategy": strategy, "max_steps": 12}
    whole = weights_of_two(tmp_path / "whole", batch_size=24, **options)
    parts = weights_of_two(tmp_path / "parts", batch_size=8, accumulate=3, **options)
    other = weights_of_two(tmp_path / "other", batch_size=8, **options)
    assert distance(whole, parts) < 1e-3 * distance(whole, other)


def test_clipping_bounds_what_a_step_changes(tmp_path):
    options = {"clip_norm": 0.01, "lr": 0.1}
    first = weights(tmp_path / "first", max_steps=1, **options)
    later = weights(tmp_path / "later", max_steps=6, **options)
    assert 0 < distance(first, later) < 5 * 0.1 * 0.01 * 1.01


def test_autocast_trains_in_bfloat16_and_keeps_float32(tmp_path):
    full = weights(tmp_path / "full", max_steps=10)
    half = weights(tmp_path / "half", max_steps=10, amp="bfloat16")
    assert {tensor.dtype for tensor in half.values()} == {torch.float32}
    assert 0 < distance(full, half) < 0.1 * sum(float(t.norm()) for t in full.values())


@pytest.mark.process
def test_a_run_ends_after_max_steps_evaluates_within_epochs_and_keeps_the_best(tmp_path):
    options = {"max_steps": 60, "evaluate_every": 20, "keep_best": "highest", "lr": 0.3}
    outcome = run(config(tmp_path, nproc=2, epochs=9, **PLAIN | options))
    summary, found = outcome.summary, events(tmp_path)
    assert summary["steps_per_rank"] == [60, 60]
    assert not summary["interrupted"]
    assert [event["step"] for event in found] == [20, 40, 45, 60]
    assert summary["best"]["accuracy"] == max(event["accuracy"] for event in found)
    best, last = (load_file(tmp_path / f"{name}.safetensors") for name in ("best", "model"))
    assert (distance(best, last) == 0) == (summary["best"]["step"] == 60)


def test_keep_best_lowest_keeps_the_lowest(tmp_path):
    run_alone(tmp_path, epochs=2, keep_best="lowest", **PLAIN)
    lowest = min(event["accuracy"] for event in events(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["accuracy"] == lowest


def test_a_run_extended_by_max_steps_is_the_same_as_a_whole_one(tmp_path):
    options = {"accumulate": 2, "clip_norm": 0.5, "evaluate_every": 7, "keep_best": "highest"}
    options |= {"checkpoint_every": 10}
    whole = weights(tmp_path / "whole", max_steps=30, **options)
    weights(tmp_path / "parts", max_steps=15, **options)
    resumed = resume_alone(tmp_path / "parts", max_steps=30)
    assert distance(whole, load_file(tmp_path / "parts" / "model.safetensors")) == 0
    assert (
        resumed.summary["best"]
        == json.loads((tmp_path / "whole" / "summary.json").read_text())["best"]
    )
