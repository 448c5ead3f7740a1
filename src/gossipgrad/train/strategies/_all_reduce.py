"""Gradients averaged in every step by DistributedDataParallel."""

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gossipgrad.train._ring_clock import RingClock

from ._lockstep import Lockstep
from ._strategy import Replica, Setting, Strategy, Traffic

ALL_REDUCED = "computed: ring all-reduce, 2 (p - 1) / p of the gradient bytes"


class AllReduce(Lockstep):
    """DistributedDataParallel: gradients averaged over all ranks in every step.

    Exposed time runs from the moment that the last gradients of a step were handed over to the
    return of the backward pass; the wait for slower ranks is in it. Bytes are those of a ring
    all-reduce, computed and not counted.

    Buffers are rank 0's at the start and each rank's own from then on, as in every other strategy:
    DistributedDataParallel's `forward_sync_buffers`, by which all would train with the statistics
    of rank 0's samples, is off.

    Which gradients share a message is settled before the first step, by a backward pass of zeros,
    in the reverse of the order that parameters are defined in. DistributedDataParallel would do it
    after the first step, by the order in which gradients came: a run that is resumed would take its
    first step with other messages than one that was not, and where three ranks or more add up, the
    last bits go by an element's place in its message.
    """

    def __init__(self, model: nn.Module, stop: threading.Event) -> None:
        super().__init__(model, stop)
        self._clock = RingClock(self._world_size)
        self._wrap(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        parallel = nn.parallel.DistributedDataParallel(
            model, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        _settle_buckets(parallel, model)
        parallel.register_comm_hook(self._clock, RingClock.hook)
        self.model = parallel
        return parallel

    def traffic(self) -> Traffic:
        """Exposed time measured, bytes computed."""
        return Traffic(
            bytes_sent=self._clock.bytes_sent, exposed_seconds=self._clock.exposed_seconds
        )

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        clock = self._clock
        return {"bytes_sent": clock.bytes_sent, "exposed_seconds": clock.exposed_seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self._clock.bytes_sent = state["bytes_sent"]
        self._clock.exposed_seconds = state["exposed_seconds"]

    def close(self) -> None:
        """Nothing to release: the process group is not this object's."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass and with it the all-reduce; see `RunningStrategy.backward`."""
        try:
            loss.backward()
        except RuntimeError as error:
            raise self.explain(error) from error
        self._clock.backward_returned()


class AllReduceStrategy(Strategy):
    """DistributedDataParallel."""

    name = "allreduce"
    help = "DistributedDataParallel"
    bytes_are = ALL_REDUCED

    def build(self, replica: Replica, setting: Setting, options: None) -> AllReduce:
        """Begin to average gradients."""
        return AllReduce(replica.model, replica.stop)


def _settle_buckets(parallel: nn.parallel.DistributedDataParallel, model: nn.Module) -> None:
    """Has buckets made with the first forward pass to come as they then stay; a collective."""

    def zeros() -> Tensor:
        first, *others = (p.flatten()[:1].sum() * 0.0 for p in trained)
        return sum(others, start=first)

    trained = [p for p in model.parameters() if p.requires_grad]
    kept = model.__dict__.get("forward")
    model.forward = zeros
    try:
        parallel().backward()
    finally:
        if kept is None:
            del model.forward
        else:
            model.forward = kept
    model.zero_grad(set_to_none=True)
