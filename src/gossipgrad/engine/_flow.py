"""Flows of tensors that a round exchanges, in buckets."""

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
    empty_flat,
    is_sharded,
    widened,
)
from gossipgrad.compression import SharedMask
from gossipgrad.engine._mixing import delta_of, mix, replace
from gossipgrad.engine._settings import RoundSettings
from gossipgrad.engine._tensors import Entry

__all__ = ["Bucket", "Delta", "Flow", "Phase", "Sendable", "SlicedBucket", "memory_of"]

Sendable = tuple[Tensor, Callable[[], bool] | None]
"""A tensor to send, and a function that returns whether it is filled; None if it is."""

_SMALL_NUMEL = 1 << 16  # a smaller delta is measured whole
_SHARES = 8  # of a large one, of which a round measures one
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
    """Not sent: takes part only in averages over all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """`received - snapshot` of one bucket."""

    flat: Tensor  # of the sent elements, at least fp32
    square: Tensor | None = None  # its squared norm, for the consensus distance
    at: "Coordinates | None" = None  # in the bucket; None for all

    def add_to(self, total: Tensor, weight: float) -> None:
        """Add `weight * self` to a whole flat bucket."""
        if self.at is None:
            total.add_(self.flat, alpha=weight)
        else:
            values = self.flat[: self.at.count]
            total.index_add_(0, self.at.in_bucket(), values, alpha=weight)


def _square(flat: Tensor, round: int) -> Tensor:
    """Return the squared norm; of a large bucket an estimate from an eighth, another each round."""
    # torch.dot rounds by the number of threads and the alignment of `flat`: not reproducible.
    if flat.numel() < _SMALL_NUMEL:
        return torch.linalg.vector_norm(flat).square()
    size = flat.numel() // _SHARES
    part = flat.narrow(0, round % _SHARES * size, size)
    return torch.linalg.vector_norm(part).square() * (flat.numel() / size)


class Bucket:
    """Consecutive tensors of a flow that are sent as one message, with their residuals.

    Attributes:
        number: Its index in the channel's plan.
        entries: Its tensors, in the order of the flat bucket.
        numel: Total number of elements.
        dtype: Their type.
        residuals: For each weight narrower than fp32, the fp32 rounding error of its mixing. None
            for others.
        clamped: How many elements of non-negative tensors mixing would have left below zero.
        anchor: A flat, wide tensor that mixing changes by the same amount as the tensors, so that
            their difference is the optimizers' progress; None: there is none.
        correction: A flat, wide tensor, C in `Sync`; None: there is none.
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
        self.correction: Tensor | None = None
        self._gain = 0.0  # what the correction takes of each change by an exchange
        self._are_weights = are_weights
        narrow = are_weights and widened(self.dtype) != self.dtype
        self.residuals: list[Tensor | None] = [
            torch.zeros(e.spec.shape, dtype=torch.float32, device=self.device) if narrow else None
            for e in self.entries
        ]

    @property
    def memory_bytes(self) -> int:
        """Memory held in addition to the model."""
        flats = sum(flat.nbytes for flat in (self.anchor, self.correction) if flat is not None)
        return flats + sum(4 * r.numel() for r in self.residuals if r is not None)

    def tensors(self) -> list[Tensor | None]:
        """Return the live tensors, None where one does not exist yet."""
        return [entry.tensor() for entry in self.entries]

    def snapshot(self, into: Snapshot, bucket: int, round: int) -> Sendable:
        """Copy the elements that a round sends into a bucket of a snapshot."""
        return into.take(bucket, self.tensors())

    @torch.no_grad()
    def delta(self, received: Tensor, sent: Tensor, round: int, out: Tensor | None = None) -> Delta:
        """Return `received - sent` of a round, computed in `out`, by default where it can be."""
        flat = delta_of(received, sent, widened(self.dtype), out)
        return Delta(flat, _square(flat, round) if self._are_weights else None)

    @torch.no_grad()
    def add(self, delta: Delta, weight: float) -> None:
        """Add `weight * delta` to the tensors that exist; clamp non-negative ones at zero."""
        if self.anchor is not None:
            delta.add_to(self.anchor, weight)
        if self.correction is not None:
            delta.add_to(self.correction, self._gain * weight)
        self._add(delta.flat, weight)

    def begin_correction(self, gain: float) -> None:
        """Keep a correction from now on, 0 at first."""
        dtype = widened(self.dtype)
        self.correction = torch.zeros(self.numel, dtype=dtype, device=self.device)
        self._gain = gain

    @torch.no_grad()
    def correct(self, momentum: float) -> None:
        """Multiply the correction by `momentum`, and add it to the tensors."""
        if self.correction is not None:
            self._add(self.correction.mul_(momentum), 1.0)

    def _add(self, flat: Tensor, weight: float) -> None:
        pieces = self._split(flat)
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
    def total(self, out: Tensor | None = None) -> Tensor:
        """Return all tensors plus their residuals, widened, in `out` or a new flat tensor."""
        flat = out
        if flat is None:
            flat = torch.empty(self.numel, dtype=widened(self.dtype), device=self.device)
        pieces = self._split(flat)
        for v, total, e in zip(self.tensors(), pieces, self.residuals, strict=True):
            total.zero_() if v is None else total.copy_(v)
            if e is not None:
                total.add_(e)
        return flat

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        """Overwrite all tensors that exist, and their residuals; the anchor moves with them.

        The correction is then 0.
        """
        if self.anchor is not None:
            self.anchor.add_(flat - self.total())
        if self.correction is not None:
            self.correction.zero_()
        for v, total, e in zip(self.tensors(), self._split(flat), self.residuals, strict=True):
            if v is not None:
                replace(v, total, e)

    @torch.no_grad()
    def show(self, flat: Tensor, memory: Tensor, kept: list[tuple[Tensor, Tensor]]) -> None:
        """Overwrite the tensors temporarily.

        Their values are copied into `memory`, a flat bucket; each is appended to `kept` with them.
        """
        pieces = zip(self.tensors(), self._split(flat), self._split(memory), strict=True)
        for v, shown, own in pieces:
            if v is not None:
                kept.append((v, own.copy_(v)))
                v.copy_(shown)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat bucket in its tensors' shapes."""
        pieces = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in pieces]


class SlicedBucket(Bucket):
    """A bucket of which this rank exchanges one slice, and the ranks of its island the others.

    Snapshots and deltas are those of the slice. All ranks of the island gather the deltas, and
    add them: `mix`. What `add` gets is kept until then. The last slices may be shorter, or
    empty: a rank that has none exchanges the last element, for nothing.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        layout: BucketLayout,
        number: int,
        *,
        are_weights: bool,
        part: Bucket,
        first: int,
        stride: int,
    ) -> None:
        super().__init__(entries, layout, number, are_weights=are_weights)
        part.residuals = [None] * len(part.residuals)  # mixing is not done there
        self._part, self._first, self._stride = part, first, stride
        self._count = max(0, min(stride, self.numel - first))
        self._late: Tensor | None = None
        self._memory: Tensor | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory held in addition to the model."""
        held = 0 if self._memory is None else self._memory.nbytes
        return super().memory_bytes + self._part.memory_bytes + held

    @property
    def has_late(self) -> bool:
        """Whether there are deltas to gather."""
        return self._late is not None

    def snapshot(self, into: Snapshot, bucket: int, round: int) -> Sendable:
        """Copy the elements of the slice that a round sends into a bucket of a snapshot."""
        return self._part.snapshot(into, bucket, round)

    def delta(self, received: Tensor, sent: Tensor, round: int, out: Tensor | None = None) -> Delta:
        """Return `received - sent` of a round, of the slice."""
        return self._part.delta(received, sent, round, out)

    @torch.no_grad()
    def add(self, delta: Delta, weight: float) -> None:
        """Keep `weight * delta` of the slice until it is gathered."""
        late = self.weighted(delta, weight)
        self._late = late if self._late is None else self._late.add_(late)

    def take_late(self) -> Tensor | None:
        """Return what is kept of the slice, to gather it; None for nothing."""
        late, self._late = self._late, None
        return late

    @torch.no_grad()
    def weighted(self, delta: Delta, weight: float) -> Tensor:
        """Return `weight * delta` of the slice, flat."""
        dtype = widened(self.dtype)
        flat = torch.zeros(self._part.numel, dtype=dtype, device=delta.flat.device)
        delta.add_to(flat, weight)
        return flat

    def own(self, flat: Tensor) -> Tensor:
        """Return the slice of a whole flat bucket, a view."""
        return flat.narrow(0, min(self._first, self.numel - self._part.numel), self._part.numel)

    def padded(self, flat: Tensor | None) -> Tensor:
        """Return a slice in host memory, of as many elements on all ranks; None for zeros."""
        padded = torch.zeros(self._stride, dtype=widened(self.dtype), device="cpu")
        if flat is not None:
            padded[: self._count].copy_(flat[: self._count])
        return padded

    def memory(self, slices: int) -> Tensor:
        """Return lasting memory in which the thread gathers the slices, in host memory."""
        if self._memory is None:
            numel, dtype = self._stride * slices, widened(self.dtype)
            self._memory = empty_flat(numel, dtype, torch.device("cpu"))
        return self._memory

    def mix(self, gathered: Tensor) -> None:
        """Add the gathered deltas to the tensors."""
        super().add(Delta(gathered[: self.numel].to(self.device)), 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """The coordinates of one bucket that a round exchanges."""

    chosen: list[tuple[int, Tensor]]  # a tensor's index in the bucket, and indices into it
    offsets: list[int]  # of each of these tensors in the flat bucket

    @property
    def count(self) -> int:
        """Number of coordinates."""
        return sum(len(at) for _, at in self.chosen)

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(at.nbytes for _, at in self.chosen)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the chosen elements of a bucket's tensors, concatenated."""
        return torch.cat(
            [tensors[index].reshape(-1).index_select(0, at) for index, at in self.chosen]
        )

    def scatter(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write chosen elements back into the tensors."""
        sizes = [len(at) for _, at in self.chosen]
        for (index, at), part in zip(self.chosen, values.split(sizes), strict=True):
            tensor = tensors[index]
            flat = tensor.reshape(-1)  # a copy where it is not contiguous
            flat.scatter_(0, at, part)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def in_bucket(self) -> Tensor:
        """Return indices into the flat bucket."""
        pieces = zip(self.chosen, self.offsets, strict=True)
        return torch.cat([at + offset for (_, at), offset in pieces])


class MaskedBucket(Bucket):
    """A bucket of weights that sends, in each round, the coordinates that a mask selects.

    All ranks compute the same coordinates from seed, bucket and round, so no index is sent, and a
    late part is mixed at those of its own round. A round with one coordinate less pads with a zero.
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
        sizes = [entry.spec.numel for entry in self.entries]
        self._ends = torch.tensor(sizes, device="cpu").cumsum(0)
        self._kept: OrderedDict[int, Coordinates] = OrderedDict()
        self._lock = threading.Lock()  # the listener computes deltas, too

    @property
    def memory_bytes(self) -> int:
        """Memory held in addition to the model, including indices."""
        return super().memory_bytes + sum(at.size_bytes for at in list(self._kept.values()))

    def snapshot(self, into: Snapshot, bucket: int, round: int) -> Sendable:
        """Copy the round's coordinates into a bucket of a snapshot."""
        values = self._coordinates(round).gather(_present(self.tensors()))
        if missing := self._mask.largest_count(self.numel) - len(values):
            values = torch.cat([values, values.new_zeros(missing)])
        return into.take(bucket, [values])

    @torch.no_grad()
    def delta(self, received: Tensor, sent: Tensor, round: int, out: Tensor | None = None) -> Delta:
        """Return `received - sent` of a round; its square is scaled to all coordinates."""
        flat = delta_of(received, sent, widened(self.dtype), out)
        at = self._coordinates(round)
        square = torch.linalg.vector_norm(flat[: at.count]).square() / (at.count / self.numel)
        with self._lock:
            self._kept.pop(round, None)  # the delta holds them now
        return Delta(flat, square, at)

    @torch.no_grad()
    def add(self, delta: Delta, weight: float) -> None:
        """Add `weight * delta` to the tensors at its coordinates."""
        assert delta.at is not None
        if self.anchor is not None:
            delta.add_to(self.anchor, weight)
        tensors = _present(self.tensors())
        residuals = [e for e in self.residuals if e is not None]  # all have one, or none
        v = delta.at.gather(tensors)
        e = delta.at.gather(residuals) if residuals else None
        mix([v], [delta.flat[: delta.at.count]], weight, [e])
        delta.at.scatter(v, tensors)
        if e is not None:
            delta.at.scatter(e, residuals)

    def _coordinates(self, round: int) -> Coordinates:
        """Return the coordinates that a round exchanges; from any thread."""
        with self._lock:
            if round in self._kept:
                return self._kept[round]
            flat = self._mask.indices(self.numel, seed=self._seed, round=round)
            cuts = [0, *torch.searchsorted(flat, self._ends).tolist()]
            begins = [0, *self._ends.tolist()]
            chosen, offsets = [], []
            for index in range(len(self._ends)):
                if cuts[index] < cuts[index + 1]:
                    at = flat[cuts[index] : cuts[index + 1]] - begins[index]
                    chosen.append((index, at.to(self.device)))
                    offsets.append(begins[index])
            self._kept[round] = Coordinates(chosen, offsets)
            if len(self._kept) > self._rounds:
                self._kept.popitem(last=False)
            return self._kept[round]


class Flow:
    """A set of tensors on one device that is exchanged with the partner of the round.

    All flows of a round share the partner, and the round counts on both ends or on neither.

    Args:
        name: For traces and messages.
        phase: When in a step it is exchanged.
        entries: The tensors, in the order of the forward pass.
        first_bucket: The index of its first bucket in the channel's plan.
        bucket_bytes: Bytes of tensors at which a bucket is full.
        wire_dtype: Type on the wire, None for each tensor's own type.
        snapshots: How many snapshots may be held at once.
        every: Exchanged in rounds that are a multiple of it.
        in_consensus: Whether these are weights: shown in `consensus()`; narrow ones get an fp32
            residual; their deltas estimate the consensus distance.
        mask: Selects the coordinates to send in a round; None for all.
        seed: The mask's seed.
        share: The index of this rank's slice of each bucket, and how many there are; None: a rank
            exchanges whole buckets.

    Attributes:
        buckets: In the order of the channel's plan.
        parts: Their types and sizes, for the channel.
        pool: The pool of its snapshots.
        is_sliced: Whether this rank exchanges slices of its buckets.
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
        share: tuple[int, int] | None = None,
    ) -> None:
        self.name, self.phase, self.every = name, phase, every
        self.in_consensus, self.is_sliced = in_consensus, share is not None
        self.entries = list(entries)
        self.device = entries[0].parameter.device
        plan = wire = BucketPlan.make(
            [entry.spec for entry in entries], bucket_bytes=bucket_bytes, wire_dtype=wire_dtype
        )
        sent = self.entries
        if share is not None:
            sent, wire = _sliced(plan, self.entries, *share)
        numbered = list(enumerate(wire.buckets, first_bucket))
        self.buckets: list[Bucket]
        if mask is None:
            self.buckets = [
                Bucket(sent, layout, number, are_weights=in_consensus)
                for number, layout in numbered
            ]
        else:
            wire = wire.sending(lambda part: Part(part.dtype, mask.largest_count(part.numel)))
            self.buckets = [
                MaskedBucket(sent, layout, number, mask=mask, seed=seed, rounds=snapshots + 1)
                for number, layout in numbered
            ]
        if share is not None:
            self.buckets = [
                SlicedBucket(
                    self.entries,
                    layout,
                    part.number,
                    are_weights=in_consensus,
                    part=part,
                    first=share[0] * _stride(layout, share[1]),
                    stride=_stride(layout, share[1]),
                )
                for layout, part in zip(plan.buckets, self.buckets, strict=True)
            ]
        self.parts = wire.parts
        self.pool = SnapshotPool(wire, self.device, snapshots)

    @classmethod
    def per_device(
        cls,
        name: str,
        phase: Phase,
        entries: Sequence[Entry],
        settings: RoundSettings,
        *,
        behind: Sequence["Flow"] = (),
        **options: Any,
    ) -> list["Flow"]:
        """Create one flow per device; entries are split into pieces of at most a bucket.

        Args:
            name: See `Flow`.
            phase: See `Flow`.
            entries: The tensors, in the order of the forward pass.
            settings: The session's bucket size, wire type and snapshots.
            behind: Flows before these in the channel's plan.
            **options: See `Flow`: `every`, `in_consensus`, `mask`, `seed`, `share`. Of sharded
                tensors each rank has its own part, which has no slices.
        """
        share: tuple[int, int] | None = options.pop("share", None)
        alike: dict[tuple[torch.device, tuple[int, int] | None], list[Entry]] = {}
        for entry in entries:
            pieces = entry.pieces(settings.bucket_bytes)
            key = entry.parameter.device, None if is_sharded(entry.parameter) else share
            alike.setdefault(key, []).extend(pieces)
        first = sum(len(flow.buckets) for flow in behind)
        flows: list[Flow] = []
        for (_, share), pieces in alike.items():
            flow = cls(
                name,
                phase,
                pieces,
                first_bucket=first,
                bucket_bytes=settings.bucket_bytes,
                wire_dtype=settings.wire_dtype,
                snapshots=settings.snapshots,
                share=share,
                **options,
            )
            first += len(flow.buckets)
            flows.append(flow)
        return flows

    @property
    def memory_bytes(self) -> int:
        """Memory of snapshots, residuals and indices, and for parts that will be received."""
        held = self.pool.size_bytes + self.pool.spare_bytes
        return held + sum(bucket.memory_bytes for bucket in self.buckets)

    def is_due(self, round: int) -> bool:
        """Whether a round exchanges it."""
        return self.phase is not Phase.NEVER and round % self.every == 0

    def clear_residuals(self) -> None:
        """Clear residuals and corrections, as the weights were overwritten."""
        for bucket in self.buckets:
            if bucket.correction is not None:
                bucket.correction.zero_()
            for residual in bucket.residuals:
                if residual is not None:
                    residual.zero_()


def _stride(layout: BucketLayout, slices: int) -> int:
    """Return the elements of a slice of a bucket."""
    return -(-layout.part.numel // slices)


def _sliced(
    plan: BucketPlan, entries: Sequence[Entry], index: int, slices: int
) -> tuple[list[Entry], BucketPlan]:
    """Return the entries of one slice of every bucket, and their plan."""
    pieces: list[Entry] = []
    layouts: list[BucketLayout] = []
    for layout in plan.buckets:
        stride, numel = _stride(layout, slices), layout.part.numel
        first, end = min(index * stride, numel), min((index + 1) * stride, numel)
        if first == end:
            first, end = numel - 1, numel  # no message is empty
        before, chosen = 0, len(pieces)
        for number in layout.indices:
            entry = entries[number]
            begin, stop = max(first - before, 0), min(end - before, entry.spec.numel)
            if begin < stop:
                pieces.append(entry.between(begin, stop - begin))
            before += entry.spec.numel
        part = Part(layout.part.dtype, end - first)
        layouts.append(BucketLayout((*range(chosen, len(pieces)),), part, layout.dtype))
    return pieces, BucketPlan(tuple(entry.spec for entry in pieces), tuple(layouts))


def memory_of(buckets: Sequence[Bucket]) -> list[Tensor]:
    """Return memory for a copy of each bucket, of its own type."""
    sizes: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for bucket in buckets:
        sizes.setdefault((bucket.dtype, bucket.device), []).append(bucket.numel)
    held = {
        (dtype, device): iter(empty_flat(sum(each), dtype, device).split(each))
        for (dtype, device), each in sizes.items()
    }
    return [next(held[bucket.dtype, bucket.device]) for bucket in buckets]


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the tensors of a bucket of weights, which all exist."""
    there = [tensor for tensor in tensors if tensor is not None]
    assert len(there) == len(tensors)
    return there
