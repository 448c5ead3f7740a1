"""Going on from a checkpoint that other ranks saved than those that are here: from its mean."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossipgrad import checkpoint
from gossipgrad.comm import load_replica, misfit, replica_state
from gossipgrad.decentralized import average_states

from ._checkpoints import LoopState, is_behind
from ._config import TrainConfig
from ._layout import RunDir
from ._resume import edited


def other_ranks(
    config: TrainConfig, run_dir: RunDir, members: Sequence[int], world_size: int
) -> tuple[int, ...] | None:
    """The ranks that saved the checkpoint to resume, if they are not those that are here.

    Ranks that never come together have no consensus: each needs its own state, and nobody else's.

    Args:
        config: The options.
        run_dir: Where the checkpoints lie.
        members: The ranks that came to the start.
        world_size: How many there should be.

    Raises:
        ValueError: Ranks that trained each on its own are resumed by another number of them.
    """
    if config.resume is None:
        return None
    assert config.resume_step is not None
    step, run = config.resume_step, config.run_name
    saved = checkpoint.members(run_dir.checkpoints, step=step, run=run)
    if not config.traits.communicates:
        before = checkpoint.manifest(
            run_dir.checkpoints, rank=saved[0], step=config.resume_step
        ).world_size
        if before != world_size:
            raise ValueError(
                f"nproc is {world_size}, but the checkpoint of step {config.resume_step} is of "
                f"{before} ranks, each of which trained on its own (strategy {config.strategy}): "
                "there is no one model that others could go on from. Leave --nproc out, or give "
                f"{before}."
            )
        return None
    return None if saved == tuple(members) == tuple(range(world_size)) else saved


def start_from_consensus(
    config: TrainConfig,
    run_dir: RunDir,
    ranks: Sequence[int],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    rank: int,
    members: Sequence[int],
    epoch_batches: int,
) -> tuple[LoopState, str, list[Mapping[str, Any]]]:
    """Begins on other ranks with the mean of the saved replicas; local.

    Each rank reads the states of all. What it comes to is not bit for bit what those would have
    come to: samples are dealt otherwise. Hyper-parameters are those of this start, among them the
    learning rate, which may go by the number of ranks.

    Args:
        config: The options.
        run_dir: Where the checkpoints lie.
        ranks: Whose states there are.
        model: Gets the mean.
        optimizers: Get the mean of the moments.
        rank: This rank.
        members: The ranks that came to the start.
        epoch_batches: Batches of an epoch of this start.

    Returns:
        Where the run goes on, what the user should know of it, and what each of the saved ranks
        kept of its strategy.

    Raises:
        ValueError: A state cannot be read, or does not fit.
    """
    step, directory = config.resume_step, run_dir.checkpoints
    states = [checkpoint.load(directory, rank=one, step=step) for one in ranks]
    mean = average_states(states)
    if (why := misfit(model, optimizers, mean)) is not None:
        raise ValueError(f"the checkpoint of step {step} cannot be resumed: {why}")
    own = replica_state(model, optimizers, copy=False)["optimizers"]
    mean["optimizers"] = [
        {**one, "groups": here["groups"]} for one, here in zip(mean["optimizers"], own, strict=True)
    ]
    # Where ranks came or went, their steps do not tell.
    furthest = max(
        (state["loop"] for state in states), key=lambda loop: (loop["epoch"], loop["batch"])
    )
    if why := edited(config, states[0]) or is_behind(config, furthest["epoch"]):
        raise ValueError(f"the checkpoint of step {step} cannot be resumed: {why}")
    load_replica(model, optimizers, mean)
    metrics = dict(furthest["metrics"])
    samples = sum(state["loop"]["metrics"]["samples"] for state in states) / len(members)
    done = min(1.0, furthest["batch"] / max(1, metrics["epoch_batches"]))
    batch = round(done * epoch_batches)
    mine = states[ranks.index(rank)]["loop"]["metrics"] if rank in ranks else None
    metrics.pop("position", None)
    metrics |= {
        "steps": furthest["epoch"] * epoch_batches + batch,
        "samples": round(samples),
        "offset": None if mine is None else mine["offset"],
    }
    note = (
        f"the checkpoint of step {step} was saved by {_named(ranks)}, and {_named(members)} went "
        "on from their consensus: not bit for bit what those would have done"
    )
    if rank == min(members):
        warnings.warn(note, stacklevel=2)
    return (
        LoopState(epoch=furthest["epoch"], batch=batch, metrics=metrics),
        note,
        [one["strategy"] for one in states],
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
