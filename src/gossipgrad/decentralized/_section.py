"""A section of the payload: tensors of one kind and device that travel in the same rounds."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossipgrad.comm import BucketPlan, Part, Snapshot, SnapshotPool, is_sharded, split, widened
from gossipgrad.decentralized._mixing import delta_of, mix, replace
from gossipgrad.decentralized._tensors import Entry
from gossipgrad.topology import Peers

__all__ = ["Delta", "Meeting", "Section", "Sendable"]

Sendable = tuple[Tensor, Callable[[], None] | None]
"""What is sent of a bucket, and what returns when that is filled; None if it is."""


class Meeting(NamedTuple):
    """Which round it is, and who is met."""

    round: int
    peers: Peers


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """`received - snapshot` of one bucket.

    Attributes:
        flat: Shape `(numel,)`, at least fp32.
        pieces: Views of it in the shapes of the bucket's tensors.
        square: Its squared length, where that tells the consensus distance.
    """

    flat: Tensor
    pieces: list[Tensor]
    square: Tensor | None

    def add_to(self, total: Tensor, weight: float) -> None:
        """Adds `weight` times itself to a whole flat bucket."""
        total.add_(self.flat, alpha=weight)


class Section:
    """Buckets over some entries, their snapshots, and the residuals of narrow weights.

    Args:
        entries: The tensors, all on one device, in the order of the forward pass.
        first_bucket: Where this section's buckets begin in the channel's plan.
        bucket_bytes: Bytes at which a bucket is full.
        wire_dtype: What travels, None for each tensor's own type.
        snapshots: How many snapshots may be held at once.
        of_weights: Whether these are the weights: narrow ones get an fp32 residual, and their
            deltas tell the consensus distance.
        wire: What travels of the buckets, where that is not all of them: as many buckets.

    Attributes:
        plan: How the tensors lie in buckets.
        wire: What travels of each bucket.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        first_bucket: int,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None,
        snapshots: int,
        of_weights: bool,
        wire: Callable[[BucketPlan], BucketPlan] = lambda plan: plan,
    ) -> None:
        self.entries = list(entries)
        self.device = entries[0].parameter.device
        self.plan = BucketPlan.make(
            [entry.spec for entry in entries], bucket_bytes=bucket_bytes, wire_dtype=wire_dtype
        )
        self.wire = wire(self.plan)
        self.first_bucket = first_bucket
        self.measures_distance = of_weights
        self.pool = SnapshotPool(self.wire, self.device, snapshots)
        self.clamped = torch.zeros((), dtype=torch.int64, device=self.device)
        self._lasting = [self._lasting_tensors(layout.indices) for layout in self.plan.buckets]
        self._residuals: list[Tensor | None] = [None] * len(self.entries)
        if of_weights:
            for index, entry in enumerate(self.entries):
                if widened(entry.spec.dtype) != entry.spec.dtype:
                    self._residuals[index] = torch.zeros(
                        entry.spec.shape, dtype=torch.float32, device=self.device
                    )

    @property
    def memory_bytes(self) -> int:
        """Snapshots and residuals held."""
        residuals = sum(4 * r.numel() for r in self._residuals if r is not None)
        return self.pool.size_bytes + residuals

    def tensors(self, bucket: int) -> list[Tensor | None]:
        """The live tensors of a bucket, None where there is none yet."""
        lasting = self._lasting[bucket]
        if lasting is not None:
            return list(lasting)
        return [self.entries[i].tensor() for i in self.plan.buckets[bucket].indices]

    def residuals(self, bucket: int) -> list[Tensor | None]:
        """The residuals of a bucket's tensors."""
        return [self._residuals[i] for i in self.plan.buckets[bucket].indices]

    @property
    def narrow(self) -> list[tuple[Entry, Tensor]]:
        """The entries of narrow weights, with their residuals."""
        pairs = zip(self.entries, self._residuals, strict=True)
        return [(entry, residual) for entry, residual in pairs if residual is not None]

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a channel must know of the buckets."""
        return self.wire.parts

    def fill(self, snapshot: Snapshot, bucket: int, meeting: Meeting) -> Sendable:
        """Copies what travels of a bucket into a snapshot."""
        return snapshot.take(bucket, self.tensors(bucket))

    @torch.no_grad()
    def receive(
        self,
        bucket: int,
        received: Tensor,
        sent: Tensor,
        meeting: Meeting,
        *,
        taken: bool,
    ) -> Delta:
        """The delta of what was received, in place; with `taken`, what was received is that."""
        dtype = widened(self.plan.buckets[bucket].dtype)
        flat = received if taken else delta_of(received, sent, dtype)
        return self.delta(bucket, flat, meeting.round)

    @torch.no_grad()
    def delta(self, bucket: int, flat: Tensor, round: int) -> Delta:
        """A delta of a round, ready to be mixed."""
        pieces = split(flat, self.plan, self.plan.buckets[bucket])
        if not self.measures_distance:
            return Delta(flat, pieces, None)
        # torch.dot rounds by the thread, and by where in memory `flat` begins: no run repeats then.
        return Delta(flat, pieces, torch.linalg.vector_norm(flat).square())

    @torch.no_grad()
    def mix(self, bucket: int, delta: Delta, weight: float) -> None:
        """Adds `weight * delta` to a bucket's tensors that exist; clamps what must not be < 0."""
        lasting = self._lasting[bucket]
        if lasting is not None and lasting[0].dtype == delta.flat.dtype:
            torch._foreach_add_(lasting, delta.pieces, alpha=weight)
            return
        pieces = zip(
            self.plan.buckets[bucket].indices,
            self.tensors(bucket),
            delta.pieces,
            self.residuals(bucket),
            strict=True,
        )
        there = [(i, v, d, e) for i, v, d, e in pieces if v is not None]
        mix(
            [v for _, v, _, _ in there], [d for _, _, d, _ in there], weight, [e for *_, e in there]
        )
        for index, v, _, _ in there:
            if self.entries[index].non_negative:
                self.clamped += (v < 0).sum()
                v.clamp_(min=0)

    def _lasting_tensors(self, indices: Sequence[int]) -> list[Tensor] | None:
        """A bucket's tensors if they are the same objects in every round: whole parameters."""
        entries = [self.entries[index] for index in indices]
        if any(entry.key or entry.rows or is_sharded(entry.parameter) for entry in entries):
            return None
        return [entry.parameter for entry in entries]

    @torch.no_grad()
    def load(self, flats: Sequence[Tensor]) -> None:
        """Overwrites all tensors that exist with those in `flats`, one flat tensor a bucket."""
        for bucket, flat in enumerate(flats):
            layout = self.plan.buckets[bucket]
            pieces = split(flat, self.plan, layout)
            for v, total, e in zip(
                self.tensors(bucket), pieces, self.residuals(bucket), strict=True
            ):
                if v is not None:
                    replace(v, total, e)

    def clear_residuals(self, parameters: Container[str]) -> None:
        """Forgets what rounding took away from parameters that were written anew."""
        for entry, residual in zip(self.entries, self._residuals, strict=True):
            if residual is not None and entry.spec.name in parameters:
                residual.zero_()

    @torch.no_grad()
    def show(self, flats: Sequence[Tensor], kept: list[tuple[Tensor, Tensor]]) -> None:
        """Overwrites the tensors for a while; each goes to `kept` first, with a copy of it."""
        for bucket, flat in enumerate(flats):
            pieces = split(flat, self.plan, self.plan.buckets[bucket])
            for v, shown in zip(self.tensors(bucket), pieces, strict=True):
                if v is not None:
                    kept.append((v, v.clone()))
                    v.copy_(shown)

    @torch.no_grad()
    def totals(self) -> list[Tensor]:
        """All tensors with their residuals, widened: one new flat tensor a bucket."""
        flats = []
        for bucket, layout in enumerate(self.plan.buckets):
            flat = torch.empty(layout.part.numel, dtype=widened(layout.dtype), device=self.device)
            pieces = split(flat, self.plan, layout)
            for v, total, e in zip(
                self.tensors(bucket), pieces, self.residuals(bucket), strict=True
            ):
                total.zero_() if v is None else total.copy_(v)
                if e is not None:
                    total.add_(e)
            flats.append(flat)
        return flats
