"""Runs of the command that are cut short and resumed, beside some that are not."""

import json
from pathlib import Path
from typing import Any

from gossipgrad import checkpoint
from support.resuming import session_of_training
from support.trees import assert_same

__all__ = ["assert_same_runs", "metrics_of", "state_of"]

TIMES = (
    *("seconds", "exposed_seconds", "mixing_seconds", "train_seconds", "step_seconds"),
    *("samples_per_second", "bytes_sent"),  # what has left by now
)


def metrics_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank wrote, less times."""
    lines = (folder / f"metrics-rank{rank}.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def state_of(folder: Path, rank: int, step: int | None = None) -> dict[str, Any]:
    """What a rank saved last, or at a step, less times and what has just come."""
    state = checkpoint.load(folder / "checkpoints", rank=rank, step=step)
    del state["random"]["python"]  # the checks of types, which tests alone have, draw from it
    del state["loop"]["metrics"]["offset"]
    session = state.get("session")
    return {
        **state,
        "loop": _without_seconds(state["loop"]),
        "session": session and session_of_training(session),
        "strategy": _without_seconds(state["strategy"]),
    }


def _without_seconds(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_seconds(one) for name, one in value.items() if "seconds" not in name}


def assert_same_runs(ours: Path, theirs: Path, ranks: int) -> None:
    """All metrics but times, and all that the last checkpoints hold, bit for bit."""
    for rank in range(ranks):
        mine, other = metrics_of(ours, rank), metrics_of(theirs, rank)
        assert [line["event"] for line in mine] == [line["event"] for line in other]
        assert_same(mine, other, f"metrics of rank {rank}")
        assert_same(state_of(ours, rank), state_of(theirs, rank), f"state of rank {rank}")
