"""Sessions that are saved, thrown away and gone on with, beside some that never stop."""

from typing import Any

import torch

import gossipgrad as gg
from support.replicas import backward, network
from support.sessions import Trainer, run_sessions
from support.trees import assert_same

__all__ = ["run_on", "session_of_training", "stop_and_resume", "without_times"]

# What has come by now, and is not mixed, is a matter of time, too.
TIMES = (
    *("exposed_seconds", "mixing_seconds", "averaging_seconds"),
    *("extra_memory_bytes", "bytes_received"),
)


def without_times(stats: gg.Stats) -> dict[str, Any]:
    """What a session has counted, less times and what is held at this moment."""
    return {name: getattr(stats, name) for name in stats.__slots__ if name not in TIMES}


def run_on(
    world_size: int,
    start: int,
    end: int,
    *,
    states: list[dict[str, Any]] | None = None,
    saves_at: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Trains from `start` to `end`; states taken at `saves_at`, and what each rank came to."""
    saved: dict[int, dict[str, Any]] = {}

    def use(me: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
        if states is not None:
            me.session.load_state_dict(states[me.rank])
        me.steps = start
        for step in range(start, end):
            if step == saves_at:
                saved[me.rank] = me.session.state_dict()
            me.train()
        me.group.barrier()
        return me.session.state_dict(), without_times(me.session.stats())

    # Without heartbeats: a lease that runs out on a busy machine would void a round.
    settings = {"gradients": backward, "bucket_bytes": 100, "heartbeats": None, **settings}
    came_to = run_sessions(world_size, use, make=lambda rank: network(seed, dtype), **settings)
    return [saved[rank] for rank in sorted(saved)], came_to


def stop_and_resume(world_size: int, stop: int, end: int, **settings: Any) -> None:
    """Ranks that stop after some steps and are resumed by others come to what they would have."""
    states, uninterrupted = run_on(world_size, 0, end, saves_at=stop, **settings)
    # Other initial weights: what is not loaded would show.
    _, resumed = run_on(world_size, stop, end, states=states, seed=1, **settings)
    for rank, (mine, theirs) in enumerate(zip(resumed, uninterrupted, strict=True)):
        states = [
            {**state, "session": session_of_training(state["session"])}
            for state in (mine[0], theirs[0])
        ]
        assert_same(*states, f"rank {rank}")
        assert_same(mine[1], theirs[1], f"rank {rank}: stats")


def session_of_training(session: dict[str, Any]) -> dict[str, Any]:
    """What a state has of a session, less times and what has just come."""
    counters = dict(session["counters"])
    averages, rounds = counters["averages"], counters["rounds"]
    counters["averages"] = {k: v for k, v in averages.items() if "seconds" not in k}
    if rounds is not None:  # there are others
        counters["rounds"] = {k: v for k, v in rounds.items() if "seconds" not in k}
        counters["rounds"]["links"] = rounds["links"]["bytes_sent"]
    return {**session, "counters": counters}
