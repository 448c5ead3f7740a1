"""What travels in a round: flows of tensors, dealt into buckets."""

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm import (
    BucketLayout,
    BucketPlan,
    Part,
    Snapshot,
    SnapshotPool,
    is_sharded,
    widened,
)
from gossipgrad.compression import SharedMask
from gossipgrad.engine._mixing import delta_of, mix, replace
from gossipgrad.engine._settings import RoundSettings
from gossipgrad.engine._tensors import Entry

__all__ = ["Bucket", "Delta", "Flow", "Phase", "Sendable"]

Sendable = tuple[Tensor, Callable[[], None] | None]
"""What is sent of a bucket, and what returns when that is filled; None if it is."""

_STRIDE = 0x9E3779B97F4A7C15  # odd: no two buckets share a seed


class Phase(enum.Enum):
    """When a flow is exchanged in a step."""

    BEFORE_UPDATE = "before_update"
    """Sent and mixed before the optimizer steps: gradients, as backward finishes them."""
    AFTER_UPDATE = "after_update"
    """Sent and mixed after the optimizer has stepped."""
    ACROSS = "across"
    """Sent as a step begins, and mixed when the optimizer has stepped."""
    NEVER = "never"
    """Not sent: part of averages over all ranks alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """`received - snapshot` of one bucket.

    Attributes:
        flat: Shape `(numel,)` of what travelled, at least fp32.
        square: Its squared length, where that tells the consensus distance.
        at: Which coordinates of the bucket they are; None for all of them.
    """

    flat: Tensor
    square: Tensor | None = None
    at: "Coordinates | None" = None

    def add_to(self, total: Tensor, weight: float) -> None:
        """Adds `weight` times itself to a whole flat bucket."""
        if self.at is None:
            total.add_(self.flat, alpha=weight)
        else:
            values = self.flat[: self.at.count]
            total.index_add_(0, self.at.in_bucket(), values, alpha=weight)


class Bucket:
    """A run of a flow's tensors that travel as one message, and what is kept of them.

    Attributes:
        number: Its place in the channel's plan.
        entries: Its tensors, in the order in which they lie in a flat bucket.
        numel: Elements of all of them.
        dtype: Their type.
        residuals: One fp32 tensor for each tensor that is narrower, and mixed as a weight: what
            rounding took away from it. None for others.
        clamped: How many elements mixing would have left below zero, where they may not be.
        anchor: A flat, wide tensor that whatever is mixed moves as it moves the tensors, so that
            their difference is what optimizers have done; None: there is none.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        layout: BucketLayout,
        number: int,
        *,
        are_weights: bool,
    ) -> None:
        self.number = number
        self.entries = [entries[index] for index in layout.indices]
        self.numel, self.dtype = layout.part.numel, layout.dtype
        self._shapes = [entry.spec.shape for entry in self.entries]
        self._sizes = [entry.spec.numel for entry in self.entries]
        self.device = self.entries[0].parameter.device
        self.clamped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.anchor: Tensor | None = None
        self._are_weights = are_weights
        narrow = are_weights and widened(self.dtype) != self.dtype
        self.residuals: list[Tensor | None] = [
            torch.zeros(e.spec.shape, dtype=torch.float32, device=self.device) if narrow else None
            for e in self.entries
        ]
        # Whole parameters are the same objects in every round.
        self._lasting: list[Tensor] | None = None
        if all(e.read is None and not e.rows and not is_sharded(e.parameter) for e in self.entries):
            self._lasting = [e.parameter for e in self.entries]

    @property
    def memory_bytes(self) -> int:
        """Memory held beside the model."""
        anchor_bytes = 0 if self.anchor is None else self.anchor.nbytes
        return anchor_bytes + sum(4 * r.numel() for r in self.residuals if r is not None)

    def tensors(self) -> list[Tensor | None]:
        """The live tensors, None where there is none yet."""
        if self._lasting is not None:
            return list(self._lasting)
        return [entry.tensor() for entry in self.entries]

    def snapshot(self, into: Snapshot, place: int, round: int) -> Sendable:
        """Copies what a round sends of it into a snapshot, where it is bucket `place`."""
        return into.take(place, self.tensors())

    @torch.no_grad()
    def delta(self, received: Tensor, sent: Tensor, round: int) -> Delta:
        """`received - sent` of a round, made in place of `received` where the types are equal."""
        flat = delta_of(received, sent, widened(self.dtype))
        # torch.dot rounds by the thread, and by where in memory `flat` begins: no run repeats then.
        square = torch.linalg.vector_norm(flat).square() if self._are_weights else None
        return Delta(flat, square)

    @torch.no_grad()
    def add(self, delta: Delta, weight: float) -> None:
        """Adds `weight * delta` to the tensors that exist; clamps what must not be negative."""
        if self.anchor is not None:
            delta.add_to(self.anchor, weight)
        pieces = self._split(delta.flat)
        if self._lasting is not None and self.dtype == delta.flat.dtype:
            torch._foreach_add_(self._lasting, pieces, alpha=weight)
            return
        mixed = zip(self.entries, self.tensors(), pieces, self.residuals, strict=True)
        there = [(entry, v, d, e) for entry, v, d, e in mixed if v is not None]
        mix(
            [v for _, v, _, _ in there], [d for _, _, d, _ in there], weight, [e for *_, e in there]
        )
        for entry, v, _, _ in there:
            if entry.non_negative:
                self.clamped += (v < 0).sum()
                v.clamp_(min=0)

    @torch.no_grad()
    def total(self) -> Tensor:
        """All tensors with their residuals, widened: one new flat tensor."""
        flat = torch.empty(self.numel, dtype=widened(self.dtype), device=self.device)
        pieces = self._split(flat)
        for v, total, e in zip(self.tensors(), pieces, self.residuals, strict=True):
            total.zero_() if v is None else total.copy_(v)
            if e is not None:
                total.add_(e)
        return flat

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        """Overwrites all tensors that exist, and their residuals; the anchor moves as they do."""
        if self.anchor is not None:
            self.anchor.add_(flat - self.total())
        for v, total, e in zip(self.tensors(), self._split(flat), self.residuals, strict=True):
            if v is not None:
                replace(v, total, e)

    @torch.no_grad()
    def show(self, flat: Tensor, kept: list[tuple[Tensor, Tensor]]) -> None:
        """Overwrites the tensors for a while; each goes to `kept` first, with a copy of it."""
        for v, shown in zip(self.tensors(), self._split(flat), strict=True):
            if v is not None:
                kept.append((v, v.clone()))
                v.copy_(shown)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat bucket in its tensors' shapes."""
        pieces = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in pieces]


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Those coordinates of one bucket that a round exchanges.

    Attributes:
        chosen: Place in the bucket of each tensor that has some, and which of its elements.
        offsets: Where each of these tensors begins in the flat bucket.
    """

    chosen: list[tuple[int, Tensor]]
    offsets: list[int]

    @property
    def count(self) -> int:
        """How many."""
        return sum(len(at) for _, at in self.chosen)

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(at.nbytes for _, at in self.chosen)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The chosen elements of a bucket's tensors, one after the other."""
        return torch.cat(
            [tensors[place].reshape(-1).index_select(0, at) for place, at in self.chosen]
        )

    def scatter(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """Puts them back."""
        sizes = [len(at) for _, at in self.chosen]
        for (place, at), part in zip(self.chosen, values.split(sizes), strict=True):
            tensor = tensors[place]
            flat = tensor.reshape(-1)  # a copy where it is not contiguous
            flat.scatter_(0, at, part)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def in_bucket(self) -> Tensor:
        """As indices into the flat bucket."""
        pieces = zip(self.chosen, self.offsets, strict=True)
        return torch.cat([at + offset for (_, at), offset in pieces])


class MaskedBucket(Bucket):
    """A bucket of weights that sends, in each round, the coordinates that a mask says.

    All ranks compute the same ones from seed, bucket and round, so no index travels, and a rank
    that mixes late mixes at the coordinates of the round that was sent. Messages, snapshots and
    deltas are smaller by the density; a round with one coordinate less sends a zero for it. The
    indices of rounds in flight are kept, eight bytes each.

    Args:
        mask: Which coordinates.
        seed: Of the mask.
        rounds: How many rounds may be in flight.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        layout: BucketLayout,
        number: int,
        *,
        mask: SharedMask,
        seed: int,
        rounds: int,
    ) -> None:
        super().__init__(entries, layout, number, are_weights=True)
        self._mask = mask
        self._seed = (seed + number * _STRIDE) % 2**64
        self._rounds = rounds
        self._ends = torch.tensor([entry.spec.numel for entry in self.entries]).cumsum(0)
        self._kept: OrderedDict[int, Coordinates] = OrderedDict()
        self._lock = threading.Lock()  # the listener makes deltas, too

    @property
    def memory_bytes(self) -> int:
        """Memory held beside the model, indices too."""
        return super().memory_bytes + sum(at.size_bytes for at in list(self._kept.values()))

    def snapshot(self, into: Snapshot, place: int, round: int) -> Sendable:
        """Copies the round's coordinates into a snapshot, where this is bucket `place`."""
        values = self._coordinates(round).gather(_present(self.tensors()))
        if missing := self._mask.largest_count(self.numel) - len(values):
            values = torch.cat([values, values.new_zeros(missing)])
        return into.take(place, [values])

    @torch.no_grad()
    def delta(self, received: Tensor, sent: Tensor, round: int) -> Delta:
        """`received - sent` of a round; its square stands for all coordinates."""
        flat, at = delta_of(received, sent, widened(self.dtype)), self._coordinates(round)
        square = torch.linalg.vector_norm(flat[: at.count]).square() / (at.count / self.numel)
        with self._lock:
            self._kept.pop(round, None)  # the delta has them now
        return Delta(flat, square, at)

    @torch.no_grad()
    def add(self, delta: Delta, weight: float) -> None:
        """Adds `weight * delta` to its coordinates of the tensors."""
        assert delta.at is not None
        if self.anchor is not None:
            delta.add_to(self.anchor, weight)
        tensors = _present(self.tensors())
        residuals = [e for e in self.residuals if e is not None]  # of all, or of none
        v = delta.at.gather(tensors)
        e = delta.at.gather(residuals) if residuals else None
        mix([v], [delta.flat[: delta.at.count]], weight, [e])
        delta.at.scatter(v, tensors)
        if e is not None:
            delta.at.scatter(e, residuals)

    def _coordinates(self, round: int) -> Coordinates:
        """Which coordinates a round exchanges; from any thread."""
        with self._lock:
            if round in self._kept:
                return self._kept[round]
            flat = self._mask.indices(self.numel, seed=self._seed, round=round)
            cuts = [0, *torch.searchsorted(flat, self._ends).tolist()]
            begins = [0, *self._ends.tolist()]
            chosen, offsets = [], []
            for place in range(len(self._ends)):
                if cuts[place] < cuts[place + 1]:
                    at = flat[cuts[place] : cuts[place + 1]] - begins[place]
                    chosen.append((place, at.to(self.device)))
                    offsets.append(begins[place])
            self._kept[round] = Coordinates(chosen, offsets)
            if len(self._kept) > self._rounds:
                self._kept.popitem(last=False)
            return self._kept[round]


class Flow:
    """One set of tensors that is exchanged with the partner of the round, all on one device.

    All flows of a round share the partner, and the round counts on both ends or on neither.

    Args:
        name: For traces and messages.
        phase: When in a step it is exchanged.
        entries: The tensors, in the order of the forward pass.
        first_bucket: Where its buckets begin in the channel's plan.
        bucket_bytes: Bytes of tensors at which a bucket is full.
        wire_dtype: What travels, None for each tensor's own type.
        snapshots: How many snapshots may be held at once.
        every: Exchanged in each round that is a multiple of it.
        in_consensus: Whether these are weights: shown in `consensus()`; narrow ones get an fp32
            residual; their deltas tell the consensus distance.
        mask: Which coordinates travel in a round; None for all.
        seed: Of the mask.

    Attributes:
        buckets: In the order of the channel's plan.
        parts: What the channel must know of them.
        pool: Its snapshots.
        sends_whole: Whether what travels are the tensors, bit for bit.
    """

    def __init__(
        self,
        name: str,
        phase: Phase,
        entries: Sequence[Entry],
        *,
        first_bucket: int,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
        snapshots: int = 2,
        every: int = 1,
        in_consensus: bool = False,
        mask: SharedMask | None = None,
        seed: int = 0,
    ) -> None:
        self.name, self.phase, self.every = name, phase, every
        self.in_consensus = in_consensus
        self.entries = list(entries)
        self.device = entries[0].parameter.device
        plan = wire = BucketPlan.make(
            [entry.spec for entry in entries], bucket_bytes=bucket_bytes, wire_dtype=wire_dtype
        )
        numbered = list(enumerate(plan.buckets, first_bucket))
        self.buckets: list[Bucket]
        if mask is None:
            self.buckets = [
                Bucket(self.entries, layout, number, are_weights=in_consensus)
                for number, layout in numbered
            ]
        else:
            wire = plan.sending(lambda part: Part(part.dtype, mask.largest_count(part.numel)))
            self.buckets = [
                MaskedBucket(
                    self.entries, layout, number, mask=mask, seed=seed, rounds=snapshots + 1
                )
                for number, layout in numbered
            ]
        self.parts = wire.parts
        self.sends_whole = wire_dtype is None and mask is None
        self.pool = SnapshotPool(wire, self.device, snapshots)

    @classmethod
    def deal(
        cls,
        name: str,
        phase: Phase,
        entries: Sequence[Entry],
        settings: RoundSettings,
        *,
        behind: Sequence["Flow"] = (),
        **options: Any,
    ) -> list["Flow"]:
        """One flow for each device of the entries, which are cut to pieces of at most a bucket.

        Args:
            name: See `Flow`.
            phase: See `Flow`.
            entries: The tensors, in the order of the forward pass.
            settings: Of the session: bucket size, wire type, snapshots.
            behind: Flows before these in the channel's plan.
            **options: See `Flow`: `every`, `in_consensus`, `mask`, `seed`.
        """
        by_device: dict[torch.device, list[Entry]] = {}
        for entry in entries:
            pieces = entry.pieces(settings.bucket_bytes)
            by_device.setdefault(entry.parameter.device, []).extend(pieces)
        first = sum(len(flow.buckets) for flow in behind)
        flows: list[Flow] = []
        for pieces in by_device.values():
            flow = cls(
                name,
                phase,
                pieces,
                first_bucket=first,
                bucket_bytes=settings.bucket_bytes,
                wire_dtype=settings.wire_dtype,
                snapshots=settings.snapshots,
                **options,
            )
            first += len(flow.buckets)
            flows.append(flow)
        return flows

    @property
    def memory_bytes(self) -> int:
        """Snapshots, residuals and indices held beside the model."""
        return self.pool.size_bytes + sum(bucket.memory_bytes for bucket in self.buckets)

    def is_due(self, round: int) -> bool:
        """Whether it is exchanged in a round."""
        return self.phase is not Phase.NEVER and round % self.every == 0

    def clear_residuals(self, parameters: Container[str]) -> None:
        """Forgets what rounding took away from parameters that were written anew."""
        for bucket in self.buckets:
            for entry, residual in zip(bucket.entries, bucket.residuals, strict=True):
                if residual is not None and entry.spec.name in parameters:
                    residual.zero_()


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors of a bucket of weights, which all exist."""
    there = [tensor for tensor in tensors if tensor is not None]
    assert len(there) == len(tensors)
    return there
