"""A section of the payload: tensors of one kind and device that travel in the same rounds."""

import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipgrad.comm import (
    BucketPlan,
    Channel,
    Exchange,
    Outcome,
    Snapshot,
    SnapshotPool,
    Ticket,
    is_sharded,
    split,
    to_device,
)
from gossipgrad.decentralized._in_turn import RoundBefore
from gossipgrad.decentralized._mixing import delta_of, mix, replace, widened
from gossipgrad.decentralized._tensors import Entry
from gossipgrad.topology import Peers

__all__ = ["Delta", "Section", "Transfer", "release"]


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
    ) -> None:
        self.entries = list(entries)
        self.device = entries[0].parameter.device
        self.plan = BucketPlan.make(
            [entry.spec for entry in entries], bucket_bytes=bucket_bytes, wire_dtype=wire_dtype
        )
        self.first_bucket = first_bucket
        self.measures_distance = of_weights
        self.pool = SnapshotPool(self.plan, self.device, snapshots)
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

    def begin(
        self, channel: Channel, round: int, peers: Peers, deadline_seconds: float
    ) -> "Transfer | None":
        """Starts a transfer, sending nothing yet; None if there is no snapshot by the deadline."""
        snapshot = self.pool.acquire(lambda: channel.poll(0.001), deadline_seconds)
        return None if snapshot is None else Transfer(self, channel, round, peers, snapshot)

    @torch.no_grad()
    def delta(self, bucket: int, flat: Tensor) -> Delta:
        """A delta, ready to be mixed."""
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


class Transfer:
    """One round of a section under way: the snapshot that was sent, and the exchanges."""

    def __init__(
        self, section: Section, channel: Channel, round: int, peers: Peers, snapshot: Snapshot
    ) -> None:
        self.section = section
        self.round = round
        self.peers = peers
        self.snapshot = snapshot
        self.exchanges: dict[int, Exchange] = {}
        self.counted: set[int] = set()  # buckets of which it is known how they ended
        self.taken: set[int] = set()  # those that are dealt with: mixed, or nothing came
        self.behind = RoundBefore()
        self.told_of: list[Callable[[int, Delta | None], None]] = []
        self._channel = channel
        self._deltas: dict[int, Delta] = {}
        self._versions: dict[int, int] = {}
        self._filled: dict[int, tuple[Tensor, Callable[[], None] | None]] = {}
        self._preparing = threading.RLock()  # a thread that prepares may collect the session
        self._over = False

    @property
    def tickets(self) -> list[Ticket]:
        """Of what was sent."""
        return [exchange.ticket for exchange in self.exchanges.values()]

    @property
    def received_bytes(self) -> int:
        """Memory of what has come and is not mixed yet, deltas too."""
        parts = [exchange.received for exchange in list(self.exchanges.values())]
        flats = [delta.flat for delta in list(self._deltas.values())]
        return sum(tensor.nbytes for tensor in (*parts, *flats) if tensor is not None)

    def fill(self, bucket: int) -> None:
        """Copies a bucket into the snapshot."""
        self._filled[bucket] = self.snapshot.take(bucket, self.section.tensors(bucket))

    def refill(self, bucket: int, flat: Tensor) -> None:
        """Lays what an earlier snapshot held into this one."""
        self._filled[bucket] = self.snapshot.put(bucket, flat)

    def post(self, bucket: int) -> None:
        """Sends a bucket, and copies it into the snapshot before if that was not done."""
        if bucket not in self._filled:
            self.fill(bucket)
        payload, filled = self._filled.pop(bucket)
        to = self.peers.send_to
        turn = None if to is None else self._channel.turn(self.round, to)
        ready = self.behind.then(filled, turn)
        exchange = self._channel.post(
            self.round,
            self.section.first_bucket + bucket,
            payload,
            send_to=self.peers.send_to,
            recv_from=self.peers.recv_from,
            ready=ready,
        )
        self.snapshot.hold(exchange.ticket)
        self.exchanges[bucket] = exchange

    def post_all(self) -> None:
        """Sends every bucket that was not sent yet."""
        missing = [b for b in range(len(self.section.plan.buckets)) if b not in self.exchanges]
        # All copies first: sending wakes a thread, which takes the processor from this one.
        for bucket in missing:
            if bucket not in self._filled:
                self.fill(bucket)
        for bucket in missing:
            self.post(bucket)

    def take(self, bucket: int, deadline: float) -> Outcome:
        """Waits for a bucket until `deadline` (`time.perf_counter`)."""
        return self._channel.take(self.exchanges[bucket], max(0.0, deadline - time.perf_counter()))

    def await_parts(self, deadline: float) -> None:
        """Waits for all buckets until `deadline`, and mixes nothing."""
        for bucket in self.exchanges:
            self.take(bucket, deadline)

    def holds_live(self) -> bool:
        """Whether the live tensors are, bit for bit, what was sent."""
        return all(
            torch.equal(v, sent)
            for bucket, views in enumerate(self.snapshot.buffers.views)
            for v, sent in zip(self.section.tensors(bucket), views, strict=True)
            if v is not None
        )

    def prepare(self) -> bool:
        """Takes the deltas of what has come; whether all has. From any thread, like `delta`."""
        buckets = list(self.exchanges)
        came = [bucket for bucket in buckets if not self.exchanges[bucket].open]
        if self.section.device.type == "cpu":  # an accelerator's copies belong to its own stream
            for bucket in came:
                self.delta(bucket)
        return self._over or len(came) == len(buckets)

    @torch.no_grad()
    def delta(self, bucket: int, *, keep: bool = False) -> Delta | None:
        """`received - snapshot` of a delivered bucket, None if there is nothing to mix.

        With `keep`, what was received stays as it is, for `difference_to_live`.
        """
        with self._preparing:
            exchange = self.exchanges[bucket]
            if bucket in self._deltas or self._over or exchange.received is None:
                return self._deltas.get(bucket)
            sent = self.snapshot.flats[bucket]
            dtype = widened(self.section.plan.buckets[bucket].dtype)
            received = to_device(exchange.received, sent)
            version = self._versions.setdefault(bucket, exchange.received._version)
            if exchange.received._version == version:
                flat = delta_of(received, sent, dtype, keep=keep)
            else:  # an interrupt came when it was taken in place already
                flat = received
            delta = self.section.delta(bucket, flat)
            if not keep:
                self._deltas[bucket] = delta
                exchange.received = None
            return delta

    @torch.no_grad()
    def difference_to_live(self, bucket: int) -> Delta | None:
        """`received - v` with the live tensors, for the authors' rule."""
        exchange = self.exchanges[bucket]
        if exchange.received is None:
            return None
        layout = self.section.plan.buckets[bucket]
        live = torch.zeros(
            layout.part.numel, dtype=widened(layout.dtype), device=self.section.device
        )
        for v, place in zip(
            self.section.tensors(bucket), split(live, self.section.plan, layout), strict=True
        ):
            if v is not None:
                place.copy_(v)
        received = to_device(exchange.received, live).to(live.dtype)
        return self.section.delta(bucket, torch.sub(received, live, out=live))

    def bring(self, bucket: int, flat: Tensor) -> None:
        """Takes a delta that came before, with nothing sent for it now."""
        at = self.section.first_bucket + bucket
        exchange = Exchange(self.round, at, None, self.peers.recv_from)
        exchange.finish(Outcome.DELIVERED)
        self.exchanges[bucket] = exchange
        self._deltas[bucket] = self.section.delta(bucket, flat.to(self.section.device, copy=True))

    def tell(self, bucket: int, delta: Delta | None) -> None:
        """Says to who wants to know what a bucket came to, right before it is mixed."""
        for tell in self.told_of:
            tell(bucket, delta)

    def told(self, bucket: int) -> dict[str, object]:
        """What a trace tells of an exchange that is over."""
        exchange = self.exchanges[bucket]
        return {
            "round": self.round,
            "bucket": exchange.bucket,
            "send_to": exchange.send_to,
            "recv_from": exchange.recv_from,
            "bytes": self.section.plan.parts[bucket].size_bytes,
            "outcome": exchange.outcome.value,
        }

    def forget(self, bucket: int) -> None:
        """Lets go of what was received, once it is mixed."""
        self.exchanges[bucket].received = None
        self._deltas.pop(bucket, None)

    def release(self) -> None:
        """Gives the snapshot back, once."""
        with self._preparing:  # nobody may read what is written anew
            again, self._over = self._over, True
        if not again:  # it may be another transfer's by now
            self.section.pool.release(self.snapshot)

    def cancel(self) -> None:
        """Gives up what has not come."""
        for exchange in self.exchanges.values():
            self._channel.cancel(exchange)
        self.release()


def release(transfers: Sequence[Transfer]) -> None:
    """Gives the snapshots of transfers back."""
    for transfer in transfers:
        transfer.release()
