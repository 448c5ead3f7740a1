"""What all strategies share in which gradients are averaged over all ranks in every step."""

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossipgrad.comm import distance_to_mean, mean_buffers
from gossipgrad.errors import GossipError
from gossipgrad.train._evaluate import Evaluation, TestPart, copy_of, mean_of
from gossipgrad.train._result import RunStopped

from ._stopping import LockstepStop, explain
from ._strategy import RunningStrategy, all_ranks, alone

_UNUSED_TAG = 1


class Lockstep(RunningStrategy):
    """No rank can be a step ahead of another, so weights are equal and need no consensus.

    Statistics of BatchNorm are those of each rank's own samples: what is evaluated and exported has
    their mean over the ranks, as with gossip; training goes on with each rank's own.

    When a peer dies, the step it is missed in raises, and so the run ends. When the run is stopped,
    ranks agree on the step before which all stop, one or two steps after the last was told, and the
    last evaluation is that of a run that came to its end. A rank whose peers are not told within
    two seconds leaves them, and they, who find it gone, take that for their stop: all evaluate and
    export their own replica, whose weights are those of all ranks, or one step behind, and whose
    statistics are its own.

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
        group = dist.group.WORLD
        assert group is not None
        self._stopper = LockstepStop(
            group.get_group_store(), group.rank(), group.size(), self._part
        )

    def shrinking(self) -> dict[str, Any]:
        """All ranks; what averages gradients is made anew for each shape."""
        return {"process_group": all_ranks(), "wrap": self._wrap}

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Averages the gradients of the replica as it is now; a collective."""
        raise NotImplementedError

    def agree(self, value: Any) -> list[Any]:
        """What every rank has; see `RunningStrategy.agree`."""
        if self._stopper.is_disconnected:
            raise GossipError("the ranks stopped apart")
        told: list[Any] = [None] * self._world_size
        dist.all_gather_object(told, value)
        return told

    def should_stop(self, step: int) -> bool:
        """Whether the step is the one agreed on; see `RunningStrategy.should_stop`."""
        return self._stopper.should_stop(step)

    def forward(self, x: Any) -> Any:
        """Run the forward pass; see `RunningStrategy.forward`."""
        try:
            return super().forward(x)
        except RuntimeError as error:
            raise self.explain(error) from error

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the replica, shared out over the ranks; alone if these have parted."""
        if not self._stopper.is_disconnected:
            try:
                with mean_buffers(self._replica, self._mean):
                    total = test.sum_share(self._replica)
                    dist.all_reduce(total)
                    return Evaluation(
                        accuracy=mean_of(total),
                        is_consensus=True,
                        consensus_distance=self._consensus_distance(),
                        final=final,
                        weights=copy_of(self._replica) if final else {},
                    )
            except RuntimeError as error:
                lost = self.explain(error)
                if not isinstance(lost, RunStopped):
                    raise lost from error
        own = any(buffer.is_floating_point() for buffer in self._replica.buffers())
        statistics = ", and its statistics of BatchNorm those of its own samples" if own else ""
        self.notes.append(
            "no consensus: the ranks stopped apart; this one's weights may be a step behind those "
            f"of others{statistics}"
        )
        return alone(self._replica, test, final=True, is_consensus=False)

    def explain(self, error: RuntimeError, what: str = "an all-reduce") -> RuntimeError:
        """The error to raise for one of a collective; local, and waits for the word to stop."""
        lost = explain(error, self._stop, what, is_requested=self._stopper.is_requested)
        if isinstance(lost, RunStopped):
            self._stopper.disconnect()
        return lost

    def _part(self) -> None:
        """End this rank's connections, so that no one waits for it."""
        assert dist.group.WORLD is not None
        _break(dist.group.WORLD)

    def _mean(self, tensor: Tensor) -> Tensor:
        """Makes a tensor its mean over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor.div_(self._world_size)

    def _consensus_distance(self) -> float:
        # Sums of equal float32 are exact in float64: equal replicas give 0, whatever their number.
        mine = nn.utils.parameters_to_vector(self._replica.parameters()).detach().double()
        return distance_to_mean([(mine, self._mean(mine.clone()))], self._mean)


def _break(group: dist.ProcessGroup) -> None:
    """End what is under way in `group`, here and on the others, who would wait for this rank.

    A deadline that expires is the one thing that makes Gloo do so. It does not expire on a
    connection that is broken already, so each is tried.
    """
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                receiving = group.recv([torch.empty(1)], rank, _UNUSED_TAG)
                receiving.wait(timedelta(milliseconds=1))
