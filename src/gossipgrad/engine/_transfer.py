"""One round of a flow in flight: its snapshot, its exchanges, and their deltas."""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossipgrad.comm import Channel, Exchange, Outcome, Snapshot, Ticket, stage
from gossipgrad.engine._flow import Delta, Flow, Phase, Sendable
from gossipgrad.engine._pacing import RoundBefore
from gossipgrad.topology import Peers

__all__ = ["Transfer", "earlier_of_partner", "release"]


class Transfer:
    """One round of a flow in flight: the snapshot that was sent, and the exchanges by bucket.

    Attributes:
        exchanges: Of each bucket that was posted.
        counted: Buckets whose outcome was counted.
        finished: Buckets that are mixed, or of which nothing arrived.
        behind: The round before, which leaves before this one.
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
        self.behind = RoundBefore()
        self._channel = channel
        self._staged: dict[int, Callable[[], Tensor]] = {}  # what is on its way to an accelerator
        self._deltas: dict[int, Delta] = {}
        self._versions: dict[int, int] = {}  # of what was received, by bucket
        self._filled: dict[int, Sendable] = {}
        self._lock = threading.RLock()  # the thread that prepares may collect the session
        self._is_released = False

    @classmethod
    def begin(
        cls, flow: Flow, channel: Channel, round: int, peers: Peers, timeout_seconds: float
    ) -> "Transfer | None":
        """Starts a transfer, sending nothing yet; None if there is no snapshot in time."""
        snapshot = flow.pool.acquire(lambda: channel.poll(0.001), timeout_seconds)
        return None if snapshot is None else cls(flow, channel, round, peers, snapshot)

    @property
    def is_finished(self) -> bool:
        """Whether every bucket that was posted is mixed, or void."""
        return len(self.finished) == len(self.exchanges)

    @property
    def tickets(self) -> list[Ticket]:
        """Of what was sent."""
        return [exchange.ticket for exchange in self.exchanges.values()]

    @property
    def received_bytes(self) -> int:
        """Memory of what arrived and is not mixed yet, deltas too."""
        parts = [exchange.received for exchange in list(self.exchanges.values())]
        flats = [delta.flat for delta in list(self._deltas.values())]
        return sum(tensor.nbytes for tensor in (*parts, *flats) if tensor is not None)

    def fill(self, place: int) -> None:
        """Copies a bucket into the snapshot."""
        self._filled[place] = self.flow.buckets[place].snapshot(self.snapshot, place, self.round)

    def post(self, place: int) -> None:
        """Sends a bucket, and copies it into the snapshot before if that was not done."""
        if place not in self._filled:
            self.fill(place)
        payload, filled = self._filled.pop(place)
        to = self.peers.send_to
        turn = None if to is None else self._channel.turn(self.round, to)
        exchange = self._channel.post(
            self.round,
            self.flow.buckets[place].number,
            payload,
            send_to=self.peers.send_to,
            recv_from=self.peers.recv_from,
            ready=self.behind.then(filled, turn),
        )
        self.snapshot.hold(exchange.ticket)
        self.exchanges[place] = exchange

    def post_all(self) -> None:
        """Sends every bucket that was not sent yet."""
        missing = [b for b in range(len(self.flow.buckets)) if b not in self.exchanges]
        if self.flow.phase is Phase.AFTER_UPDATE:
            missing.reverse()  # the forward pass waits for its first layers first
        # All copies first: sending wakes a thread, which takes the processor from this one.
        for place in missing:
            if place not in self._filled:
                self.fill(place)
        for place in missing:
            self.post(place)

    def wait(self, place: int, deadline: float) -> Outcome:
        """Waits for a bucket until `deadline` (`time.perf_counter`)."""
        return self._channel.take(self.exchanges[place], max(0.0, deadline - time.perf_counter()))

    def wait_all(self, deadline: float) -> None:
        """Waits for all buckets until `deadline`, and mixes nothing."""
        for place in self.exchanges:
            self.wait(place, deadline)

    def is_as_sent(self) -> bool:
        """Whether the live tensors are, bit for bit, what was sent; for what travels whole."""
        return all(
            torch.equal(v, sent)
            for bucket, views in zip(self.flow.buckets, self.snapshot.views, strict=True)
            for v, sent in zip(bucket.tensors(), views, strict=True)
            if v is not None
        )

    def prepare(self) -> bool:
        """Makes the deltas of what arrived; whether all has. From any thread, like `delta`.

        On an accelerator they belong to the stream of the training step: what arrived is brought
        there, and no more.
        """
        places = list(self.exchanges)
        arrived = [place for place in places if not self.exchanges[place].open]
        for place in arrived:
            self.delta(place) if self.flow.device.type == "cpu" else self._stage(place)
        return self._is_released or len(arrived) == len(places)

    @torch.no_grad()
    def delta(self, place: int) -> Delta | None:
        """`received - snapshot` of a delivered bucket, None if there is nothing to mix."""
        with self._lock:
            exchange = self.exchanges[place]
            received = exchange.received
            if place in self._deltas or self._is_released or received is None:
                return self._deltas.get(place)
            sent = self.snapshot.flats[place]
            version = self._versions.setdefault(place, received._version)
            if received._version != version:  # it was subtracted in place, and then Ctrl-C came
                sent = torch.zeros_like(sent)
            if self.flow.device.type != "cpu":
                self._stage(place)
                received = self._staged.pop(place)()
            delta = self.flow.buckets[place].delta(received, sent, self.round)
            self._deltas[place] = delta
            exchange.received = None
            return delta

    def forget(self, place: int) -> None:
        """Drops what was received, once it is mixed."""
        self.exchanges[place].received = None
        self._deltas.pop(place, None)

    def describe(self, place: int) -> dict[str, object]:
        """What a trace shows of an exchange that is over."""
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
        """Gives the snapshot back, once."""
        with self._lock:  # the listener must not read what is overwritten
            again, self._is_released = self._is_released, True
            self._staged.clear()
        if not again:  # it may be another transfer's by now
            self.flow.pool.release(self.snapshot)

    def _stage(self, place: int) -> None:
        with self._lock:
            received = self.exchanges[place].received
            if received is not None and place not in self._staged and not self._is_released:
                self._staged[place] = stage(received, self.flow.device)

    def cancel(self) -> None:
        """Gives up what has not arrived."""
        for exchange in self.exchanges.values():
            self._channel.cancel(exchange)
        self.release()


def earlier_of_partner(transfer: Transfer, late: Sequence[Transfer]) -> list[Transfer]:
    """Late transfers of earlier rounds with the same partner that are not finished."""
    return [
        one
        for one in late
        if one.round < transfer.round
        and one.peers.recv_from == transfer.peers.recv_from
        and not one.is_finished
    ]


def release(transfers: Sequence[Transfer]) -> None:
    """Gives the snapshots of transfers back."""
    for transfer in transfers:
        transfer.release()
