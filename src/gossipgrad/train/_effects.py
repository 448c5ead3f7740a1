"""Warnings of options that have no effect in a run of so many steps on so many ranks."""

import dataclasses
import warnings

from gossipgrad.comm import Faults
from gossipgrad.data import DatasetInfo, num_batches
from gossipgrad.sparsification import Warmup

from ._config import GossipConfig, PostLocalConfig, SparseConfig, TrainConfig


def warn_of_no_effect(config: TrainConfig, info: DatasetInfo, world_size: int) -> None:
    """Warn of options that differ from their defaults and that the length of the run undoes."""
    steps = config.epochs * num_batches(info.train_samples // world_size, config.batch_size)
    for message in _without_effect(config, steps, world_size):
        warnings.warn(message, stacklevel=2)


def _without_effect(config: TrainConfig, steps: int, world_size: int) -> list[str]:
    """What to warn of.

    Example:
        >>> config = TrainConfig(gossip=GossipConfig(every=50))
        >>> _without_effect(config, 40, 2)[0]
        'every is 50, but the run has 40 steps: no rank ever meets a partner. Make every less.'
    """
    if world_size == 1:
        return [
            f"{name}={value} is not used: there is one rank."
            for name, value in _set(config).items()
        ]
    if config.strategy == "gossip":
        return _of_gossip(config.gossip, steps)
    if config.strategy == "post-local-sgd":
        return _of_post_local(config.post_local, steps)
    if config.strategy in ("omgs", "topk", "lags"):
        return _of_sparse(config.sparse, steps)
    return []


def _set(config: TrainConfig) -> dict[str, object]:
    """Options of the strategy that differ from their defaults."""
    owners = {"gossip": config.gossip, "post-local-sgd": config.post_local}
    owners |= dict.fromkeys(("omgs", "topk", "lags"), config.sparse)
    owner = owners.get(config.strategy)
    if owner is None:
        return {}
    values = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner)}
    default = type(owner)()
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _of_gossip(options: GossipConfig, steps: int) -> list[str]:
    found = []
    if options.every > steps:
        found.append(
            f"every is {options.every}, but the run has {steps} steps: no rank ever meets a "
            "partner. Make every less."
        )
    if isinstance(options.average_every, int) and options.average_every > steps:
        found.append(
            f"average_every is {options.average_every}, but the run has {steps} steps: replicas "
            "are never averaged while training. Make average_every less."
        )
    last_round = steps // options.every
    if options.mode == "sync" or options.payload.startswith("gradients"):
        last_round -= 1  # the others send the first snapshot before the first step
    faults = Faults.parse(options.faults or "")
    if faults.last_round > max(last_round, 0):
        found.append(
            f"faults name rounds up to {faults.last_round}, but the run has rounds 0 to "
            f"{max(last_round, 0)}: what comes later never happens. Name earlier rounds, or train "
            "for longer."
        )
    return found


def _of_post_local(options: PostLocalConfig, steps: int) -> list[str]:
    left = steps - round(options.post_local_after * steps)
    if left == 0:
        if options.local_steps == PostLocalConfig().local_steps and options.post_local_after == 1:
            return []
        return [
            f"local_steps={options.local_steps} is not used: post_local_after is "
            f"{options.post_local_after}, which leaves none of the run's {steps} steps."
        ]
    if options.local_steps > left:
        return [
            f"local_steps is {options.local_steps}, but the run has {left} steps left after the "
            "all-reduced ones: replicas are never averaged while training. Make local_steps less."
        ]
    return []


def _of_sparse(options: SparseConfig, steps: int) -> list[str]:
    stages = Warmup(steps=1).densities
    if not options.density_warmup_steps:
        return []
    if options.density >= stages[0]:
        return [
            f"density_warmup_steps={options.density_warmup_steps} is not used: a warm-up sends "
            f"{stages[0]} of a gradient at most, and density is {options.density}."
        ]
    warmup = len(stages) * options.density_warmup_steps
    if warmup >= steps:
        return [
            f"density_warmup_steps is {options.density_warmup_steps}, and the warm-up has "
            f"{len(stages)} times as many, but the run has {steps} steps: it never comes to send "
            f"{options.density}. Make density_warmup_steps less, or train for longer."
        ]
    return []
