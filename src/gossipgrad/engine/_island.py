"""An island: the ranks that train one replica together, such as those of one node.

Each rank exchanges its slice of every bucket with the rank of the same number in the partner's
island. The ranks of an island gather the deltas of the slices, and all add the same:

    island A                                        island B
    rank 0: slice 0 of the snapshot  <──────────>   rank 0: slice 0
    rank 1: slice 1                  <──────────>   rank 1: slice 1
      │ weight * delta of its slice, zeros if no part arrived
      └─ gathered among rank 0 and rank 1, and added to the whole bucket by both

So the replicas of an island are equal bit for bit, whatever happens outside:

1. The part of slice 0 arrives. That of slice 1 is late, or void, or its sender died.
2. Each rank decides for its own slice, as a rank without an island does. So an exchange of a slice
   counts on both ends or on neither, and the mean over islands is kept.
3. Both ranks gather the delta of slice 0, and zeros of slice 1, and add that.
4. The part of slice 1 arrives at rank 1, which adds its delta to nothing yet. As the next step
   ends, the ranks ask each other for such deltas, and gather and add them, too.

A thread gathers while the step computes:

1. Parts arrive in another order on each rank, and collectives must be the same on all.
2. So the thread takes the buckets in one order, and waits for the part of each.
3. As the step ends, the training thread takes them in the same order. It decides how long to wait
   for a part, as in any session, and then lets the thread gather without it.
4. What the training threads ask each other goes through another group: threads never meet there.

Where islands are of unequal sizes, the first ranks of each exchange slices, as many as the smallest
island has. The others of a larger one take part in its means and gathers, and what the first rank
learns in a collective with other islands is what they learn.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gossipgrad._messages import first_line
from gossipgrad.comm import Group, Outcome
from gossipgrad.engine._flow import Flow, Phase, SlicedBucket
from gossipgrad.engine._transfer import Transfer
from gossipgrad.errors import GossipError

__all__ = ["GatheredRound", "Island"]

T = TypeVar("T")

_WAKE_SECONDS = 0.05  # a wait for a part that turns void wakes this often


class GatheredRound:
    """The gathers of one round."""

    def __init__(
        self,
        flows: Sequence[Flow],
        transfers: Sequence[Transfer],
        weight: Callable[[Transfer], float],
    ) -> None:
        # Flow, index of the bucket in it, and the bucket, in the order of the gathers.
        self.buckets: list[tuple[Flow, int, SlicedBucket]] = []
        for flow in flows:
            sliced = [(flow, n, b) for n, b in enumerate(flow.buckets)]
            # In the order in which they were sent.
            for each in reversed(sliced) if flow.phase is Phase.AFTER_UPDATE else sliced:
                if isinstance(each[2], SlicedBucket):
                    self.buckets.append(each)  # type: ignore[arg-type]
        # None if the round is void here.
        self.transfers: Mapping[Flow, Transfer] = {each.flow: each for each in transfers}
        self.weight = weight
        self.taken: set[int] = set()  # gathered with the part that this rank received
        self.gathered: dict[int, Tensor | None] = {}
        self.released = 0  # how many buckets wait for no part any more


class Island:
    """This rank's island in a session.

    Args:
        process_group: Its ranks. Gradients are averaged on it; everything else on groups of its
            own.
        start_timeout_seconds: How long the constructor waits for the others.

    Attributes:
        group: Collectives among its ranks, for the training thread.
        index: The number of this rank in it.
        size: How many ranks it has.
        slices: How many of them exchange a slice: the first ones.
        is_whole: Whether its ranks have equal replicas; otherwise each has a shard of one.
        round: The round that the thread gathers, None for none.

    Raises:
        GossipError: Not all of its ranks came in time.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, *, start_timeout_seconds: float = 30.0
    ) -> None:
        self.process_group = process_group
        self.index, self.size = process_group.rank(), process_group.size()
        self.slices = self.size
        self.is_whole = True
        self.round: GatheredRound | None = None
        self._sliced: list[SlicedBucket] = []
        self._changed = threading.Condition()
        self._rounds: queue.SimpleQueue[GatheredRound | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False

        def group() -> Group:
            return Group.from_process_group(
                process_group,
                start_timeout_seconds=start_timeout_seconds,
                call="gossipgrad.gossip(island=...)",
            )

        self.group = group()
        try:
            self._gathers = group()
        except BaseException:
            self.group.close()
            raise

    @property
    def share(self) -> tuple[int, int]:
        """This rank's slice of a bucket, and how many there are."""
        return self.index, self.slices

    @property
    def exchanges(self) -> bool:
        """Whether this rank exchanges a slice."""
        return self.index < self.slices

    def between(self, group: Group) -> Group:
        """Return the group of this rank with other islands; a collective.

        Ranks that exchange nothing have a group without others, and get one in which they have the
        number of their island.

        Raises:
            ValueError: On all of them. Others than the first ranks have such groups.
        """
        found = self.group.all_gather_object([group.world_size, group.rank])
        self.slices = found.count(found[0])
        if found[self.slices :] != [[1, 0]] * (self.size - self.slices):
            raise ValueError(
                "the ranks of an island are in groups of (size, rank) "
                f"{', '.join(f'({size}, {rank})' for size, rank in found)} with other islands. "
                "All have the number of their island there, and of unequal islands the first ranks "
                "exchange, as many as the smallest has: give the others a process group of "
                "themselves alone, dist.new_group([rank])"
            )
        if self.exchanges:
            return group
        group.close()
        world_size, rank = found[0]
        return Group(dist.HashStore(), rank, world_size, members=(rank,))

    def from_first(self, value: T) -> T:
        """Return what the first rank has, if not all exchange; then a collective."""
        return value if self.slices == self.size else self.agree(value)[0]

    def mean_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its mean over the ranks that exchange; a collective."""
        if not self.exchanges:
            tensor.zero_()
        self.group.mean_(tensor)
        return tensor if self.slices == self.size else tensor.mul_(self.size / self.slices)

    def close(self) -> None:
        """Leave the island without waiting; the others' next collective in it fails."""
        self._is_closed = True
        self._rounds.put(None)
        self.wake()
        self.group.close()
        self._gathers.close()

    # -- the training thread ----------------------------------------------------------------

    def use(self, flows: Sequence[Flow]) -> None:
        """Gather the buckets of these flows from now on; on all ranks, with nothing in flight."""
        every = [bucket for flow in flows for bucket in flow.buckets]
        self.is_whole = all(flow.is_sliced for flow in flows)
        self._sliced = [bucket for bucket in every if isinstance(bucket, SlicedBucket)]

    def agree(self, value: Any) -> list[Any]:
        """Return the value of each rank; a collective. Values are those of JSON."""
        return self.group.all_gather_object(value)

    def largest(self, value: int) -> int:
        """Return the largest value of the ranks; a collective."""
        return _largest(self.group, [value])[0]

    def gather(self, bucket: SlicedBucket, flat: Tensor | None) -> Tensor:
        """Return a bucket of the slices of all ranks, flat, in host memory; a collective.

        Args:
            bucket: The bucket.
            flat: This rank's slice; None for zeros.
        """
        padded = bucket.padded(flat)
        gathered = torch.empty(padded.numel() * self.size, dtype=padded.dtype, device="cpu")
        return self.group.all_gather_into_(gathered, padded)[: bucket.numel]

    def mix_late(self, to_round: int = 0) -> int:
        """Add late deltas of all ranks; return the highest of their rounds; a collective."""
        wanted = [to_round, *(bucket.has_late for bucket in self._sliced)]
        to_round, *have_late = _largest(self.group, wanted)
        for bucket, has_late in zip(self._sliced, have_late, strict=True):
            if has_late:
                bucket.mix(self.gather(bucket, bucket.take_late()))
        return to_round

    def begin(
        self,
        flows: Sequence[Flow],
        transfers: Sequence[Transfer],
        weight: Callable[[Transfer], float],
    ) -> None:
        """Let the thread gather a round; see `GatheredRound`."""
        assert self.round is None
        round = GatheredRound(flows, transfers, weight)
        if not round.buckets:
            return
        self.round = round
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._gather_rounds, name="gossipgrad-island", daemon=True
            )
            self._thread.start()
        self._rounds.put(self.round)

    def release(self, count: int | None = None) -> None:
        """Let the thread gather that many buckets of the round, or all, without their parts."""
        round = self.round
        if round is not None:
            with self._changed:
                count = len(round.buckets) if count is None else count
                round.released = max(round.released, count)
                self._changed.notify_all()

    def gathered(self, number: int) -> Tensor | None:
        """Wait for a bucket of the round, and return its gathered deltas; None for zeros.

        Raises:
            GossipError: A rank of the island has died or left.
        """
        round = self.round
        assert round is not None
        self.release(number + 1)
        with self._changed:
            while number not in round.gathered:
                if self._error is not None:
                    raise GossipError(
                        "the island has ended, as one of its ranks did: "
                        f"{first_line(self._error)}. All its ranks have to start again"
                    ) from self._error
                self._changed.wait(_WAKE_SECONDS)
        return round.gathered[number]

    def end(self) -> None:
        """End the round; its deltas that were not mixed are dropped, on all ranks."""
        if self.round is not None:
            self.release()
            self.gathered(len(self.round.buckets) - 1)
            self.round = None

    def wake(self) -> None:
        """Let the thread look for arrived parts; from any thread."""
        with self._changed:
            self._changed.notify_all()

    # -- the thread that gathers ------------------------------------------------------------

    def _gather_rounds(self) -> None:
        try:
            while (round := self._rounds.get()) is not None:
                self._gather_round(round)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    @torch.no_grad()
    def _gather_round(self, round: GatheredRound) -> None:
        (has_parts,) = _largest(self._gathers, [bool(round.transfers)])
        for number, (flow, index, bucket) in enumerate(round.buckets):
            flat = self._part(round, number, flow, index, bucket)
            gathered = None
            if has_parts:
                memory = bucket.memory(self.size)
                gathered = self._gathers.all_gather_into_(memory, bucket.padded(flat))
            with self._changed:
                round.gathered[number] = gathered
                self._changed.notify_all()

    def _part(
        self, round: GatheredRound, number: int, flow: Flow, index: int, bucket: SlicedBucket
    ) -> Tensor | None:
        """Return the weighted delta of this rank's slice; None if there is none in time."""
        transfer = round.transfers.get(flow)
        if transfer is None or (exchange := transfer.exchanges.get(index)) is None:
            return None
        with self._changed:
            while exchange.open and number >= round.released and not self._is_closed:
                self._changed.wait(_WAKE_SECONDS)
        delta = transfer.delta(index) if exchange.outcome is Outcome.DELIVERED else None
        if delta is None:
            return None
        round.taken.add(number)
        return bucket.weighted(delta, round.weight(transfer))


def _largest(group: Group, values: Sequence[int]) -> list[int]:
    """Return the largest of each value over the ranks of a group; a collective."""
    mine = torch.tensor([int(value) for value in values], dtype=torch.int64, device="cpu")
    gathered = torch.empty(len(group.members) * len(mine), dtype=torch.int64, device="cpu")
    return group.all_gather_into_(gathered, mine).view(-1, len(mine)).amax(0).tolist()
