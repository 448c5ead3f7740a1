"""What all strategies share in which gradients are averaged over all ranks in every step."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.comm import distance_to_mean, mean_inside, statistics
from gossipgrad.train._evaluate import Evaluation, TestPart, mean_of

from ._stopping import LockstepStop, explain
from ._strategy import RunningStrategy, Traffic, all_ranks


def share_muon(optimizers: Sequence[Optimizer]) -> None:
    """Let the ranks share the work of `gg.Muon`: all have equal weights and gradients."""
    for optimizer in optimizers:
        if isinstance(optimizer, gg.Muon) and optimizer.process_group is None:
            optimizer.process_group = dist.group.WORLD


class Lockstep(RunningStrategy):
    """No rank can be a step ahead of another, so weights are equal and need no consensus."""

    def __init__(self, model: nn.Module, stop: threading.Event) -> None:
        super().__init__()
        self.model = model
        self._replica = model
        self._world_size = dist.get_world_size()
        self._bytes_sent = 0
        self._exposed_seconds = 0.0
        self._stopper = LockstepStop(stop)

    def shrinking(self) -> dict[str, Any]:
        """All ranks; what averages gradients is built again for each shape."""
        return {"process_group": all_ranks(), "wrap": self._wrap}

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Averages the gradients of the replica as it is now; a collective."""
        raise NotImplementedError

    def traffic(self) -> Traffic:
        return Traffic(bytes_sent=self._bytes_sent, exposed_seconds=self._exposed_seconds)

    def state_dict(self) -> dict[str, Any]:
        return {"bytes_sent": self._bytes_sent, "exposed_seconds": self._exposed_seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._bytes_sent = state["bytes_sent"]
        self._exposed_seconds = state["exposed_seconds"]

    def close(self) -> None:
        """Nothing to release: the process group is not this object's."""

    def agree(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value)
        return values

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        try:
            return self._stopper.should_stop(step)
        except RuntimeError as error:
            raise explain(error, "an all-reduce") from error

    def forward(self, x: Any) -> Any:
        try:
            return super().forward(x)
        except RuntimeError as error:
            raise explain(error, "an all-reduce") from error

    def backward(self, loss: Tensor) -> None:
        try:
            loss.backward()
            self._finish_backward()
        except RuntimeError as error:
            raise explain(error, "an exchange of gradients") from error

    def _finish_backward(self) -> None:
        """What has to come between the backward pass and the update."""

    def evaluate(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation:
        """Evaluate the replica, shared out over the ranks."""
        try:
            with mean_inside(statistics(self._replica).values(), self._mean):
                total = test.sum_share(self._replica)
                dist.all_reduce(total)
                accuracy = mean_of(total)
                return Evaluation(
                    accuracy=accuracy,
                    is_consensus=True,
                    consensus_distance=self._consensus_distance(),
                    final=final,
                    weights=test.weights(self._replica, accuracy, final=final),
                )
        except RuntimeError as error:
            raise explain(error, "an evaluation") from error

    def _mean(self, tensor: Tensor) -> Tensor:
        """Makes a tensor its mean over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor.div_(self._world_size)

    def _consensus_distance(self) -> float:
        # Sums of equal float32 are exact in float64: equal replicas give 0, whatever their number.
        mine = nn.utils.parameters_to_vector(self._replica.parameters()).detach().double()
        return distance_to_mean([(mine, self._mean(mine.clone()))], self._mean)
