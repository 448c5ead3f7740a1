"""Sessions that are saved, thrown away and gone on with, beside some that never stop."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import gossipgrad as gg
from gossipgrad.comm import Group
from support.ranks import run_ranks
from support.replicas import OptimizerFactory, backward, network, sgd, transport_by_name
from support.trees import bits

__all__ = ["assert_same", "run_on", "session_of_training", "stop_and_resume", "without_times"]

# What has come by now, and is not mixed, is a matter of time, too.
TIMES = (
    *("exposed_seconds", "mixing_seconds", "averaging_seconds"),
    *("extra_memory_bytes", "bytes_received"),
)


def without_times(stats: gg.Stats) -> dict[str, Any]:
    """What a session has counted, less times and what is held at this moment."""
    return {name: getattr(stats, name) for name in stats.__slots__ if name not in TIMES}


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Two trees are equal, tensors and arrays bit for bit."""
    if isinstance(ours, torch.Tensor):
        assert isinstance(theirs, torch.Tensor), where
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert bits(ours) == bits(theirs), f"{where}: {(ours - theirs).abs().max():.3g} apart"
    elif isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray), where
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert ours.tobytes() == theirs.tobytes(), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}/{number}")
    else:
        assert ours == theirs, f"{where}: {ours!r} is not {theirs!r}"


def run_on(
    world_size: int,
    start: int,
    end: int,
    *,
    states: list[dict[str, Any]] | None = None,
    saves_at: int | None = None,
    seed: int = 0,
    optimizer: OptimizerFactory = sgd,
    dtype: torch.dtype = torch.float32,
    transport: str = "in-process",
    gradients: Callable = backward,
    **settings: Any,
) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Trains from `start` to `end`; states taken at `saves_at`, and what each rank came to."""
    link = transport_by_name(transport, world_size)
    saved: dict[int, dict[str, Any]] = {}

    def rank_main(rank: int, group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
        model = network(seed, dtype=dtype)
        o = optimizer(list(model.parameters()))
        with gg.gossip(
            model, o, process_group=group, transport=link, bucket_bytes=100, **settings
        ) as session:
            if states is not None:
                session.load_state_dict(states[rank])
            for step in range(start, end):
                if step == saves_at:
                    saved[rank] = session.state_dict()
                gradients(model, rank, step)
                o.step()
            session.group.barrier()
            last, counted = session.state_dict(), without_times(session.stats())
            session.group.barrier()
        return last, counted

    came_to = run_ranks(world_size, rank_main)
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
