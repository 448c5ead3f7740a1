"""One round of a flow in flight: its snapshot, its exchanges, and their deltas."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gossipgrad.comm import Channel, Exchange, Outcome, Snapshot, stage
from gossipgrad.engine._flow import Delta, Flow, Phase, Sendable
from gossipgrad.topology import Peers

__all__ = ["Transfer", "earlier_of_partner", "release"]


class Transfer:
    """One round of a flow in flight: the snapshot that was sent, and the exchanges by bucket.

    Attributes:
        exchanges: The exchange of each posted bucket.
        counted: Buckets whose outcome was counted.
        finished: Buckets that are mixed, or whose part will not arrive.
    """

    def __init__(
        self, flow: Flow, channel: Channel, round: int, peers: Peers, snapshot: Snapshot
    ) -> None:
        self.flow = flow
        self.round = round
        self.generation = channel.generation
        self.peers = peers
        self.snapshot = snapshot
        self.exchanges: dict[int, Exchange] = {}
        self.counted: set[int] = set()
        self.finished: set[int] = set()
        self._channel = channel
        self._staged: dict[int, Callable[[], Tensor]] = {}  # parts being copied to an accelerator
        self._deltas: dict[int, Delta] = {}
        self._versions: dict[int, int] = {}  # of received parts, by bucket
        self._filled: dict[int, Sendable] = {}
        self._into: dict[int, Tensor] = {}  # where parts are received
        self._lock = threading.RLock()  # parts are staged in another thread
        self._is_released = False

    @classmethod
    def begin(
        cls, flow: Flow, channel: Channel, round: int, peers: Peers, timeout_seconds: float
    ) -> "Transfer | None":
        """Start a transfer without sending; return None if no snapshot is free in time."""
        snapshot = flow.pool.acquire(lambda: channel.poll(0.001), timeout_seconds)
        return None if snapshot is None else cls(flow, channel, round, peers, snapshot)

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

    def fill(self, place: int) -> None:
        """Copy a bucket into the snapshot."""
        self._filled[place] = self.flow.buckets[place].snapshot(self.snapshot, place, self.round)

    def post(self, place: int) -> None:
        """Send a bucket, after copying it into the snapshot if that was not done."""
        if place not in self._filled:
            self.fill(place)
        payload, filled = self._filled.pop(place)
        is_on_host = self.flow.device.type == "cpu"
        if is_on_host and self.peers.recv_from is not None:
            self._into[place] = self.flow.pool.lend(place)
        exchange = self._channel.post(
            self.round,
            self.flow.buckets[place].number,
            payload,
            send_to=self.peers.send_to,
            recv_from=self.peers.recv_from,
            into=self._into.get(place),
            ready=filled,
            on_arrival=None if is_on_host else partial(self._stage, place),
        )
        self.snapshot.hold(exchange.ticket)
        self.exchanges[place] = exchange

    def post_all(self) -> None:
        """Send every bucket that was not sent yet."""
        missing = [b for b in range(len(self.flow.buckets)) if b not in self.exchanges]
        if self.flow.phase is Phase.AFTER_UPDATE:
            missing.reverse()  # the forward pass needs its first layers first
        # All copies first: sending wakes a thread, which competes for the processor.
        for place in missing:
            if place not in self._filled:
                self.fill(place)
        for place in missing:
            self.post(place)
        self._channel.send_agreed()

    def wait(self, place: int, deadline: float) -> Outcome:
        """Wait for a bucket until `deadline` (`time.perf_counter`)."""
        return self._channel.take(self.exchanges[place], max(0.0, deadline - time.perf_counter()))

    def wait_all(self, deadline: float) -> None:
        """Wait for all buckets until `deadline` without mixing."""
        for place in self.exchanges:
            self.wait(place, deadline)

    @torch.no_grad()
    def delta(self, place: int) -> Delta | None:
        """Return `received - snapshot` of a delivered bucket, None if there is nothing to mix."""
        with self._lock:
            exchange = self.exchanges[place]
            received = exchange.received
            if place in self._deltas or self._is_released or received is None:
                return self._deltas.get(place)
            sent = self.snapshot.flats[place]
            version = self._versions.setdefault(place, received._version)
            if received._version != version:  # Ctrl-C interrupted after the in-place subtraction
                sent = torch.zeros_like(sent)
            if self.flow.device.type != "cpu":
                self._stage(place)
                received = self._staged.pop(place)()
            delta = self.flow.buckets[place].delta(received, sent, self.round)
            self._deltas[place] = delta
            exchange.received = None
            return delta

    def forget(self, place: int) -> None:
        """Drop a received part after it is mixed."""
        self.exchanges[place].received = None
        self._deltas.pop(place, None)
        if (into := self._into.pop(place, None)) is not None:
            self.flow.pool.give_back(place, into)

    def describe(self, place: int) -> dict[str, object]:
        """Return a finished exchange's attributes for a trace."""
        exchange = self.exchanges[place]
        return {
            "round": self.round,
            "generation": self.generation,
            "bucket": exchange.bucket,
            "send_to": exchange.send_to,
            "recv_from": exchange.recv_from,
            "bytes": self.flow.parts[place].size_bytes,
            "outcome": exchange.outcome.value,
        }

    def release(self) -> None:
        """Return the snapshot to its pool, once."""
        with self._lock:
            again, self._is_released = self._is_released, True
            self._staged.clear()
            self._into.clear()  # a cancelled part may still be written there
        if not again:  # it may belong to another transfer by now
            self.flow.pool.release(self.snapshot)

    def _stage(self, place: int) -> None:
        with self._lock:
            exchange = self.exchanges.get(place)  # None: it arrived before `post` has returned
            received = None if exchange is None else exchange.received
            if received is not None and place not in self._staged and not self._is_released:
                self._staged[place] = stage(received, self.flow.device)

    def cancel(self) -> None:
        """Cancel exchanges whose parts have not arrived."""
        for exchange in self.exchanges.values():
            self._channel.cancel(exchange)
        self.release()


def earlier_of_partner(transfer: Transfer, late: Sequence[Transfer]) -> list[Transfer]:
    """Return unfinished late transfers of earlier rounds with the same partner."""
    return [
        one
        for one in late
        if one.round < transfer.round
        and one.peers.recv_from == transfer.peers.recv_from
        and not one.is_finished
    ]


def release(transfers: Sequence[Transfer]) -> None:
    """Return the snapshots of transfers to their pools."""
    for transfer in transfers:
        transfer.release()
