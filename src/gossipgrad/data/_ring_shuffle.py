"""GossipGraD's asynchronous distributed shuffle of shards that lie in memory."""

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from gossipgrad.comm import Group, Transport, resolve_group, resolve_transport
from gossipgrad.errors import AgreementError

from ._ring import Ring
from ._rows import Flow, Rows, num_batches
from ._shards import check_whole

Batch = tuple[Shaped[Tensor, "row ..."], ...]
TransportFactory = Callable[[Group], Transport]

_NO_WORKERS = (
    "a RingShuffle lives in one process, with its rows and its links to other ranks: use "
    "DataLoader(shuffle, batch_size=None, num_workers=0)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShuffleStats:
    """What one rank's shuffle has done and holds; read without communication.

    Attributes:
        steps: Batches handed out.
        rows_held: Rows that are this rank's.
        rows_sent: Rows given away, less those that came back from a rank that left.
        rows_received: Rows taken in from other ranks.
        rows_in_flight: Rows given away that have no slot at their receiver yet, as far as is known.
        rows_lost: Rows sent to a rank that died before it confirmed them.
        rows_stale: Rows handed out a second time because their successors had not come.
        late_rounds: Steps whose rows stayed because a neighbour was late.
        bytes_sent: Bytes of rows sent to the neighbour.
        bytes_received: Bytes of rows that came from the neighbour.
        moving_seconds: Time spent on packing and placing rows.
        extra_memory_bytes: Rows on their way or without a slot, held beside the shard.
        refused_messages: Messages dropped because they were not of this ring, and connections
            refused because they did not know the secret of the run.
        ranks_gone: Ranks that left or died, as far as this rank had to do with them.
    """

    steps: int
    rows_held: int
    rows_sent: int
    rows_received: int
    rows_in_flight: int
    rows_lost: int
    rows_stale: int
    late_rounds: int
    bytes_sent: int
    bytes_received: int
    moving_seconds: float
    extra_memory_bytes: int
    refused_messages: int
    ranks_gone: tuple[int, ...]


class RingShuffle(IterableDataset[Batch]):
    """Batches of this rank's shard, whose rows move on to rank - 1 while training runs.

    Each rank holds a part of the data in memory, and no rank has room for all of it. With every
    batch that is handed out, a copy of its rows leaves for rank - 1, and those of rank + 1 take
    their place when they come: after an epoch the shard has moved on by one rank, after as many
    epochs as there are ranks each has seen everything. The order within a shard is drawn for each
    epoch, from seed, epoch and rank.

    A collective when made; after that only neighbours talk, and only while a batch is fetched.
    With one rank it is a plain shuffle.

    **A row is never lost or doubled.** At every moment it is held by exactly one rank, or in flight
    between exactly two; it passes on when it arrives, and a sender keeps it until it knows.

    **When a neighbour is late** no step waits. Rows that have not come are not overwritten: their
    slots come last in the epoch, and if it ends before they are filled, the old row is handed out
    once more (`rows_stale`). Once `credits` batches are on their way, the rows of further ones stay
    (`late_rounds`). So which rank sees a row when depends on the speed of the ranks, and runs do
    not repeat bit for bit. The shuffle has no state to save: a resumed run begins with the shards
    of the start, so some rows are seen more often than others in the epoch in which it resumes.

    **When a neighbour leaves** (`close()`, also by `break` or an exception in a `with` block) what
    has not arrived there comes back, and the ring closes over it. **When it dies** what it held and
    what was on its way to it is lost: `rows_lost` and a warning say so.

    **When a signal handler raises** in the middle of a step, as Ctrl-C does, the rows of that step
    may be lost, or be at two ranks: end the run.

    **Which rows travel.** All of a batch where all ranks have batches of one size. With uneven
    shards a step moves as many rows on every link as the smallest batch of any rank in that step
    has, the first ones of each batch. So each shard keeps its size. Steps count from the start,
    whatever epochs were left early: a batch that is too small for its step gives rows of the one
    before along.

    **Memory.** The shard, copied, and at most `2 * credits` batches of rows on their way, reached
    only when neighbours are late; while the ring closes a gap, `credits` more.

    Args:
        tensors: Inputs, targets and whatever else a sample has, in host memory: one row a sample,
            of any dtype and shape, which are equal on all ranks. Copied.
        batch_size: Rows of a batch, equal on all ranks; the last of an epoch has fewer, or one more
            where a single row would be left.
        process_group: Whose ranks take part; by default all. Nothing is sent on it. A `gg.Group`
            becomes the shuffle's own, and closes with it.
        seed: Of the order within the shards.
        drop_last: Leave out a smaller last batch of an epoch.
        credits: Batches that may be on their way to a neighbour.
        transport: `"tcp"`, or a function from the shuffle's group to a transport.

    Raises:
        ValueError: For shards or settings that cannot be.
        AgreementError: If the ranks differ in dtypes, shapes, settings or secrets.
        GossipError: If a rank dies meanwhile.

    Example:
        >>> import torch, gossipgrad as gg
        >>> x, y = torch.randn(10, 3), torch.arange(10)
        >>> with gg.RingShuffle(x, y, batch_size=4) as shuffle:
        ...     [len(targets) for inputs, targets in shuffle]
        [4, 4, 2]

        `DataLoader(shuffle, batch_size=None)` takes it as well, without worker processes. Another
        `batch_size` there would make batches of batches.

    References:
        Daily et al., GossipGraD, arXiv:1803.05880, on the asynchronous distributed shuffle of
        samples. Deviations: (1) The order within a shard is drawn for each epoch; there, rows are
        taken in turn. (2) A step never waits for a neighbour; there, each waits for the rows of
        the one before. (3) Shards may be uneven, and ranks may be late, leave or die.
    """

    def __init__(
        self,
        *tensors: Shaped[Tensor, "sample ..."],
        batch_size: int,
        process_group: dist.ProcessGroup | Group | None = None,
        seed: int = 0,
        drop_last: bool = False,
        credits: int = 8,
        transport: str | TransportFactory = "tcp",
    ) -> None:
        super().__init__()
        self._group = resolve_group(process_group, asks="RingShuffle(...)")
        try:
            _check_arguments(tensors, batch_size, seed, drop_last, credits)
            self.rank, self.world_size = self._group.rank, self._group.world_size
            batch_size, seed = int(batch_size), int(seed)
            self.batch_size, self.seed, self.drop_last = batch_size, seed, bool(drop_last)
            self._num_rows = len(tensors[0])
            settings = {
                "batch_size": batch_size,
                "drop_last": drop_last,
                "dtypes": [str(tensor.dtype) for tensor in tensors],
                "shapes of a row": [list(tensor.shape[1:]) for tensor in tensors],
            }
            sizes, run = _agree(self._group, settings, self._num_rows)
            self._flow = Flow(sizes, batch_size=batch_size, drop_last=drop_last)
            self._rows = Rows(tensors)
            self._ring: Ring | None = None
            links = resolve_transport(transport)
            if self.world_size > 1:
                self._ring = Ring(
                    links(self._group),
                    self._rows,
                    run=run,
                    credits=credits,
                    most_rows=self._flow.most_rows,
                    members=self._group.members,
                )
        except BaseException:
            self._group.close()
            raise
        self._epoch = -1
        self._next_epoch = 0
        self._batches_left = 0
        self._order: Int[np.ndarray, " slot"] = np.empty(0, dtype=np.int64)
        self._handed_out = 0  # in the order: the slots before it were handed out
        self._iteration = 0
        self._steps = 0
        self._flow_step = 0
        self._rows_stale = 0
        self._closed = False
        self._process = os.getpid()

    def __len__(self) -> int:
        """Batches an epoch."""
        return num_batches(self._num_rows, self.batch_size, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch: the one that was set, or the one after the last.

        Raises:
            ValueError: In a worker process of a DataLoader, or once closed.
        """
        if get_worker_info() is not None or os.getpid() != self._process:
            raise ValueError(_NO_WORKERS)
        return self._iterate()

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; it decides the order."""
        check_whole(0, epoch=epoch)
        self._next_epoch = int(epoch)

    def rows(self) -> Batch:
        """Copies of the rows that are this rank's at this moment, in no particular order."""
        return self._rows.unpack(self._rows.content())

    def stats(self) -> RingShuffleStats:
        """What was done so far; no communication."""
        ring, rows = self._ring, self._rows
        return RingShuffleStats(
            steps=self._steps,
            rows_held=int(rows.held.sum()) + rows.waiting_count,
            rows_sent=0 if ring is None else ring.rows_out,
            rows_received=0 if ring is None else ring.rows_in,
            rows_in_flight=0 if ring is None else sum(map(len, ring.in_flight)),
            rows_lost=0 if ring is None else ring.rows_lost,
            rows_stale=self._rows_stale,
            late_rounds=0 if ring is None else ring.late_rounds,
            bytes_sent=0 if ring is None else ring.bytes_sent,
            bytes_received=0 if ring is None else ring.bytes_received,
            moving_seconds=0.0 if ring is None else ring.moving_seconds,
            extra_memory_bytes=0 if ring is None else ring.extra_memory_bytes,
            refused_messages=0 if ring is None else ring.refused,
            ranks_gone=() if ring is None else tuple(sorted(ring.gone)),
        )

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Leaves the ring; local. What this rank holds stays readable with `rows()`.

        Waits at most `timeout_seconds` to hear which of the rows in flight have arrived.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if self._ring is not None:
            self._ring.close(timeout_seconds)
        self._group.close()

    def __enter__(self) -> "RingShuffle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ValueError(_NO_WORKERS)

    def _iterate(self) -> Iterator[Batch]:
        self._check_open()
        self._iteration += 1
        iteration = self._iteration
        self._begin_epoch()
        while iteration == self._iteration and self._batches_left:
            self._check_open()
            yield self._next_batch()

    def _begin_epoch(self) -> None:
        self._epoch = self._next_epoch
        self._next_epoch = self._epoch + 1
        self._batches_left = len(self)
        slots = np.setdiff1d(np.arange(self._num_rows), self._rows.spare)
        order = np.random.default_rng((self.seed, self._epoch, self.rank)).permutation(slots)
        # As long as ever, should rows be missing.
        self._order, self._handed_out = np.resize(order, self._num_rows), 0

    def _next_batch(self) -> Batch:
        rows, ring = self._rows, self._ring
        used, rest = self._order[: self._handed_out], self._order[self._handed_out :]
        last = self._batches_left == 1 and not self.drop_last
        size = len(rest) if last else self.batch_size
        if ring is not None:
            ring.poll()
        if not rows.held[rest[:size]].all():
            rest = np.concatenate([rest[rows.held[rest]], rest[~rows.held[rest]]])  # late ones last
            self._order = np.concatenate([used, rest])
        slots = rest[:size]
        self._handed_out += len(slots)
        self._rows_stale += int((~rows.held[slots]).sum())
        if ring is None:
            batch = rows.read(slots)
        else:
            batch = ring.hand_out(slots, self._flow.rows(self._flow_step), used[::-1])
        self._steps += 1
        self._flow_step += 1
        self._batches_left -= 1
        return rows.unpack(batch)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the shuffle is closed: its rows are in rows()")


def _agree(group: Group, settings: dict[str, Any], num_rows: int) -> tuple[list[int], bytes]:
    """The sizes of all shards, and 16 bytes for this ring; a collective."""
    mine = {"settings": settings, "rows": num_rows, "run": secrets.token_hex(16)}
    answers = group.all_gather_object(mine)
    for rank, other in zip(group.members, answers, strict=True):
        for name, value in answers[0]["settings"].items():
            if other["settings"][name] != value:
                raise AgreementError(
                    f"rank {rank} has {name}={other['settings'][name]}, rank {group.members[0]} "
                    f"has {value}: rows travel from one to the other, so both need the same"
                )
    sizes = [other["rows"] for other in answers]
    if len(sizes) > 1 and min(sizes) < 2:
        raise ValueError(
            f"rank {sizes.index(min(sizes))} has {min(sizes)} rows, but every rank needs two at "
            "least: one to train on while the other travels"
        )
    return sizes, bytes.fromhex(answers[0]["run"])


def _check_arguments(
    tensors: tuple[Tensor, ...],
    batch_size: int,
    seed: int,
    drop_last: bool,
    credits: int,
) -> None:
    """Refuses what this rank can know to be wrong."""
    if not tensors:
        raise ValueError("no tensors: give inputs and targets, RingShuffle(x, y, batch_size=64)")
    lengths = [len(tensor) if tensor.ndim else 0 for tensor in tensors]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"tensors have {lengths} rows, but need equally many, and at least one")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor lies on {tensor.device}: keep the shard in host memory, and move each "
                "batch to the device"
            )
    check_whole(1, batch_size=batch_size, credits=credits)
    check_whole(0, seed=seed)
    if not num_batches(lengths[0], batch_size, drop_last=drop_last):
        raise ValueError(
            f"{lengths[0]} rows make no batch of {batch_size} with drop_last: use smaller batches"
        )
