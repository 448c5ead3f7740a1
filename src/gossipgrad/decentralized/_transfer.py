"""One round of a section under way: its snapshot, its exchanges, and their deltas."""

import threading
import time
from collections.abc import Sequence

import torch

from gossipgrad.comm import (
    Channel,
    Exchange,
    Outcome,
    Snapshot,
    Ticket,
    to_device,
)
from gossipgrad.decentralized._in_turn import RoundBefore
from gossipgrad.decentralized._section import Delta, Meeting, Section, Sendable
from gossipgrad.topology import Peers

__all__ = ["Transfer", "release"]


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
        self._channel = channel
        self._deltas: dict[int, Delta] = {}
        self._versions: dict[int, int] = {}
        self._filled: dict[int, Sendable] = {}
        self._preparing = threading.RLock()  # a thread that prepares may collect the session
        self._over = False

    @classmethod
    def begin(
        cls, section: Section, channel: Channel, round: int, peers: Peers, deadline_seconds: float
    ) -> "Transfer | None":
        """Starts a transfer, sending nothing yet; None if there is no snapshot by the deadline."""
        snapshot = section.pool.acquire(lambda: channel.poll(0.001), deadline_seconds)
        return None if snapshot is None else cls(section, channel, round, peers, snapshot)

    @property
    def meeting(self) -> Meeting:
        """Which round it is, and who is met."""
        return Meeting(self.round, self.peers)

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
        self._filled[bucket] = self.section.fill(self.snapshot, bucket, self.meeting)

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
        """Whether the live tensors are, bit for bit, what was sent; for what travels whole."""
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
    def delta(self, bucket: int) -> Delta | None:
        """`received - snapshot` of a delivered bucket, None if there is nothing to mix."""
        with self._preparing:
            exchange = self.exchanges[bucket]
            if bucket in self._deltas or self._over or exchange.received is None:
                return self._deltas.get(bucket)
            sent = self.snapshot.flats[bucket]
            received = to_device(exchange.received, sent)
            version = self._versions.setdefault(bucket, exchange.received._version)
            taken = exchange.received._version != version  # in place, and an interrupt came then
            delta = self.section.receive(bucket, received, sent, self.meeting, taken=taken)
            self._deltas[bucket] = delta
            exchange.received = None
            return delta

    def told(self, bucket: int) -> dict[str, object]:
        """What a trace tells of an exchange that is over."""
        exchange = self.exchanges[bucket]
        return {
            "round": self.round,
            "bucket": exchange.bucket,
            "send_to": exchange.send_to,
            "recv_from": exchange.recv_from,
            "bytes": self.section.parts[bucket].size_bytes,
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
