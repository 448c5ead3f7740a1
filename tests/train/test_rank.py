"""One rank from its start to its end: what it learns, counts, writes, and what ends it."""

import json
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gossipgrad import data
from gossipgrad.train import RunFailedError, build_model
from support.alone import each_step, events, run_alone, stopping_after


def test_learns_digits_and_leaves_the_model_it_measured(tmp_path):
    summary = run_alone(tmp_path / "run", epochs=5).summary
    assert summary["accuracy"] > 0.93
    digits = data.load("digits")
    model = build_model("mlp", digits.info)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    correct = (model(digits.test.x).argmax(1) == digits.test.y).float().mean()
    assert summary["accuracy"] == pytest.approx(float(correct))


def test_counts_what_it_did_with_a_line_for_every_tenth_step_and_epoch(tmp_path):
    summary = run_alone(tmp_path / "run", epochs=2, batch_size=100, log_every=10).summary
    assert (summary["steps"], summary["epochs"], summary["interrupted"]) == (30, 2, False)
    assert 0 < 30 * summary["step_seconds"] < summary["seconds"]
    steps, epochs = (events(tmp_path / "run", kind) for kind in ("step", "epoch"))
    assert [event["step"] for event in steps] == [10, 20, 30]
    assert [event["step"] for event in epochs] == [15, 30]
    assert [event["samples"] for event in steps] == [1000, 1937, 2874]
    assert epochs[-1]["accuracy"] == summary["accuracy"]
    assert {"loss", "seconds", "step_seconds", "bytes_sent", "outcomes"} <= steps[0].keys()


def test_repeats_bit_for_bit_by_seed(tmp_path):
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        run_alone(tmp_path / name, epochs=1, seed=seed)
    first, again, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again != other


def test_ctrl_c_ends_at_the_next_step_and_keeps_the_model(tmp_path):
    with stopping_after(100):
        outcome = run_alone(tmp_path / "run", epochs=50)
    assert outcome.exit_code == 130
    assert outcome.summary["interrupted"]
    assert 100 <= outcome.summary["steps"] < 4500
    assert load_file(tmp_path / "run" / "model.safetensors")


@pytest.mark.parametrize("steps", [3, 0])
def test_trace_has_the_steps_asked_for(tmp_path, steps):
    run_alone(tmp_path / "run", epochs=1, trace=steps)
    trace = tmp_path / "run" / "trace.json"
    assert trace.exists() == bool(steps)
    if steps:
        spans = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
        forward = [one["args"]["step"] for one in spans if one["name"] == "forward"]
        assert forward == [6, 7, 8]
        assert {one["name"] for one in spans} == {"data", "forward", "backward", "optimizer"}


def test_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(RunFailedError, match=r"the loss became (nan|inf) in step \d+; lower --lr"):
        run_alone(tmp_path / "run", epochs=2, lr=1e20)


def test_threads_are_those_asked_for(tmp_path):
    threads = []
    with each_step(lambda step: threads.append(torch.get_num_threads())):
        run_alone(tmp_path / "run", epochs=1, threads=2, batch_size=500)
    assert {*threads} == {2}


def test_a_disk_that_is_full_at_the_end_loses_no_model(tmp_path, monkeypatch):
    serialize = safetensors.torch.serialize_file

    def serialize_if_not_full(tensors, path, *args, **options):
        if Path(path).is_relative_to(tmp_path / "run"):
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        serialize(tensors, path, *args, **options)

    monkeypatch.setattr("safetensors.torch.serialize_file", serialize_if_not_full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    with pytest.raises(RunFailedError, match="No space left on device"):
        run_alone(tmp_path / "run", epochs=1)
    (saved,) = (tmp_path / "other").glob("*/*.safetensors")
    assert sum(t.numel() for t in load_file(saved).values()) > 1000
