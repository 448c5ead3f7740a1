"""The means of gradients over the ranks of an island, while backward makes them."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossipgrad.comm import BucketPlan, TensorSpec

__all__ = ["IslandGradients"]

_BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel


class IslandGradients:
    """Replaces gradients by their mean over an island, as DistributedDataParallel does.

    The collectives of a backward pass begin as buckets of gradients are complete, and end with the
    pass. A parameter without a gradient counts as zeros if another rank has one. Gradients that no
    pass made are averaged before the step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], process_group: dist.ProcessGroup
    ) -> None:
        self.is_off = False  # gradients are accumulated without a collective
        self.is_fresh = False  # gradients were averaged since the last step
        self._group, self._size = process_group, process_group.size()
        self._buckets: list[_GradientBucket] = []
        self._bucket_of: dict[int, _GradientBucket] = {}
        self._begun: list[tuple[_GradientBucket, Any]] = []
        self._is_in_pass = False
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_device.setdefault(parameter.device, []).append(parameter)
        for each in by_device.values():
            specs = [TensorSpec.of(f"gradient {n}", p) for n, p in enumerate(each)]
            for layout in BucketPlan.make(specs, bucket_bytes=_BUCKET_BYTES).buckets:
                self._buckets.append(_GradientBucket([each[index] for index in layout.indices]))
        self._handles: list[RemovableHandle] = []
        own = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            if (means := own()) is not None:
                means._note(parameter)

        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[id(parameter)] = bucket
                self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def before_step(self) -> None:
        """Average the gradients unless a backward pass has since the last step."""
        if not self.is_fresh:
            self._end_pass()
        self.is_fresh = False

    def _note(self, parameter: Tensor) -> None:
        """Note that a gradient is complete; begin the collectives of buckets that are."""
        if self.is_off:
            return
        if not self._is_in_pass:
            self._is_in_pass = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self._bucket_of[id(parameter)].missing.discard(id(parameter))
        # In the same order on all ranks.
        while len(self._begun) < len(self._buckets):
            bucket = self._buckets[len(self._begun)]
            if bucket.missing:
                return
            self._begin(bucket)

    @torch.no_grad()
    def _begin(self, bucket: "_GradientBucket") -> None:
        flat = bucket.fill(self._size)
        self._begun.append((bucket, dist.all_reduce(flat, group=self._group, async_op=True)))

    @torch.no_grad()
    def _end_pass(self) -> None:
        try:
            for bucket in self._buckets[len(self._begun) :]:
                self._begin(bucket)
            for bucket, work in self._begun:
                work.wait()
                bucket.read()
            self.is_fresh = True
        finally:
            self._begun, self._is_in_pass = [], False
            for bucket in self._buckets:
                bucket.expect_all()


class _GradientBucket:
    """Gradients that are averaged together, and flags of which there are."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self._flat = torch.empty(
            sum(self._sizes) + len(self._sizes), dtype=first.dtype, device=first.device
        )
        *pieces, self._flags = self._flat.split([*self._sizes, len(self._sizes)])
        self._pieces = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        self.expect_all()

    def expect_all(self) -> None:
        """Expect all gradients once more."""
        self.missing = {id(p) for p in self.parameters}

    def fill(self, ranks: int) -> Tensor:
        """Return this rank's share of the mean, flat."""
        self._flags.fill_(1)
        for index, (p, piece) in enumerate(zip(self.parameters, self._pieces, strict=True)):
            if p.grad is None:
                piece.zero_()
                self._flags[index] = 0
            else:
                TensorSpec.of("a gradient", p.grad)  # raises: it may be sparse
                piece.copy_(p.grad)
        return self._flat.div_(ranks)

    def read(self) -> None:
        """Set the gradients to the means, where any rank has one."""
        for index, (p, piece) in enumerate(zip(self.parameters, self._pieces, strict=True)):
            if p.grad is not None:
                p.grad.copy_(piece)
            elif self._flags[index] > 0:
                p.grad = piece.clone()
