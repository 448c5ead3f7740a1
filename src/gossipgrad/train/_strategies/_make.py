"""Strategies by name."""

import threading
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from gossipgrad.train._config import TrainConfig
from gossipgrad.train._spans import StepSpans

from ._all_reduce import AllReduce
from ._gossip import Gossip
from ._local import Local
from ._strategy import Strategy


def make_strategy(
    config: TrainConfig,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    stop: threading.Event,
    spans: StepSpans,
) -> Strategy:
    """The strategy that `config` names; a collective but for `local`."""
    if config.strategy == "local":
        return Local(model)
    if config.strategy == "allreduce":
        return AllReduce(model, stop)
    return Gossip(model, optimizers, config.gossip, seed=config.seed, spans=spans)
