"""Strategies by name."""

import threading
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.train._batches import Groups
from gossipgrad.train._config import TrainConfig
from gossipgrad.train._spans import StepSpans

from ._agd import LayerwiseAllReduce
from ._all_reduce import AllReduce
from ._averaged import EveryLogP
from ._gossip import Gossip
from ._local import Local
from ._post_local import PostLocal
from ._sparse import Sparse
from ._strategy import Leaver, Strategy


def make_strategy(
    config: TrainConfig,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    total_steps: int,
    stop: threading.Event,
    spans: StepSpans,
    groups: Groups | None = None,
    session: gg.GossipSession | None = None,
    leaver: Leaver | None = None,
) -> Strategy:
    """The strategy that `config` names; a collective but for `local`, and for one that joined.

    That one has its `session` already, and is the `leaver` that may go before the others stop.
    """
    if config.strategy == "local":
        return Local(model)
    if config.strategy == "allreduce":
        return AllReduce(model, stop)
    if config.strategy == "agd":
        return LayerwiseAllReduce(model, stop, spans)
    if config.strategy in ("omgs", "wfbp", "mg-wfbp", "topk", "lags"):
        return Sparse(
            config.strategy,
            model,
            optimizers,
            config.sparse,
            momentum=config.momentum if config.optimizer == "sgd" else 0.0,
            epochs=config.epochs,
            total_steps=total_steps,
            stop=stop,
            spans=spans,
        )
    if config.strategy == "gossip":
        group = None if groups is None else groups("gossip")
        return Gossip(
            model,
            optimizers,
            config.gossip,
            seed=config.seed,
            encrypt=config.encrypt or None,
            spans=spans,
            group=group,
            checkpoint_every=config.checkpoint_every,
            session=session,
            leaver=leaver,
        )
    assert dist.group.WORLD is not None
    group = gg.Group.from_process_group(dist.group.WORLD)
    together = config.checkpoint_every is not None
    if config.strategy == "every-log-p":
        return EveryLogP(
            model, optimizers, group=group, stop=stop, spans=spans, stops_together=together
        )
    return PostLocal(
        model,
        optimizers,
        after_steps=round(config.post_local.post_local_after * total_steps),
        every=config.post_local.local_steps,
        group=group,
        stop=stop,
        spans=spans,
        stops_together=together,
    )
