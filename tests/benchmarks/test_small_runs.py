"""Every benchmark trains or measures, at a small size."""

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks import (
    apoptosis,
    compressed_gossip,
    encryption,
    equal_accuracy,
    reference_drift,
    second_order,
    shuffle,
    staleness,
    stall,
    step,
    suda,
)
from benchmarks._processes import in_processes


@pytest.fixture
def part():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(640, 1, 28, 28, generator=generator), torch.arange(640) % 10


def written(monkeypatch, folder, module, *arguments):
    """Runs a benchmark whole; what it has written."""
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr("benchmarks._common.RESULTS", folder)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    module.main()
    (path,) = folder.glob("*.json")
    figures = json.loads(path.read_text())
    assert figures["command"].startswith(f"python -m benchmarks.{name}")
    assert {"machine", "versions"} <= figures.keys()
    return figures


def test_drift(monkeypatch, tmp_path):
    monkeypatch.setattr(reference_drift, "WORLD_SIZES", (4,))
    monkeypatch.setattr(reference_drift, "AT_STEPS", (5,))
    monkeypatch.setattr(reference_drift, "LOSS_STEP", 3)
    found = written(monkeypatch, tmp_path, reference_drift, "--steps", "5")
    distances = {
        row["strategy"]: row["consensus_distance"]["5"] for row in found["consensus_distance"]
    }
    assert distances.keys() == reference_drift.STRATEGIES.keys()
    assert 0 < distances["sync"] < distances["local"]
    assert found["loss"][0]["minus_sync_mean"] == 0


def test_staleness(monkeypatch, part):
    monkeypatch.setattr(staleness, "DISTANCE_EVERY", 1)
    for contestant, d in (("allreduce", None), ("overlap", None), ("stale, late", 2)):
        found = staleness.run(contestant, d, 0, part, part)
        assert 0 < found["accuracy"] <= 1
        assert (found["mean_distance"] < 1e-4) == (contestant == "allreduce")
    mixes = staleness.mixes_per_step([1.0] * 4, 0, 0.0)
    assert all(0 < each <= 1 for each in mixes)


@pytest.mark.parametrize(
    "name", ["nothing", "SharedMask(0.1)", "CHOCO-SGD 0.1, ring", "naive top-k 0.1"]
)
def test_compressed_gossip(monkeypatch, part, name):
    monkeypatch.setattr(compressed_gossip, "EPOCHS", 1)
    monkeypatch.setattr(compressed_gossip, "DISTANCE_EVERY", 1)
    found = compressed_gossip.run(name, 0, part, part)
    assert (found["bytes_per_step"] == 0) == (name == "nothing")
    assert found["mean_distance"] > 0


@pytest.mark.parametrize("kind", [second_order.Gpt, second_order.Perceptron])
def test_second_order_loss(kind):
    task = kind()
    for make in (*second_order.OPTIMIZERS.values(), second_order.late(2)):
        found = second_order.train(task, make, 1e-3, 4, 0)
        assert found["at"] == [1, 2, 3, 4]
        assert all(map(math.isfinite, found["loss"]))
    assert second_order.reaches({"at": [2, 4], "loss": [3.0, 1.0]}, 2.0, 4) == 0.75


@pytest.mark.parametrize("way", suda.WAYS)
def test_suda_where_ranks_have_few_classes(way, part):
    found = suda.train(suda.TASKS["mlp"], suda.WAYS[way][0], 0.01, (*part, *part), 3, 2, 0)
    assert math.isfinite(found["loss"])


def test_suda_on_text():
    for name in ("suda", *suda.ALL_REDUCE):
        assert math.isfinite(suda.train_gpt(name, 0.003, 2, 2, 0)["loss"])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["mlp-adam", "gpt"])
def test_equal_accuracy(name):
    task = replace(equal_accuracy.TASKS[name], steps=2, batch=16)
    source = (equal_accuracy.Windows if name == "gpt" else equal_accuracy.Images)(task)
    for way in ("all-reduce", "sync, GossipAdamW"):
        options = equal_accuracy.ways(task)[way][1]
        found = equal_accuracy.train(task, source, 4, options, 0.01, 0)
        assert math.isfinite(found["loss"])


def test_apoptosis():
    task = apoptosis.TASKS["higgs"](0.1)
    whole, bold = (apoptosis.train_once(task, 0, of) for of in (None, task.shrinks["bold"]))
    assert whole["parameters"] == whole["parameters_before"]
    assert bold["parameters"] < whole["parameters"]
    assert 0 < bold["metric"] < 100


@pytest.mark.slow
@pytest.mark.process
def test_steps_of_two_processes():
    first, second = in_processes(2, step.take_turns, 1, 1)
    assert first.keys() == second.keys() == step.TASKS.keys()
    for times in first.values():
        assert step.summary(times)["ddp"]["ratio_to_ddp_median"] == 1


@pytest.mark.slow
@pytest.mark.process
def test_what_the_ring_costs():
    for rank in in_processes(2, shuffle.blocks_of_steps, 1, 2):
        assert rank["bytes_sent_per_step"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_encryption(monkeypatch, tmp_path):
    found = written(monkeypatch, tmp_path, encryption, "--repeats", "2")
    for of in found["results"].values():
        assert of["encrypted"]["cpu_seconds_per_megabyte_sent"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_a_worker_that_sleeps_holds_up_who_waits(monkeypatch):
    repeat = stall.run("gossip, stale", "sleeps")
    cell = stall.cell_of("gossip, stale", "sleeps", [repeat])
    assert cell["ended"] == ["all steps"]
    assert max(cell["longest_step_seconds"]) < stall.ABOUT["sleep_seconds"]
