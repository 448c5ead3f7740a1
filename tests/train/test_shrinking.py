"""Runs whose models shrink, by strategy."""

import json

import pytest
from safetensors.torch import load_file

import gossipgrad as gg
from gossipgrad import data
from gossipgrad.train import STRATEGIES, build_model, run
from support.launched import config

SLOW = [name for name, one in STRATEGIES.items() if one.can_shrink and name != "gossip"]


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy", ["gossip", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_run_ends_with_a_narrower_model(tmp_path, strategy):
    outcome = run(config(tmp_path, strategy=strategy, nproc=2, epochs=3, apoptosis=0.05))
    assert outcome.exit_code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy"] > 0.85
    assert summary["parameters"] < 24_000
    assert "26,122 parameters became" in " ".join(summary["notes"])
    steps = (tmp_path / "metrics-rank0.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in (steps[0], steps[-2]))
    assert sum(last["widths"].values()) < sum(first["widths"].values()) == 256
    assert "Width by layer" in (tmp_path / "report.html").read_text()
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == summary["parameters"]
    gg.rebuild(build_model("mlp", data.info("digits")), weights)
