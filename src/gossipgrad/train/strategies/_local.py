"""No communication at all."""

from typing import Any

import torch.distributed as dist
from torch import nn

from gossipgrad.comm import Group
from gossipgrad.train._evaluate import Evaluation, TestPart

from ._strategy import Replica, RunningStrategy, Setting, Strategy, Traffic, alone


class Local(RunningStrategy):
    """Every rank trains on its own: the lower bound of cost and of what sharing gains."""

    meets = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def shrinking(self) -> dict[str, Any]:
        """Each rank shrinks its own."""
        return {"process_group": Group(dist.HashStore(), 0, 1)}

    def evaluate(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation:
        """Evaluate this rank's replica on the whole test part."""
        return alone(self.model, test, final=final, is_consensus=False)

    def traffic(self) -> Traffic:
        return Traffic()

    def close(self) -> None:
        pass


class LocalStrategy(Strategy):
    """No communication."""

    name = "local"
    help = "not at all"
    bytes_are = "counted"
    communicates = False
    needs_every_rank = False

    def build(self, replica: Replica, setting: Setting, options: None) -> Local:
        return Local(replica.model)
