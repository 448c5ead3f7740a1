"""One group of merged gradients: storage, selection, messages and the mean."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gossipgrad.comm import Group, widened
from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.errors import GossipError
from gossipgrad.sparsification._density import counts_of
from gossipgrad.sparsification._streams import make_staging

__all__ = ["DENSE_DTYPES", "CarriedOver", "MergedGroup", "Timing"]

DENSE_DTYPES = {"dense": None, "fp16": torch.float16, "bf16": torch.bfloat16}

_STEP_BYTES = 16  # at the end of a sparse message
_PADDING_BYTES = 16  # of a sparse message, at most: no reason to send a small tensor whole
_STEPS = 64  # elements at the end of a dense one


class CarriedOver(NamedTuple):
    """The carried-over state of one tensor; None for nothing, or zeros."""

    residual: Tensor | None = None
    velocity: Tensor | None = None
    rounds_without: int = 0
    """Rounds since a coordinate of it was last chosen."""


@dataclass(slots=True)
class Timing:
    """The times of one round of a group on this rank, in seconds."""

    select_seconds: float = 0.0
    gather_seconds: float = 0.0
    add_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The selection of a group in a round, and whether all values are finite."""

    indices: Int[Tensor, " count"]
    values: Float[Tensor, " count"]
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
        per_tensor: bool,
        value_dtype: torch.dtype | None,
        momentum: float | None,
    ) -> None:
        self.method = method
        self.sizes = [p.numel() for p in parameters]
        self.numel = sum(self.sizes)
        self.counts: tuple[int, ...] = ()
        self.finite = True
        self.rounds_without = torch.zeros(len(parameters), dtype=torch.int64)
        self.timing = Timing()
        self.step = 0, 0
        self._shapes = [p.shape for p in parameters]
        self._world_size = world_size
        self._per_tensor = per_tensor
        self._momentum = momentum
        self._device = parameters[0].device
        self._staging = make_staging(self._device)
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
        self._starts = torch.tensor([0, *self.sizes]).cumsum(0)
        self._format: SparseFormat | None = None
        self._message = self._gathered = torch.empty(0, dtype=torch.uint8)
        self._chosen: _Chosen | None = None
        self._sends_zeros = False  # in this round
        self._old_kept = False  # whether the buffer of sums still holds the old residual
        self._moved: float | None = None  # the factor, after adding this round's gradient

    @property
    def sparse(self) -> bool:
        """Whether not everything is sent; otherwise an all-reduce moves fewer bytes."""
        return self.method == "sparse" and (self._format is not None or not self.counts)

    @property
    def bytes_sent(self) -> int:
        """Bytes of one round: to each of the other ranks, or of gradients by a ring all-reduce."""
        others = self._world_size - 1
        if self.sparse:  # 0 before the number of coordinates is known
            form = self._format
            return 0 if form is None else others * (form.size_bytes + _STEP_BYTES)
        return self._all_reduce_bytes

    @property
    def _all_reduce_bytes(self) -> int:
        others = self._world_size - 1
        return 2 * others * self.numel * self.dense_dtype.itemsize // self._world_size

    @property
    def memory_bytes(self) -> int:
        """Memory in addition to the model: sums, residual, velocity and messages."""
        held = (self._total, self._residual, self._velocity, self._message, self._gathered)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def residual(self) -> Float[Tensor, " n"] | None:
        """The residual, flat; None if it is empty."""
        return self._residual

    @property
    def total(self) -> Float[Tensor, " n"]:
        """The mean over ranks of the last round, flat."""
        return self._total

    def use_densities(self, densities: Sequence[float]) -> None:
        """Set the densities from now on: of each tensor, or on average of all together."""
        counts = counts_of(self.sizes, densities, per_tensor=self._per_tensor)
        if self.counts == counts or self.method != "sparse":
            return
        self.counts, self._format = counts, None
        if sum(counts) < self.numel:
            form = SparseFormat(self.numel, sum(counts), self._value_dtype)
            least = (self._world_size - 1) * (form.size_bytes - _PADDING_BYTES)
            if least <= self._all_reduce_bytes:
                self._format = form
        if self._format is None:
            self._message = self._gathered = torch.empty(0, dtype=torch.uint8)
            return
        size = self._format.size_bytes + _STEP_BYTES
        self._message = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._gathered = torch.empty(
            size * self._world_size, dtype=torch.uint8, device=self._device
        )

    def carried_over(self) -> list[CarriedOver]:
        """Return the carried-over state of each tensor."""
        none: list[Tensor | None] = [None] * len(self.sizes)
        of = (self._residual_views or none, self._velocity_views or none, self.rounds_without)
        return [CarriedOver(r, v, int(without)) for r, v, without in zip(*of, strict=True)]

    @torch.no_grad()
    def load(self, carried: Sequence[CarriedOver]) -> None:
        """Load the result of `carried_over`, of this or other groups with the same tensors."""
        self.rounds_without = torch.tensor([each.rounds_without for each in carried])
        for at, (residual, velocity, _) in enumerate(carried):
            if residual is not None:
                self._need_residual()
                self._residual_views[at].copy_(residual)
            if velocity is not None and self._momentum is not None:
                self._need_velocity()
                self._velocity_views[at].copy_(velocity)

    def free_buffers(self) -> None:
        """Free sums and messages after the last round; `carried_over` stays."""
        self._total, self._total_views = torch.empty(0, dtype=self.dtype), []
        self._message = self._gathered = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply the carried-over state, which is in units of the loss scale."""
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
        self.timing = Timing(select_seconds=perf_counter() - start)

    @torch.no_grad()
    def begin_with_zeros(self) -> None:
        """Begin on a rank without gradients: the carried-over state is unchanged."""
        self._sends_zeros = True
        if self.sparse:
            assert self._format is not None
            indices = torch.arange(self._format.count, device=self._device)
            zeros = torch.zeros_like(indices, dtype=self.dtype)
            self._format.pack(indices, zeros, self._message[:-_STEP_BYTES])
            self._write_step()
        else:
            self._total.zero_()
        self._staging.mark_written()
        self.timing = Timing()

    @torch.no_grad()
    def exchange(self, group: Group) -> None:
        """Run the collective and compute the mean over ranks; on the thread of collectives."""
        with self._staging.on_stream():
            if self.sparse:
                self._exchange_sparse(group)
            else:
                self._exchange_dense(group)

    @torch.no_grad()
    def write(self, grads: Sequence[Tensor]) -> None:
        """Write the mean over ranks into the gradients."""
        self._staging.wait_received()
        torch._foreach_copy_(list(grads), self._total_views)

    def accept(self) -> None:
        """End the round: sent elements are no longer carried over."""
        if self._sends_zeros:
            return
        if not self.sparse:
            self._residual, self._residual_views = None, []
            self.rounds_without.zero_()
        if self._chosen is not None:
            found = torch.searchsorted(self._chosen.indices.cpu(), self._starts).diff() > 0
            self.rounds_without = torch.where(found, 0, self.rounds_without + 1)
        self._chosen, self._old_kept = None, False

    @torch.no_grad()
    def roll_back(self, grads: Sequence[Tensor | None]) -> None:
        """Restore the state before `begin(grads)`; up to rounding after the sums have arrived."""
        if self._sends_zeros:
            return
        self._staging.wait_received()
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            if self._velocity is not None and chosen.velocities is not None:
                self._velocity[chosen.indices] = chosen.velocities
            if self._old_kept:
                self._swap()
            elif bool(chosen.finite):
                assert self._residual is not None
                self._residual[chosen.indices] = chosen.values
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

    def _write_step(self) -> None:
        self._message[-_STEP_BYTES:].view(torch.int64).copy_(torch.tensor(self.step))

    def _new(self) -> tuple[Tensor, list[Tensor]]:
        """Return zeros, with room for `_STEPS` more elements behind them, and their views."""
        room = torch.zeros(self.numel + _STEPS, dtype=self.dtype, device=self._device)
        flat = room[: self.numel]
        pieces = flat.split(self.sizes)
        return flat, [piece.view(s) for piece, s in zip(pieces, self._shapes, strict=True)]

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
            elif residual is None:
                torch.add(grad, 0.0, out=total)
            else:
                torch.add(residual, grad, out=total)

    def _select(self) -> None:
        assert self._format is not None
        if self._per_tensor:
            pieces = self._total.split(self.sizes)
            indices = torch.cat(
                [
                    top_k(piece, count) + int(start)
                    for piece, count, start in zip(pieces, self.counts, self._starts, strict=False)
                    if count  # none for a tensor without elements
                ]
            )
        else:
            indices = top_k(self._total, self.counts[0])
        values = self._total[indices]
        sent = self._format.pack(indices, values, self._message[:-_STEP_BYTES])
        self._write_step()
        self._swap()
        self._old_kept = True
        assert self._residual is not None
        self._residual[indices] = values - sent.to(values.dtype)
        velocities = None
        if self._velocity is not None and self._moved is not None:
            velocities = self._velocity[indices]
            self._velocity[indices] = 0
        self._chosen = _Chosen(indices, values, velocities, values.isfinite().all())

    def _exchange_sparse(self, group: Group) -> None:
        start = perf_counter()
        gathered = self._gathered
        host = self._staging.to_host(self._message)
        received = gathered if host is self._message else torch.empty_like(gathered, device="cpu")
        group.all_gather_into_(received, host)
        messages = self._staging.from_host(received, gathered)
        self.timing.gather_seconds = perf_counter() - start
        self._add_up(messages)

    def _add_up(self, messages: Tensor) -> None:
        form, chosen = self._format, self._chosen
        assert form is not None
        start = perf_counter()
        unpacked = []
        parts = messages.split(form.size_bytes + _STEP_BYTES)
        steps = [tuple(part[-_STEP_BYTES:].view(torch.int64).tolist()) for part in parts]
        if len(set(steps)) > 1:
            raise GossipError(_unequal([step for step, _ in steps]))
        for rank, message in enumerate(part[:-_STEP_BYTES] for part in parts):
            try:
                unpacked.append(form.unpack(message))
            except ValueError as error:
                raise GossipError(f"rank {rank} sent what is no message: {error}") from error
        if chosen is not None and not bool(chosen.finite):
            assert self._residual is not None
            self._residual.copy_(self._total)
        self._old_kept = False
        self._total.zero_()
        finite = True
        for indices, values in unpacked:  # in rank order, so that all ranks round alike
            finite = finite and bool(values.isfinite().all())
            self._total.index_add_(0, indices, values.to(self.dtype))
        self._total.div_(self._world_size)
        self.finite = finite
        self.timing.add_seconds = perf_counter() - start

    def _exchange_dense(self, group: Group) -> None:
        start = perf_counter()
        # The sum of the elements behind has one that is not 0 if all ranks are in the same step.
        total = self._total.as_strided((self.numel + _STEPS,), (1,))
        total[self.numel :] = 0
        total[self.numel + sum(self.step) % _STEPS] = 1
        is_narrow = self.dense_dtype.itemsize < self.dtype.itemsize
        if is_narrow:  # divide first: sums of fp16 overflow soon
            host = self._staging.to_host(total.div_(self._world_size).to(self.dense_dtype))
        else:
            host = self._staging.to_host(total)
        group.all_reduce_(host)
        if host is not total:
            total.copy_(host)
        if int(total[self.numel :].count_nonzero()) > 1:
            raise GossipError(_unequal(()))
        if not is_narrow:
            self._total.div_(self._world_size)
        self.finite = math.isfinite(float(self._total.sum()))
        self.timing.gather_seconds = perf_counter() - start


def _unequal(steps: Sequence[int]) -> str:
    of_ranks = f" (steps so far, by rank: {', '.join(map(str, steps))})" if steps else ""
    return (
        f"the ranks are in different steps in one round{of_ranks}, or evaluate a closure at "
        "different weights: replicas would drift apart. Make the same passes and steps on every "
        "rank, and average the loss that a closure returns over ranks"
    )


def _all_finite(grads: Iterable[Tensor | None]) -> bool:
    """Whether all gradients are finite, by sums in a type that does not overflow."""
    return all(
        math.isfinite(float(grad.sum(dtype=widened(grad.dtype))))
        for grad in grads
        if grad is not None
    )
