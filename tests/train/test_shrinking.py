"""Runs whose models shrink, by strategy."""

import json

import pytest
from safetensors.torch import load_file

import gossipgrad as gg
from gossipgrad import data
from gossipgrad.train import STRATEGIES, build_model, run
from support.alone import events, resume_alone, run_alone, stopping_after
from support.launched import config

SLOW = [name for name in STRATEGIES if name != "gossip"]


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy", ["gossip", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_run_ends_with_a_narrower_model(tmp_path, strategy):
    kind = {"optimizer": "muon"} if strategy == "suda" else {}
    outcome = run(config(tmp_path, strategy=strategy, nproc=2, epochs=3, apoptosis=0.05, **kind))
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


def widths_by_step(folder):
    return {event["step"]: event["widths"] for event in events(folder)}


def test_a_run_that_shrinks_is_resumed_as_narrow_as_it_was(tmp_path):
    options = {"apoptosis": 0.05, "epochs": 3, "log_every": 1, "checkpoint_every": 20}
    with stopping_after(40):
        run_alone(tmp_path, batch_size=64, **options)
    before = widths_by_step(tmp_path)
    last = max(before)
    assert sum(before[last].values()) < sum(before[1].values())
    resumed = resume_alone(tmp_path).summary
    after = widths_by_step(tmp_path)
    assert after[last] == before[last]
    assert after[last + 1] == before[last]
    assert sum(after[max(after)].values()) < sum(before[last].values())
    assert "26,122 parameters became" in " ".join(resumed["notes"])


@pytest.mark.process
@pytest.mark.filterwarnings("default:epochs is 3 instead of 2")
@pytest.mark.filterwarnings("default:the checkpoint of step")
def test_one_rank_continues_from_the_consensus_of_two_that_have_shrunk(tmp_path):
    options = {"nproc": 2, "epochs": 2, "apoptosis": 0.05, "checkpoint_every": 5}
    assert run(config(tmp_path, **options)).exit_code == 0
    narrow = json.loads((tmp_path / "summary.json").read_text())["parameters"]
    assert narrow < 26_122
    resumed = resume_alone(tmp_path, epochs=3, nproc=1).summary
    assert resumed["parameters"] <= narrow
    assert resumed["accuracy"] > 0.8
