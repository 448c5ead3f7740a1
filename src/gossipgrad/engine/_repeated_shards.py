"""Shards that several ranks of an island hold, kept equal.

FSDP2 shards parameters along one axis of a mesh, and tensor parallelism repeats some of them along
another. Each rank exchanges its own shards:

1. Ranks 0 and 1 of an island hold the same shard of a norm.
2. The part of it that rank 0 receives is there in time, and that of rank 1 is late.
3. Their copies would now differ, and torch, which takes them for equal, would not notice.

So where parts were not there on some rank of the island, the ranks that hold a shard set it to the
mean of their copies. The mean over islands is kept. They do so before they send the next snapshot:

1. Ranks 0 and 1 send what differs, and set it to the mean afterwards.
2. The partner's ranks get both parts in time, and have no reason to ask each other.
3. Their copies would differ from now on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gossipgrad.comm import is_sharded, local
from gossipgrad.engine._flow import Bucket, Flow
from gossipgrad.engine._island import Island
from gossipgrad.engine._mixing import replace
from gossipgrad.engine._tensors import Entry
from gossipgrad.engine._transfer import Transfer

__all__ = ["RepeatedShards"]


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """An entry that other ranks hold, too."""

    key: str  # the same on all ranks that hold it
    bucket: Bucket
    index: int  # in the bucket
    first: int  # its first element in the flat bucket

    @property
    def entry(self) -> Entry:
        """The entry."""
        return self.bucket.entries[self.index]


class RepeatedShards:
    """The shards of this rank that others of its island hold, too.

    Making it is a collective of the island: shards of one name, part of the mesh and content are
    copies of each other.
    """

    def __init__(self, island: Island, flows: Sequence[Flow]) -> None:
        self._island = island
        self._missed, self._was_late = 0, False
        copies = [copy for flow in flows if not flow.is_sliced for copy in _copies(flow)]
        held = [{*keys} for keys in island.agree([copy.key for copy in copies])]
        copies = [copy for copy in copies if sum(copy.key in keys for keys in held) > 1]
        digests = {id(copy.entry.parameter): "" for copy in copies}
        for copy in copies:
            if not digests[id(copy.entry.parameter)]:
                digests[id(copy.entry.parameter)] = _digest(copy.entry.parameter)
        own = [
            [copy.key + digests[id(copy.entry.parameter)], copy.entry.spec.numel] for copy in copies
        ]
        every = island.agree(own)
        # Where each rank puts a copy: all gather as many numbers.
        starts = [dict(zip([key for key, _ in of], _starts(of), strict=True)) for of in every]
        self._numel = max(sum(numel for _, numel in of) for of in every)
        self._copies = [
            (copy, start, [(rank, found[key]) for rank, found in enumerate(starts) if key in found])
            for copy, (key, _), start in zip(copies, own, _starts(own), strict=True)
        ]

    def after_mixing(
        self, missed: int, *, has_late: bool, following: Sequence[Transfer] = ()
    ) -> None:
        """Set copies to their mean where a part was late or void on a rank; a collective.

        `missed` parts of this rank were not delivered so far. Transfers of the next round, which
        are `following`, get the new values.
        """
        may_differ = missed != self._missed or has_late or self._was_late
        self._missed, self._was_late = missed, has_late
        if self._numel and self._island.largest(may_differ):
            for bucket in self.level():
                for transfer in following:
                    if bucket in transfer.flow.buckets:
                        transfer.fill(transfer.flow.buckets.index(bucket))

    @torch.no_grad()
    def level(self, *, is_shown: bool = False) -> set[Bucket]:
        """Set copies to their mean, and return the buckets that changed; a collective.

        `is_shown`, only the tensors, which show the consensus, and not their rounding errors.
        """
        changed: set[Bucket] = set()
        if not self._numel:
            return changed
        mine = torch.zeros(self._numel, dtype=torch.float64, device="cpu")
        for copy, start, _ in self._copies:
            if (total := _total(copy, is_shown=is_shown)) is not None:
                mine[start : start + total.numel()] = total
        gathered = mine.new_empty(self._numel * self._island.size)
        every = self._island.group.all_gather_into_(gathered, mine).view(-1, self._numel)
        for copy, _, holders in self._copies:
            numel = copy.entry.spec.numel
            values = torch.stack([every[rank, start : start + numel] for rank, start in holders])
            if not bool((values == values[0]).all()):
                _set(copy, values.mean(0), is_shown=is_shown)
                changed.add(copy.bucket)
        return changed


def _copies(flow: Flow) -> list[_Copy]:
    """Return the sharded entries of a flow."""
    found = []
    for bucket in flow.buckets:
        starts = accumulate((entry.spec.numel for entry in bucket.entries), initial=0)
        for index, (entry, first) in enumerate(zip(bucket.entries, starts, strict=False)):
            if is_sharded(entry.parameter):
                key = f"{flow.name} {entry.spec.name} {entry.rows} {_part_of(entry.parameter)} "
                found.append(_Copy(key, bucket, index, first))
    return found


def _part_of(parameter: Tensor) -> list[tuple[int, int]]:
    """Return the axes of its mesh along which a DTensor is sharded, and this rank's numbers."""
    coordinate = parameter.device_mesh.get_coordinate()  # pyrefly: ignore[missing-attribute]
    placements = parameter.placements  # pyrefly: ignore[missing-attribute]
    return [
        (axis, coordinate[axis])
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    ]


def _digest(parameter: Tensor) -> str:
    held = local(parameter).detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(held.numpy().tobytes(), digest_size=8).hexdigest()


def _starts(own: Sequence[Sequence[object]]) -> list[int]:
    return [0, *accumulate(int(numel) for _, numel in own)][: len(own)]  # type: ignore[call-overload]


def _total(copy: _Copy, *, is_shown: bool) -> Tensor | None:
    """Return a copy with its rounding error, flat; None if it does not exist yet."""
    v, residual = copy.entry.tensor(), copy.bucket.residuals[copy.index]
    if v is None:
        return None
    total = v.double() if residual is None or is_shown else v.double() + residual
    return total.reshape(-1).cpu()


def _set(copy: _Copy, mean: Tensor, *, is_shown: bool) -> None:
    """Set a copy to the mean; the bucket's anchor moves with it."""
    bucket, v, before = copy.bucket, copy.entry.tensor(), _total(copy, is_shown=is_shown)
    if v is None or before is None:
        return
    wide, residual = mean.to(v.device).view(v.shape), bucket.residuals[copy.index]
    if is_shown:
        v.copy_(wide)
        return
    if bucket.anchor is not None:
        part = bucket.anchor.narrow(0, copy.first, before.numel())
        part.add_((mean - before).to(part))
    replace(v, wide if residual is None else wide.to(residual.dtype), residual)
