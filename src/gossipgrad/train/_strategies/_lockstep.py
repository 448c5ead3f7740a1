"""What all strategies share in which gradients are averaged over all ranks in every step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from gossipgrad.train._evaluate import Evaluation, TestPart, copy_of
from gossipgrad.train._result import RunStopped

from ._lost import explained
from ._strategy import Strategy, alone


class Lockstep(Strategy):
    """No rank can be a step ahead of another, so weights are equal and need no consensus.

    Statistics of BatchNorm are those of each rank's own samples: what is evaluated and exported has
    their mean over the ranks, as with gossip; training goes on with each rank's own.

    When a peer dies, the step it is missed in raises, and so the run ends. When the run is
    stopped, a rank caught inside an all-reduce finds its peer gone: for it, too, that is the stop.

    Args:
        model: The replica.
        stop: Set when the run is told to stop.
    """

    def __init__(self, model: nn.Module, stop: threading.Event) -> None:
        super().__init__()
        self.model = model
        self._replica = model
        self._stop = stop
        self._world_size = dist.get_world_size()

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the replica, shared out over the ranks; alone after a stop."""
        if not self._stop.is_set():
            try:
                with self._mean_buffers():
                    correct = test.count_share(self._replica)
                    dist.all_reduce(correct)
                    return Evaluation(
                        accuracy=int(correct) / test.num_labels,
                        is_consensus=True,
                        consensus_distance=self._consensus_distance(),
                        final=final,
                        weights=copy_of(self._replica) if final else {},
                    )
            except RuntimeError as error:
                lost = self._explained(error)
                if not isinstance(lost, RunStopped):
                    raise lost from error
        return alone(self._replica, test, final=True, is_consensus=True)

    @contextmanager
    def _mean_buffers(self) -> Iterator[None]:
        """Inside, floating buffers are the mean over ranks; outside, this rank's own."""
        buffers = [b for b in self._replica.buffers() if b.is_floating_point()]
        kept = [buffer.clone() for buffer in buffers]
        try:
            for buffer in buffers:
                dist.all_reduce(buffer)
                buffer.div_(self._world_size)
            yield
        finally:
            for buffer, own in zip(buffers, kept, strict=True):
                buffer.copy_(own)

    def _explained(self, error: RuntimeError) -> RuntimeError:
        return explained(error, self._stop, "an all-reduce")

    def _consensus_distance(self) -> float:
        # Sums of equal float32 are exact in float64: equal replicas give 0, whatever their number.
        mine = nn.utils.parameters_to_vector(self._replica.parameters()).detach().double()
        mean = mine.clone()
        dist.all_reduce(mean)
        square = (mine - mean / self._world_size).square().sum()
        dist.all_reduce(square)
        return float(square / self._world_size) ** 0.5
