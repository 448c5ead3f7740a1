"""One round of a flow in flight: its snapshot, its exchanges, and their deltas."""

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gossipgrad.comm import Channel, Exchange, Outcome, Snapshot, Ticket, stage, widened
from gossipgrad.engine._flow import Delta, Flow, Phase, Sendable
from gossipgrad.topology import Peers

__all__ = ["Transfer"]


class Transfer:
    """One round of a flow in flight: the snapshot that was sent, and the exchanges by bucket."""

    def __init__(
        self, flow: Flow, channel: Channel, round: int, peers: Peers, snapshot: Snapshot
    ) -> None:
        self.flow = flow
        self.round = round
        self.generation = channel.generation
        self.peers = peers
        self.opened = 0  # how many rounds this rank had opened, with this one
        self.is_closed = False  # what is not finished yet is late
        self.was_late = False  # it was counted as late
        self.snapshot = snapshot
        self.exchanges: dict[int, Exchange] = {}
        self.on_arrival: Callable[[], None] | None = None
        self.counted: set[int] = set()  # buckets whose outcome was counted
        self.finished: set[int] = set()  # buckets that are mixed, or whose part will not arrive
        self._channel = channel
        self._staged: dict[int, Callable[[], Tensor]] = {}  # parts being copied to an accelerator
        self._deltas: dict[int, Delta] = {}
        self._versions: dict[int, int] = {}  # of received parts, by bucket
        self._filled: dict[int, Sendable] = {}
        self._into: dict[int, Tensor] = {}  # where parts are received
        self._wide: dict[int, Tensor] = {}  # where deltas are computed, if not there
        self._lock = threading.RLock()  # parts are staged in another thread
        self._is_released = False

    @property
    def is_finished(self) -> bool:
        """Whether every posted bucket is mixed or void."""
        return len(self.finished) == len(self.exchanges)

    @property
    def received_bytes(self) -> int:
        """Memory of received parts and deltas that are not mixed yet."""
        parts = [exchange.received for exchange in list(self.exchanges.values())]
        flats = [delta.flat for delta in list(self._deltas.values())]
        return sum(tensor.nbytes for tensor in (*parts, *flats) if tensor is not None)

    def fill(self, bucket: int) -> None:
        """Copy a bucket into the snapshot."""
        self._filled[bucket] = self.flow.buckets[bucket].snapshot(self.snapshot, bucket, self.round)

    def post(self, bucket: int) -> None:
        """Send a bucket, after copying it into the snapshot if that was not done."""
        if bucket not in self._filled:
            self.fill(bucket)
        payload, is_filled = self._filled.pop(bucket)
        is_on_host = self.flow.device.type == "cpu"
        if is_on_host and self.peers.recv_from is not None:
            self._into[bucket] = self.flow.pool.lend(bucket)
        ticket = Ticket()
        self.snapshot.hold(bucket, ticket)
        try:
            self.exchanges[bucket] = self._channel.post(
                self.round,
                self.flow.buckets[bucket].number,
                payload,
                send_to=self.peers.send_to,
                recv_from=self.peers.recv_from,
                into=self._into.get(bucket),
                is_filled=is_filled,
                on_arrival=partial(self._receive, bucket),
                ticket=ticket,
            )
        except BaseException:
            ticket.done = True
            raise

    def post_all(self) -> None:
        """Send every bucket that was not sent yet."""
        missing = [b for b in range(len(self.flow.buckets)) if b not in self.exchanges]
        if self.flow.phase is Phase.AFTER_UPDATE:
            missing.reverse()  # the forward pass needs its first layers first
        # All copies first: sending wakes a thread, which competes for the processor.
        for bucket in missing:
            if bucket not in self._filled:
                self.fill(bucket)
        for bucket in missing:
            self.post(bucket)
        self._channel.send_agreed()

    def wait(self, bucket: int, deadline: float) -> Outcome:
        """Wait for a bucket until `deadline` (`time.perf_counter`)."""
        return self._channel.take(self.exchanges[bucket], max(0.0, deadline - time.perf_counter()))

    def wait_all(self, deadline: float) -> None:
        """Wait for all buckets until `deadline` without mixing."""
        for bucket in self.exchanges:
            self.wait(bucket, deadline)

    @torch.no_grad()
    def delta(self, bucket: int) -> Delta | None:
        """Return `received - snapshot` of a delivered bucket, None if there is nothing to mix."""
        with self._lock:
            exchange = self.exchanges[bucket]
            received = exchange.received
            if bucket in self._deltas or self._is_released or received is None:
                return self._deltas.get(bucket)
            sent = self.snapshot.flat(bucket)
            wide, out = widened(self.flow.buckets[bucket].dtype), None
            if received.dtype != wide:
                memory = self._wide[bucket] = self.flow.pool.lend_wide(wide)
                out = memory[: received.numel()]
            elif exchange.release is not None:
                out = self._into.get(bucket)
            version = self._versions.setdefault(bucket, received._version)
            if received._version != version:  # Ctrl-C interrupted after the in-place subtraction
                sent = torch.zeros_like(sent)
            if self.flow.device.type != "cpu":
                self._stage(bucket)
                received = self._staged.pop(bucket)()
            delta = self.flow.buckets[bucket].delta(received, sent, self.round, out)
            self._deltas[bucket] = delta
            exchange.received = None
            exchange.release_part()
            self.snapshot.drop(bucket)
            return delta

    def forget(self, bucket: int) -> None:
        """Drop a received part after it is mixed."""
        self.exchanges[bucket].received = None
        self._deltas.pop(bucket, None)
        if (into := self._into.pop(bucket, None)) is not None:
            self.flow.pool.keep(bucket, into)
        if (wide := self._wide.pop(bucket, None)) is not None:
            self.flow.pool.keep_wide(wide)

    def describe(self, bucket: int) -> dict[str, object]:
        """Return a finished exchange's attributes for a trace."""
        exchange = self.exchanges[bucket]
        return {
            "round": self.round,
            "generation": self.generation,
            "bucket": exchange.bucket,
            "send_to": self.peers.send_to,
            "recv_from": self.peers.recv_from,
            "bytes": self.flow.parts[bucket].size_bytes,
            "outcome": exchange.outcome.value,
        }

    def release(self) -> None:
        """Return the snapshot to its pool, once."""
        with self._lock:
            again, self._is_released = self._is_released, True
            self._staged.clear()
            self._into.clear()  # a cancelled part may still be written there
            for exchange in self.exchanges.values():
                exchange.release_part()
        if not again:
            self.snapshot.release()

    def _receive(self, bucket: int, exchange: Exchange) -> None:
        """Begin to copy an arrived part to an accelerator, or read it in its sender's memory."""
        self.exchanges[bucket] = exchange  # `post` may not have returned
        if self.flow.device.type != "cpu":
            self._stage(bucket)
        elif exchange.release is not None:
            self._read(bucket)
        if self.on_arrival is not None:
            self.on_arrival()

    @torch.no_grad()
    def _read(self, bucket: int) -> None:
        """Read a part in its sender's memory: the delta, or a copy if that would be wider."""
        with self._lock:
            exchange, into = self.exchanges[bucket], self._into.get(bucket)
            received = exchange.received  # None: the training thread has read it
            if self._is_released:
                exchange.release_part()
            elif received is not None and into is not None:
                if received.dtype == widened(self.flow.buckets[bucket].dtype):
                    self.delta(bucket)
                else:
                    exchange.received = into.copy_(received)
                    exchange.release_part()

    def _stage(self, bucket: int) -> None:
        with self._lock:
            received = self.exchanges[bucket].received
            if received is not None and bucket not in self._staged and not self._is_released:
                self._staged[bucket] = stage(received, self.flow.device)

    def cancel(self) -> None:
        """Cancel exchanges whose parts have not arrived."""
        for exchange in self.exchanges.values():
            self._channel.cancel(exchange)
        self.release()
