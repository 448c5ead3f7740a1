"""Weights of which a round exchanges some coordinates, the same on all ranks."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipgrad.comm import Part, Snapshot
from gossipgrad.compression import SharedMask
from gossipgrad.decentralized._mixing import mix
from gossipgrad.decentralized._section import Delta, Meeting, Section, Sendable
from gossipgrad.decentralized._tensors import Entry

__all__ = ["MaskedSection"]

_STRIDE = 0x9E3779B97F4A7C15  # odd: no two buckets share a seed


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Those of one bucket in one round.

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
            flat = tensor.reshape(-1)  # a copy where it does not lie row by row
            flat.scatter_(0, at, part)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def in_bucket(self) -> Tensor:
        """As indices into the flat bucket."""
        pieces = zip(self.chosen, self.offsets, strict=True)
        return torch.cat([at + offset for (_, at), offset in pieces])


@dataclass(frozen=True, slots=True, eq=False)
class MaskedDelta(Delta):
    """`received - snapshot` on the coordinates of its round, and zeros up to a message's size.

    Attributes:
        at: Where in the bucket its elements belong.
        round: Whose coordinates these are.
    """

    at: Coordinates
    round: int

    def add_to(self, total: Tensor, weight: float) -> None:
        """Adds `weight` times itself to a whole flat bucket."""
        total.index_add_(0, self.at.in_bucket(), self.pieces[0], alpha=weight)


class MaskedSection(Section):
    """A section of weights that sends, in each round, the coordinates that a mask says.

    All ranks work out the same from seed, bucket and round, so that no index travels, and a rank
    that mixes late mixes at the coordinates of the round that was sent. Messages, snapshots and
    deltas are smaller by the density; a round with one coordinate less sends a zero for it. Indices
    of rounds that are under way are kept, eight bytes for each coordinate.

    Args:
        entries: As of `Section`.
        first_bucket: As of `Section`.
        bucket_bytes: Bytes of weights, not of messages, at which a bucket is full.
        wire_dtype: As of `Section`.
        snapshots: As of `Section`.
        mask: Which coordinates.
        seed: Of the mask.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        first_bucket: int,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None,
        snapshots: int,
        mask: SharedMask,
        seed: int,
    ) -> None:
        super().__init__(
            entries,
            first_bucket=first_bucket,
            bucket_bytes=bucket_bytes,
            wire_dtype=wire_dtype,
            snapshots=snapshots,
            of_weights=True,
            wire=lambda plan: plan.sending(
                lambda part: Part(part.dtype, mask.largest_count(part.numel))
            ),
        )
        self._mask = mask
        self._seed = seed
        self._snapshots = snapshots
        self._ends = [
            torch.tensor([self.plan.specs[i].numel for i in layout.indices]).cumsum(0)
            for layout in self.plan.buckets
        ]
        self._kept: list[OrderedDict[int, Coordinates]] = [OrderedDict() for _ in self._ends]
        self._working_out = threading.Lock()  # the listener takes deltas, too

    @property
    def memory_bytes(self) -> int:
        """Snapshots, residuals and indices held."""
        kept = [at for rounds in self._kept for at in list(rounds.values())]
        return super().memory_bytes + sum(at.size_bytes for at in kept)

    def coordinates(self, bucket: int, round: int) -> Coordinates:
        """Which coordinates of a bucket a round exchanges; from any thread."""
        with self._working_out:
            kept = self._kept[bucket]
            if round in kept:
                return kept[round]
            ends = self._ends[bucket]
            seed = (self._seed + (self.first_bucket + bucket) * _STRIDE) % 2**64
            flat = self._mask.indices(int(ends[-1]), seed=seed, round=round)
            cuts = [0, *torch.searchsorted(flat, ends).tolist()]
            begins = [0, *ends.tolist()]
            chosen, offsets = [], []
            for place in range(len(ends)):
                if cuts[place] < cuts[place + 1]:
                    at = flat[cuts[place] : cuts[place + 1]] - begins[place]
                    chosen.append((place, at.to(self.device)))
                    offsets.append(begins[place])
            kept[round] = Coordinates(chosen, offsets)
            if len(kept) > self._snapshots:
                kept.popitem(last=False)
            return kept[round]

    @torch.no_grad()
    def fill(self, snapshot: Snapshot, bucket: int, meeting: Meeting) -> Sendable:
        """Copies the round's coordinates of a bucket into a snapshot."""
        values = self.coordinates(bucket, meeting.round).gather(_all_of(self.tensors(bucket)))
        if missing := self.parts[bucket].numel - len(values):
            values = torch.cat([values, values.new_zeros(missing)])
        return snapshot.take(bucket, [values])

    @torch.no_grad()
    def delta(self, bucket: int, flat: Tensor, round: int) -> Delta:
        """A delta of a round, ready to be mixed; its square stands for all coordinates."""
        at = self.coordinates(bucket, round)
        values = flat[: at.count]
        share = at.count / self.plan.buckets[bucket].part.numel
        square = torch.linalg.vector_norm(values).square() / share
        return MaskedDelta(flat, [values], square, at, round)

    @torch.no_grad()
    def mix(self, bucket: int, delta: Delta, weight: float) -> None:
        """Adds `weight * delta` to its coordinates of a bucket's tensors."""
        assert isinstance(delta, MaskedDelta)
        tensors = _all_of(self.tensors(bucket))
        residuals = [e for e in self.residuals(bucket) if e is not None]  # of all, or of none
        v = delta.at.gather(tensors)
        e = delta.at.gather(residuals) if residuals else None
        mix([v], delta.pieces, weight, [e])
        delta.at.scatter(v, tensors)
        if e is not None:
            delta.at.scatter(e, residuals)
        with self._working_out:
            self._kept[bucket].pop(delta.round, None)


def _all_of(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors of a bucket of weights, which all exist."""
    there = [tensor for tensor in tensors if tensor is not None]
    assert len(there) == len(tensors)
    return there
