"""One group of merged gradients: storage, selection, messages and the mean."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gossipgrad.comm import Group, widened
from gossipgrad.compression import top_k
from gossipgrad.errors import GossipError
from gossipgrad.sparsification._messages import Coordinates, Gather, Split, unequal_steps
from gossipgrad.sparsification._streams import Staging

__all__ = ["DENSE_DTYPES", "MergedGroup", "Unsent"]

DENSE_DTYPES = {"dense": None, "fp16": torch.float16, "bf16": torch.bfloat16}

_PADDING_BYTES = 64  # of a sparse message, at most: no reason to send a small tensor whole
_STEPS = 64  # elements at the end of a dense one
_GATHERING_RANKS = 8  # with more, an all-gather's bytes are too many


class Unsent(NamedTuple):
    """What is not sent yet of one tensor; None for nothing, or zeros."""

    residual: Tensor | None = None
    velocity: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is sent of a group in a round, and whether all values are finite."""

    sent: Coordinates
    velocities: Float[Tensor, " count"] | None
    finite: Tensor


class MergedGroup:
    """Consecutive tensors whose gradients are sent as one message."""

    # Two flat buffers of all its elements: one is the residual, the other receives residual plus
    # gradient. After the largest elements are removed the second *is* the next residual, and the
    # old one, zeroed, collects the sum over ranks. So nothing is copied, and during a round
    # `roll_back` can restore the old residual.

    def __init__(
        self,
        parameters: Sequence[Tensor],
        method: str,
        *,
        world_size: int,
        value_dtype: torch.dtype | None,
        momentum: float | None,
    ) -> None:
        self.method = method
        self.sizes = [p.numel() for p in parameters]
        self.numel = sum(self.sizes)
        self.count: int | None = None  # of coordinates to send; all, if all are as few bytes
        self.finite = True
        self.select_seconds = self.gather_seconds = self.add_seconds = 0.0  # of the last round
        self.step = 0, 0
        self._shapes = [p.shape for p in parameters]
        self._world_size = world_size
        self._momentum = momentum
        self._device = parameters[0].device
        self._staging = Staging(self._device)
        dtype = parameters[0].dtype
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        self.dtype = widened(dtype)
        self.dense_dtype = DENSE_DTYPES.get(method) or dtype
        self._value_dtype = value_dtype or self.dtype
        self._total, self._total_views = self._new()
        self._residual: Tensor | None = None
        self._residual_views: list[Tensor] = []
        self._velocity: Tensor | None = None
        self._velocity_views: list[Tensor] = []
        self._messages: Gather | Split | None = None
        self._chosen: _Chosen | None = None
        self._sends_zeros = False  # in this round
        self._old_kept = False  # whether the buffer of sums still holds the old residual
        self._moved: float | None = None  # the factor, after adding this round's gradient

    @property
    def sparse(self) -> bool:
        """Whether not everything is sent; otherwise an all-reduce moves fewer bytes."""
        return self.method == "sparse" and (self._messages is not None or self.count is None)

    @property
    def bytes_sent(self) -> int:
        """Bytes of one round: of sparse messages, or of a ring all-reduce."""
        if self.sparse:  # 0 before the number of coordinates is known
            return 0 if self._messages is None else self._messages.bytes_sent
        return self._all_reduce_bytes

    @property
    def _all_reduce_bytes(self) -> int:
        others = self._world_size - 1
        return 2 * others * self.numel * self.dense_dtype.itemsize // self._world_size

    @property
    def memory_bytes(self) -> int:
        """Memory in addition to the model: sums, residual, velocity and messages."""
        held = (self._total, self._residual, self._velocity)
        messages = 0 if self._messages is None else self._messages.memory_bytes
        return messages + sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def has_sum(self) -> bool:
        """Whether the mean over ranks of the last round is not zero."""
        return bool(self._total.any())

    def use_density(self, density: float) -> None:
        """Set the share that is sent from now on, one element or more."""
        count = min(self.numel, max(1, int(density * self.numel)))
        if self.count == count or self.method != "sparse":
            return
        self.count, self._messages = count, None
        if count == self.numel:
            return
        dtypes = self._value_dtype, self.dtype
        like = self.numel, count, self._world_size, dtypes, self._device
        messages: Gather | Split = Gather(*like)
        if self._world_size > _GATHERING_RANKS:
            messages = min(messages, Split(*like), key=lambda each: each.bytes_sent)
        padding = _PADDING_BYTES * (self._world_size - 1)
        if messages.bytes_sent - padding <= self._all_reduce_bytes:
            self._messages = messages

    def unsent(self) -> list[Unsent]:
        """Return what is not sent yet of each tensor."""
        none: list[Tensor | None] = [None] * len(self.sizes)
        residuals, velocities = self._residual_views or none, self._velocity_views or none
        return [Unsent(*each) for each in zip(residuals, velocities, strict=True)]

    @torch.no_grad()
    def load(self, unsent: Sequence[Unsent]) -> None:
        """Load the result of `unsent`, of this or other groups with the same tensors."""
        for tensor, (residual, velocity) in enumerate(unsent):
            if residual is not None:
                self._need_residual()
                self._residual_views[tensor].copy_(residual)
            if velocity is not None and self._momentum is not None:
                self._need_velocity()
                self._velocity_views[tensor].copy_(velocity)

    def free_buffers(self) -> None:
        """Free sums and messages after the last round; `unsent` stays."""
        self._total, self._total_views = torch.empty(0, dtype=self.dtype), []
        self._messages = None

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply what is not sent yet, which is in units of the loss scale."""
        for tensor in (self._residual, self._velocity):
            if tensor is not None:
                tensor.mul_(factor)

    @torch.no_grad()
    def begin(self, grads: Sequence[Tensor | None]) -> None:
        """Select from residual plus gradients and pack the message; None counts as zeros."""
        start = perf_counter()
        self._sends_zeros = False
        if self.sparse:
            self._need_residual()
        self._accumulate(grads)
        if self.sparse:
            self._select()
        self._staging.mark_written()
        self.select_seconds = perf_counter() - start

    @torch.no_grad()
    def begin_with_zeros(self) -> None:
        """Begin on a rank without gradients: what is not sent yet is unchanged."""
        self._sends_zeros = True
        if self._messages is not None:
            self._messages.pack_nothing(self.step)
        else:
            self._total.zero_()
        self._staging.mark_written()
        self.select_seconds = 0.0

    @torch.no_grad()
    def exchange(self, group: Group) -> None:
        """Run the collective and compute the mean over ranks; on the thread of collectives."""
        with self._staging.on_stream():
            if self._messages is not None:
                self._exchange_sparse(group, self._messages)
            else:
                self._exchange_dense(group)

    @torch.no_grad()
    def write(self, grads: Sequence[Tensor]) -> None:
        """Write the mean over ranks into the gradients."""
        self._staging.wait_received()
        torch._foreach_copy_(list(grads), self._total_views)

    @torch.no_grad()
    def accept(self) -> None:
        """End the round: what was sent and added up is no longer in the residual."""
        if self._messages is not None:
            self._keep_what_was_left_out(self._messages)
        elif not self._sends_zeros:
            self._residual, self._residual_views = None, []
        self._chosen, self._old_kept = None, False

    def _keep_what_was_left_out(self, messages: Gather | Split) -> None:
        """Put back into the residual what no owner has selected, and what rounding took of sums."""
        if not isinstance(messages, Split):
            return
        if messages.rounding is not None:
            self._need_residual()
            assert self._residual is not None
            self._with_room(self._residual).index_add_(0, *messages.rounding)
        if self._chosen is not None:
            assert self._residual is not None
            (indices, values), velocities = self._chosen.sent, self._chosen.velocities
            left_out = self._total[indices] == 0
            self._residual[indices[left_out]] = values[left_out]
            if self._velocity is not None and velocities is not None:
                self._velocity[indices[left_out]] = velocities[left_out]

    @torch.no_grad()
    def roll_back(self, grads: Sequence[Tensor | None]) -> None:
        """Restore the state before `begin(grads)`; up to rounding after the sums have arrived."""
        if self._sends_zeros:
            return
        self._staging.wait_received()
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            if self._velocity is not None and chosen.velocities is not None:
                self._velocity[chosen.sent.indices] = chosen.velocities
            if self._old_kept:
                self._swap()
            elif bool(chosen.finite):
                assert self._residual is not None
                self._residual[chosen.sent.indices] = chosen.sent.values
                added = grads if self._moved is None else self._velocity_views
                for residual, each in zip(self._residual_views, added, strict=True):
                    if each is not None:
                        residual.sub_(each)
        if self._moved:
            for velocity, grad in zip(self._velocity_views, grads, strict=True):
                if grad is not None:
                    velocity.sub_(grad)
                velocity.div_(self._moved)
        self._old_kept = False

    def _new(self) -> tuple[Tensor, list[Tensor]]:
        """Return zeros, with room for more elements behind them, and their views."""
        # For the steps of a dense round, or for the last row of a `Split`, which may be short.
        size = self.numel + max(_STEPS, self._world_size)
        flat = torch.zeros(size, dtype=self.dtype, device=self._device)[: self.numel]
        pieces = flat.split(self.sizes)
        return flat, [piece.view(s) for piece, s in zip(pieces, self._shapes, strict=True)]

    def _with_room(self, flat: Tensor) -> Tensor:
        """Return a buffer with the elements behind it."""
        return flat.as_strided((self.numel + max(_STEPS, self._world_size),), (1,))

    def _need_residual(self) -> None:
        if self._residual is None:
            self._residual, self._residual_views = self._new()

    def _need_velocity(self) -> None:
        if self._velocity is None:
            self._velocity, self._velocity_views = self._new()

    def _swap(self) -> None:
        assert self._residual is not None
        self._residual, self._total = self._total, self._residual
        self._residual_views, self._total_views = self._total_views, self._residual_views

    def _accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Write residual plus gradient, or plus velocity, into the buffer of sums."""
        self._moved = None
        if self._momentum is not None and _all_finite(grads):
            self._need_velocity()
            for velocity, grad in zip(self._velocity_views, grads, strict=True):
                velocity.mul_(self._momentum)
                if grad is not None:
                    velocity.add_(grad)
            self._moved = self._momentum
            grads = self._velocity_views
        kept = self._residual_views or [None] * len(self.sizes)
        for total, residual, grad in zip(self._total_views, kept, grads, strict=True):
            if grad is None:
                total.zero_() if residual is None else total.copy_(residual)
            elif residual is not None:
                torch.add(residual, grad, out=total)
            elif self.sparse or grad.dtype != total.dtype:
                torch.add(grad, 0.0, out=total)
            else:
                torch.mul(grad, 1 / self._world_size, out=total)
                continue
            if not self.sparse:  # divide first, as DistributedDataParallel: sums of fp16 overflow
                total.mul_(1 / self._world_size)

    def _select(self) -> None:
        assert self._messages is not None
        assert self.count is not None
        indices = top_k(self._total, self.count)
        chosen, sent = self._messages.pack(indices, self._total[indices], self.step)
        self._swap()
        self._old_kept = True
        assert self._residual is not None
        self._residual[chosen.indices] = chosen.values - sent.to(self.dtype)
        velocities = None
        if self._velocity is not None and self._moved is not None:
            velocities = self._velocity[chosen.indices]
            self._velocity[chosen.indices] = 0
        self._chosen = _Chosen(chosen, velocities, chosen.values.isfinite().all())

    def _exchange_sparse(self, group: Group, messages: Gather | Split) -> None:
        start = perf_counter()
        received = messages.exchange(group, self._staging)
        self.gather_seconds = perf_counter() - start
        start = perf_counter()
        if self._chosen is not None and not bool(self._chosen.finite):
            assert self._residual is not None
            self._residual.copy_(self._total)
        self._old_kept = False
        total = self._with_room(self._total).zero_()
        finite = True
        for indices, values in received:  # in the same order, so that all ranks round alike
            finite = finite and bool(values.isfinite().all())
            total.index_add_(0, indices, values.to(self.dtype))
        total.div_(self._world_size)
        self.finite = finite
        self.add_seconds = perf_counter() - start

    def _exchange_dense(self, group: Group) -> None:
        start = perf_counter()
        # The sum of the elements behind has one that is not 0 if all ranks are in the same step.
        total = self._with_room(self._total)[: self.numel + _STEPS]
        total[self.numel :] = 0
        total[self.numel + sum(self.step) % _STEPS] = 1
        host = self._staging.to_host(total.to(self.dense_dtype))
        group.all_reduce_(host)
        if host is not total:
            total.copy_(host)
        if int(total[self.numel :].count_nonzero()) > 1:
            raise GossipError(unequal_steps())
        self.finite = math.isfinite(float(self._total.sum()))
        self.gather_seconds = perf_counter() - start


def _all_finite(grads: Iterable[Tensor | None]) -> bool:
    """Whether all gradients are finite, by sums in a type that does not overflow."""
    return all(
        math.isfinite(float(grad.sum(dtype=widened(grad.dtype))))
        for grad in grads
        if grad is not None
    )
