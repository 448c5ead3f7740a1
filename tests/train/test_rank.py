import errno
import json
import os
import threading

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gossipgrad import data
from gossipgrad.errors import GossipError
from gossipgrad.train import build_model
from gossipgrad.train._folder import RunDir
from support.alone import begin_alone, train_alone


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture
def train(digits, tmp_path):
    """Train one rank alone, in this process."""

    def train(*, stop=None, emit=lambda event: None, name="run", rank=0, dataset=digits, **options):
        config, run_dir = begin_alone(tmp_path / name, **options)
        how = {"dataset": dataset, "rank": rank, "stop": stop, "emit": emit}
        return train_alone(config, run_dir, **how), run_dir

    return train


def test_learns_digits_and_leaves_the_model_it_measured(train, digits):
    result, run_dir = train(epochs=5)
    assert result.accuracy > 0.93
    model = build_model("mlp", digits.info)
    model.load_state_dict(load_file(run_dir.rank_model(0)))
    correct = (model(digits.test.x).argmax(1) == digits.test.y).float().mean()
    assert result.accuracy == pytest.approx(float(correct))


def test_counts_what_it_did(train):
    result, _ = train(epochs=2, batch_size=100)
    assert (result.steps, result.samples, result.epochs) == (30, 2 * 1437, 2)
    assert 0 < result.train_seconds < result.seconds
    assert not result.stopped


def test_metrics_have_a_line_for_every_tenth_step_and_epoch(train):
    result, run_dir = train(epochs=2, batch_size=100, log_every=10)
    events = [json.loads(line) for line in run_dir.metrics(0).read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [
        ("step", 10),
        ("epoch", 15),
        ("step", 20),
        ("step", 30),
        ("epoch", 30),
    ]
    assert set(events[0]) == {
        "event",
        "step",
        "epoch",
        "seconds",
        "loss",
        "samples",
        "consensus_distance_estimate",
        "exposed_seconds",
        "train_seconds",
        "step_seconds",
        "bytes_sent",
        "outcomes",
    }
    assert set(events[-1]) == {
        "event",
        "epoch",
        "step",
        "seconds",
        "accuracy",
        "metric_name",
        "metric_format",
        "loss",
        "consensus_distance",
        "samples_per_second",
    }
    assert events[-1]["accuracy"] == result.accuracy
    assert events[0]["samples"] == 1000


def test_repeats_bit_for_bit_by_seed(train):
    runs = [train(epochs=1, name=str(number), seed=seed) for number, seed in enumerate((0, 0, 1))]
    first, again, other = [run_dir.rank_model(0).read_bytes() for _, run_dir in runs]
    assert first == again
    assert first != other


def test_each_rank_draws_masks_of_its_own(train):
    draws = []
    for rank in range(2):
        train(epochs=1, rank=rank)
        draws.append(torch.rand(1))
    assert draws[0] != draws[1]


def test_stop_ends_at_the_next_step_and_keeps_the_model(train):
    stop = threading.Event()

    def stop_after_first_epoch(event):
        if event["event"] == "epoch":
            stop.set()

    result, run_dir = train(epochs=50, stop=stop, emit=stop_after_first_epoch)
    events = [json.loads(line) for line in run_dir.metrics(0).read_text().splitlines()]
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [0]
    assert result.stopped
    assert result.epochs == 1
    assert result.steps == 90
    assert run_dir.rank_model(0).exists()


def test_trace_has_the_steps_asked_for(train):
    _, run_dir = train(epochs=1, trace=3)
    lines = [json.loads(line) for line in run_dir.rank_trace(0).read_text().splitlines()[1:]]
    forward = [line["attributes"]["step"] for line in lines if line["name"] == "forward"]
    assert forward == [6, 7, 8]
    assert {line["name"] for line in lines} == {"data", "forward", "backward", "optimizer"}


def test_no_trace_when_none_is_asked_for(train):
    _, run_dir = train(epochs=1, trace=0)
    assert not run_dir.rank_trace(0).exists()


def test_loss_that_is_not_finite_ends_the_run(train):
    with pytest.raises(GossipError, match=r"the loss became (nan|inf) in step \d+; lower --lr"):
        train(epochs=2, lr=1e20)


def test_the_space_of_the_model_is_taken_at_the_start(train, tmp_path):
    taken = []

    def look(event):
        if event["event"] == "ready":
            taken.append(512 * RunDir(tmp_path / "run").rank_model(0).stat().st_blocks)

    result, run_dir = train(epochs=1, emit=look)
    assert taken[0] >= run_dir.rank_model(0).stat().st_size > result.gradient_bytes


@pytest.mark.parametrize("every", [None, 7])
def test_a_disk_that_is_full_at_the_end_is_told_in_one_line(train, tmp_path, every, monkeypatch):
    run_dir = RunDir(tmp_path / "run")

    def full(tensors, path, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("gossipgrad.checkpoint._model.save_file", full)
    way_out = rf"--resume {run_dir.path}$" if every else "no checkpoint"
    with pytest.raises(GossipError, match=rf"^no space in .*{way_out}"):
        train(epochs=1, checkpoint_every=every)
    assert run_dir.holds_checkpoints == bool(every)


def test_no_space_for_the_model_is_told_before_a_step(train, tmp_path, monkeypatch):
    def fallocate(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(GossipError, match="no space in"):
        train(epochs=1)
    assert not (tmp_path / "run" / "metrics-rank0.jsonl").read_text()
