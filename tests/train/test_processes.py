"""Runs in real processes; all share one fork server, so that each takes a second or two."""

import json
import threading
import time

import pytest

from gossipgrad import checkpoint
from gossipgrad.launch import Worker
from gossipgrad.train import GossipConfig, RunFailedError, run
from support.held_workers import held_at
from support.launched import (
    after_steps,
    config,
    count,
    kill,
    pause,
    press_ctrl_c,
    stop,
    when,
    workers,
)
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
ENDLESS = 10_000


@pytest.mark.parametrize(
    "strategy", ["gossip", *(pytest.param(s, marks=SLOW) for s in ("allreduce", "sparse"))]
)
def test_run_leaves_all_that_is_promised(tmp_path, strategy):
    outcome = run(config(tmp_path, strategy=strategy, nproc=2, epochs=3))
    assert outcome.exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        ".lock",
        "config.json",
        "metrics-rank0.jsonl",
        "metrics-rank1.jsonl",
        "summary.json",
        "model.safetensors",
        "trace.json",
        "report.html",
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == outcome.summary
    assert summary["accuracy"] > 0.9
    assert summary["accuracy_per_rank"] == pytest.approx([summary["accuracy"]] * 2, abs=0.02)
    assert summary["model_is_consensus"]
    assert summary["steps_per_rank"] == [135, 135]
    assert summary["consensus_distance"] < (1 if strategy == "gossip" else 0) + 1e-9
    assert 0 < summary["exposed_seconds_per_step"] < summary["step_seconds"]
    dense_bytes = 26_122 * 4  # or less, where the plan that was measured is sparse
    assert 0 < summary["bytes_sent_per_step"] <= 1.02 * dense_bytes
    if strategy != "sparse":
        assert summary["bytes_sent_per_step"] == pytest.approx(dense_bytes, rel=0.02)
    written_ns = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    del written_ns["report.html"]
    assert max(written_ns, key=written_ns.__getitem__) == "summary.json", "a served page ends then"
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert not workers()


def test_local_steps_send_at_the_ends_of_periods_and_disagreement_is_recorded(tmp_path):
    options = GossipConfig(mode="sync", local_steps=11, outer_momentum=0.5, disagreement=True)
    outcome = run(
        config(tmp_path, nproc=2, epochs=2, trace=0, options={"gossip": options}, lr=0.02)
    )
    assert outcome.summary["bytes_sent_per_step"] == pytest.approx(26_122 * 4 * 8 / 90, rel=0.02)
    records = [
        json.loads(line) for line in (tmp_path / "metrics-rank1.jsonl").read_text().splitlines()
    ]
    found = [record["disagreement"] for record in records if record["event"] == "epoch"]
    assert len(found) == 2
    assert all(0 < each < 0.8 for each in found)  # its most is sqrt(log 2)
    assert 'data-chart="disagreement"' in (tmp_path / "report.html").read_text()


def test_checkpoints_of_two_exchanges_a_step_are_named_after_steps(tmp_path):
    options = {"gossip": GossipConfig(mode="sync", exchanges=2)}
    more = {"checkpoint_every": 10, "keep_checkpoints": 1000, "options": options, "trace": 0}
    outcome = run(config(tmp_path, nproc=2, epochs=1, **more))
    assert outcome.summary["steps_per_rank"] == [45, 45]
    assert checkpoint.steps(tmp_path / "checkpoints") == [10, 20, 30, 40, 45]


@pytest.mark.slow
def test_a_worker_that_is_paused_costs_the_others_nothing(tmp_path):
    """In mode stale; it takes fewer steps, all of which count, and ends with the others."""
    waited_in_none = []

    def stand_still():
        begun_seconds = time.monotonic()

        def others_went_on():
            """A busy machine may hold up a step; one that waits takes as long as the pause."""
            paused_seconds = time.monotonic() - begun_seconds
            return paused_seconds > 1 and all(
                count(tmp_path, rank) >= 120
                and longest_step_seconds(tmp_path, rank) < paused_seconds / 2
                for rank in (0, 2)
            )

        with pause(1):
            go_on()
            until(others_went_on)
        waited_in_none.append(True)

    options = GossipConfig(mode="stale", max_staleness=1)
    with held_at(40) as go_on, after_steps(tmp_path, 20, stand_still):
        more = {"batch_size": 1, "lr": 0.005, "options": {"gossip": options}, "trace": 0}
        outcome = run(config(tmp_path, nproc=3, epochs=1, **more))
    summary = outcome.summary
    # It jumps over the rounds that others have made meanwhile, of one for each step of an epoch;
    # so do these where the machine holds them up.
    rounds = 1437 // 3
    assert summary["steps_per_rank"][1] < 0.9 * rounds
    assert not summary["interrupted"]
    assert summary["lost_ranks"] == []
    assert summary["model_is_consensus"]
    assert summary["accuracy"] > 0.8
    assert waited_in_none
    assert summary["void_rounds_per_rank"][1] > 0.05 * rounds
    assert all(late >= 0 for late in summary["late_rounds_per_rank"])
    assert json.loads((tmp_path / "config.json").read_text())["gossip"]["mode"] == "stale"


def test_others_save_and_evaluate_together_when_a_worker_of_mode_stale_is_killed(tmp_path):
    """Their epochs end after unequal steps then; one saves as another evaluates."""
    options = {"gossip": GossipConfig(mode="stale")}
    more = {"checkpoint_every": 6, "keep_checkpoints": 1000, "options": options, "trace": 0}
    with after_steps(tmp_path, 1, kill(1)):
        outcome = run(config(tmp_path, nproc=4, epochs=5, **more))
    summary = outcome.summary
    assert summary["lost_ranks"] == [1]
    assert summary["model_is_consensus"]
    accuracies = [
        [event["accuracy"] for event in events_of(tmp_path, rank) if event["event"] == "epoch"]
        for rank in (0, 2, 3)
    ]
    assert accuracies == 3 * [accuracies[0]], "each is of the consensus"
    saved = {int(each.name[5:]) for each in (tmp_path / "checkpoints").iterdir()}
    complete = checkpoint.steps(tmp_path / "checkpoints")
    assert len(complete) > 5, "one in an epoch at least"
    assert len(saved - {*complete}) <= 1, "rank 1 may have died as it saved"


def longest_step_seconds(out, rank):
    """The first ones, in which a process still loads what it needs, are left out."""
    steps = (event for event in events_of(out, rank) if event["event"] == "step")
    return max(event["step_seconds"] for event in steps if event["step"] > 10)


def events_of(out, rank):
    """What is written of a rank's metrics."""
    lines = (out / f"metrics-rank{rank}.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def test_gossip_goes_on_without_a_killed_worker(tmp_path, capfd):
    with after_steps(tmp_path, 20, kill(0), rank=0, before=28):  # in the first epoch
        outcome = run(config(tmp_path, nproc=3, epochs=4, checkpoint_every=1000))
    assert outcome.exit_code == 0
    assert outcome.summary["lost_ranks"] == [0]
    for rank in (1, 2):  # the rate has fallen to nothing, though each made more than its share
        saved = checkpoint.load(tmp_path / "checkpoints", rank=rank)
        assert saved["optimizers"][0]["groups"][0]["lr"] < 0.002
    assert outcome.summary["lost_because"] == {"0": "was killed by SIGKILL (out of memory?)"}
    assert outcome.summary["model_is_consensus"], "of the two that are left"
    assert outcome.summary["model_from_rank"] == 1
    assert outcome.summary["accuracy"] > 0.9
    loss = outcome.summary["losses"]["0"]
    assert 20 < loss["step"] <= 28
    # Three times 30 batches in each of 4 epochs, whoever made them.
    shares, steps = outcome.summary["shares"], outcome.summary["steps_per_rank"]
    made = loss["step"] + steps[1] + steps[2]
    assert 360 <= made <= 360 + 2 * 5, "a chunk of a dead rank may be used twice"
    assert (steps[0], shares["disturbed_epochs"]) == (None, 4)
    assert (tmp_path / "model.safetensors").exists()
    # Lines of torch are of a thread that an earlier test in this process has left.
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("gossipgrad")]
    assert said == ["gossipgrad: rank 0 was killed by SIGKILL (out of memory?); 2 workers continue"]


def test_faults_by_script_are_seen_in_trace_and_summary(tmp_path, capfd):
    script = "delay rank=1 rounds=12-14 seconds=0.8; kill rank=2 round=25"
    gossip = GossipConfig(topology="complete", faults=script)
    outcome = run(config(tmp_path, nproc=3, epochs=1, trace=30, options={"gossip": gossip}))
    assert f"rank 0: faults by script: {script}" in outcome.summary["notes"]
    assert outcome.summary["lost_because"] == {
        "2": "failed: rank 2 was killed by script in round 25"
    }
    assert "rank 2 failed: rank 2 was killed by script" in capfd.readouterr().err
    with_rank_1 = {
        event["args"]["round"]: event["dur"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "exchange" and event["pid"] == 0 and event["args"]["recv_from"] == 1
    }
    slow = {round for round, microseconds in with_rank_1.items() if microseconds > 600_000}
    assert slow & {12, 13, 14}, "one of three rounds is with rank 1"
    assert script in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("strategy", ["allreduce", pytest.param("sparse", marks=SLOW)])
def test_what_needs_every_rank_ends_with_a_killed_worker(tmp_path, strategy):
    with (
        after_steps(tmp_path, 20, kill(0), rank=0),
        pytest.raises(
            RunFailedError, match=rf"^rank 0 was killed by SIGKILL .*{strategy} needs every"
        ),
    ):
        run(config(tmp_path, strategy=strategy, nproc=3, epochs=ENDLESS))
    assert not (tmp_path / "partial").exists()
    assert not workers()


@pytest.mark.parametrize(
    "strategy",
    [
        "gossip",
        *(pytest.param(name, marks=SLOW) for name in ("allreduce", "sparse", "local")),
    ],
)
def test_ctrl_c_keeps_what_was_reached(tmp_path, strategy):
    with after_steps(tmp_path, 20, press_ctrl_c):
        outcome = run(config(tmp_path, strategy=strategy, nproc=3, epochs=ENDLESS))
    assert outcome.exit_code == 130
    assert outcome.summary["interrupted"]
    assert outcome.summary["stopped_by"] == "SIGINT"
    assert outcome.summary["lost_ranks"] == []
    assert outcome.summary["model_is_consensus"] == (strategy != "local")
    if strategy in ("allreduce", "sparse"):
        assert len(set(outcome.summary["steps_per_rank"])) == 1
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "report.html").exists()
    assert not workers()


def test_ctrl_c_while_workers_start_leaves_none(tmp_path, capfd):
    with when(lambda: bool(workers()), press_ctrl_c):
        outcome = run(config(tmp_path, nproc=3, epochs=ENDLESS))
    assert outcome.exit_code == 130
    assert not outcome.begun
    assert "Traceback" not in capfd.readouterr().err
    assert not workers()
    assert not (tmp_path / "partial").exists()


def test_a_worker_that_missed_ctrl_c_while_it_started_is_ended(tmp_path, monkeypatch):
    send = Worker.send_signal
    monkeypatch.setattr(
        Worker, "send_signal", lambda own, number: own.rank == 2 or send(own, number)
    )
    with when(lambda: len(workers()) == 3, press_ctrl_c):
        outcome = run(config(tmp_path, nproc=3, epochs=ENDLESS))
    assert outcome.exit_code == 130
    assert not workers()


def test_second_ctrl_c_ends_at_once(tmp_path, monkeypatch):
    passed_on, send = threading.Event(), Worker.send_signal

    def note(own, number):
        passed_on.set()
        send(own, number)

    monkeypatch.setattr(Worker, "send_signal", note)

    def freeze_and_insist():
        stop(1)()
        press_ctrl_c()
        assert passed_on.wait(HANG_SECONDS)
        time.sleep(1.5)  # one that comes within a second is an echo of the first
        press_ctrl_c()

    with after_steps(tmp_path, 20, freeze_and_insist):
        outcome = run(config(tmp_path, strategy="local", nproc=2, epochs=ENDLESS))
    assert outcome.exit_code == 130
    assert outcome.begun
    assert not workers()


def test_worker_that_cannot_start_says_why_once(tmp_path, monkeypatch, capfd):
    (tmp_path / "bad_job.py").write_text(
        "import os\n"
        "def job():\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        raise OSError('a bad node')\n"
        "    from gossipgrad.train import TrainConfig, load_job\n"
        "    return load_job(TrainConfig())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    with pytest.raises(RunFailedError, match=r"^rank 1 failed: .*\(traceback in .*errors-rank1"):
        run(config(out, strategy="allreduce", nproc=3, job="bad_job:job"))
    assert "gossipgrad" not in capfd.readouterr().err
    assert "a bad node" in (out / "errors-rank1.txt").read_text()
    assert not (out / "partial").exists(), "the folder is free"
    assert not workers()


@pytest.mark.parametrize("strategy", ["gossip", pytest.param("allreduce", marks=SLOW)])
def test_diverging_run_says_so_once(tmp_path, strategy, capfd):
    with pytest.raises(RunFailedError, match=r"^rank \d failed: the loss .*; lower --lr \(trace"):
        run(config(tmp_path, strategy=strategy, nproc=2, lr=1e20))
    assert "gossipgrad" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("power of two", {"nproc": 3, "options": {"gossip": {"topology": "hypercube"}}}),
        ("use --model mlp", {"model": "lenet"}),
        ("name rank 3, but", {"options": {"gossip": {"faults": "kill rank=3 round=1"}}}),
        (
            "name rank 2, but",
            {
                "nproc": 2,
                "strategy": "allreduce",
                "options": {"allreduce": {"faults": "delay rank=2 round=1 seconds=1"}},
            },
        ),
        (
            "leave mode='overlap'",
            {"options": {"gossip": {"payload": "gradients", "mode": "sync"}}},
        ),
        ("2000 processes cannot share the 1437 samples", {"nproc": 2000, "strategy": "local"}),
    ],
)
def test_mistakes_are_found_before_anything_is_started(tmp_path, message, options):
    with pytest.raises(ValueError, match=message):
        run(config(tmp_path / "run", **{"nproc": 3, **options}))
    assert not list(tmp_path.iterdir())
