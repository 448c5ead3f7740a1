"""A small run as the training command leaves it, made here so that nothing depends on training."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossipgrad.report import Trace, merge_traces, write_report
from gossipgrad.topology import Schedule, by_name
from support.html_page import Page

STEPS_PER_EPOCH = 10
EPOCHS = 3

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path, write_run_into) -> WriteRun:
    """Writes a run directory of `world_size` ranks; keyword arguments go into its config."""

    def write(name: str = "small", **options: Any) -> Path:
        return write_run_into(tmp_path / name, **options)

    return write


@pytest.fixture(scope="session")
def write_run_into() -> WriteRun:
    """The same, into a directory that is named."""

    def write(directory: Path, *, world_size: int = 4, **config: Any) -> Path:
        directory.mkdir(parents=True)
        steps = STEPS_PER_EPOCH * EPOCHS
        topology = "hypercube" if world_size & (world_size - 1) == 0 else "matching"
        strategy_is = {"topology": topology, "mode": "overlap", "payload": "weights"}
        options = {
            "strategy": "gossip",
            "model": "mlp",
            "data": "digits",
            "seed": 0,
            "gossip": strategy_is,
            "strategy_is": strategy_is,
        }
        write_json(directory / "config.json", options | config)
        for rank in range(world_size):
            (directory / f"metrics-rank{rank}.jsonl").write_text(
                "".join(json.dumps(record) + "\n" for record in metrics(rank, steps))
            )
        summary = {
            "strategy": "gossip",
            "world_size": world_size,
            "steps": steps,
            "epochs": EPOCHS,
            "seconds": 3.0,
            "samples_per_second": 1234.0,
            "accuracy": 0.9125,
            "accuracy_per_rank": [0.9 + rank / 1000 for rank in range(world_size)],
            "consensus_distance": 0.25,
            "bytes_sent_per_step": 1000,
            "all_reduce_bytes_per_step": 1500,
            "exposed_seconds_per_step": 0.005,
            "interrupted": False,
            "lost_ranks": [],
            "outcomes": {"delivered": 118, "late": 2, "dead_peer": 0, "void": 0},
        }
        write_json(directory / "summary.json", summary)
        schedule = by_name(topology, world_size, seed=0)
        traces = [save_trace(directory, rank, steps, schedule) for rank in range(world_size)]
        merge_traces(traces, directory / "trace.json")
        return directory

    return write


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def report() -> Callable[[Path], Page]:
    """Writes the report of a run and reads it."""
    return lambda directory: Page(write_report(directory).read_text(encoding="utf-8"))


@pytest.fixture
def change() -> Callable[..., None]:
    """Changes values of a JSON object in a file."""

    def change(path: Path, **values: object) -> None:
        write_json(path, json.loads(path.read_text()) | values)

    return change


@pytest.fixture
def edit_trace() -> Callable[..., None]:
    """Changes the events of a run's trace; None leaves one out."""

    def edit(directory: Path, change: Callable[[dict], dict | None]) -> None:
        path = directory / "trace.json"
        events = map(change, json.loads(path.read_text())["traceEvents"])
        write_json(path, {"traceEvents": [event for event in events if event is not None]})

    return edit


def metrics(rank: int, steps: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        epoch = -(-step // STEPS_PER_EPOCH)
        records.append(
            {
                "event": "step",
                "step": step,
                "epoch": epoch - 1,
                "seconds": step / 10,
                "loss": math.exp(-step / 10) + rank / 100,
                "samples": 32 * step,
                "consensus_distance_estimate": 1 / step,
                "exposed_seconds": 0.005 * step,
                "train_seconds": 0.1 * step,
                "step_seconds": 0.1,
                "bytes_sent": 1000 * step,
                "outcomes": {"delivered": step - step // 15, "late": step // 15},
            }
        )
        if step % STEPS_PER_EPOCH == 0:
            records.append(
                {
                    "event": "epoch",
                    "epoch": epoch - 1,
                    "step": step,
                    "seconds": step / 10,
                    "accuracy": 1 - 1 / (epoch + 1),
                    "loss": 0.5,
                    "consensus_distance": 1.1 / step,
                    "disagreement": 0.4 / step,
                    "samples_per_second": 320.0,
                }
            )
    return records


def save_trace(directory: Path, rank: int, steps: int, schedule: Schedule) -> Path:
    """Steps of 100 ms: forward, backward, optimizer, and two exchanges under way meanwhile."""
    trace = Trace(rank)
    for step in range(1, steps + 1):
        start = step / 10
        send_to, recv_from = schedule.peers(step, rank)
        trace.span("snapshot", start, start + 0.001, round=step)
        trace.span("forward", start + 0.001, start + 0.03, step=step)
        trace.span("backward", start + 0.03, start + 0.08, step=step)
        trace.span("optimizer", start + 0.08, start + 0.09, step=step)
        trace.span("wait", start + 0.09, start + 0.094, round=step)
        trace.span("mix", start + 0.094, start + 0.095, round=step, bucket=0)
        for bucket in range(2):
            attributes = {"round": step, "bucket": bucket, "send_to": send_to}
            attributes |= {"recv_from": recv_from, "bytes": 500, "outcome": "delivered"}
            trace.span("exchange", start + 0.001, start + 0.09, **attributes)
        if step % STEPS_PER_EPOCH == 0:
            trace.span("evaluate", start + 0.095, start + 0.1, step=step)
    return trace.save(directory / f"trace-rank{rank}.jsonl")
