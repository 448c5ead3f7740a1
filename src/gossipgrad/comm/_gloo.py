"""Links over torch's Gloo: a 2-rank group and two threads a link, for where ZeroMQ cannot go."""

import queue
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gossipgrad.comm._group import Group
from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket

__all__ = ["GlooTransport"]

_POLL_SECONDS = 0.002
_FOREVER = timedelta(days=30)  # a deadline that expires inside Gloo breaks the pair for good


class _Message:
    """What stands in a link's queue, and its ticket."""

    def __init__(self, header: bytes, payload: Tensor | None) -> None:
        self.header = header
        self.payload = payload
        self.done = False


class GlooTransport:
    """Links of real `torch.distributed` Gloo pairs, made when first used.

    Gloo's point-to-point works have no future and poll false until waited for, so each link has a
    thread that sends and one that receives; a late partner blocks only its own link.

    Args:
        group: Its store is where the two ends of a link find each other.
        max_payload_bytes: A larger message is refused before memory is taken, and ends its link.
    """

    def __init__(self, group: Group, *, max_payload_bytes: int = 1 << 32) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._store = dist.PrefixStore("links", group.store)
        self._max_payload_bytes = max_payload_bytes
        self._events: queue.SimpleQueue[Arrival | Lost] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._links: dict[int, _GlooLink] = {}
        self._closed = False

    def open(self, peer: int) -> None:
        """Starts to make the link; the threads do the rest."""
        with self._lock:
            if not self._closed:
                self._link(peer)

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """Queues a message for the link's sending thread."""
        with self._lock:
            if self._closed:
                return Sent()
            message = _Message(header, None if payload is None else payload.view(torch.uint8))
            self._link(peer).outbox.put(message)
            return message

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """What the receiving threads have laid down."""
        events: list[Arrival | Lost] = []
        try:
            if timeout_seconds > 0:
                events.append(self._events.get(timeout=timeout_seconds))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def forget(self, peer: int) -> None:
        """Drops the link to `peer`."""
        with self._lock:
            link = self._links.pop(peer, None)
        if link is not None:
            link.stop()

    def close(self, linger_seconds: float = 0.0) -> None:
        """Sends what is queued for at most `linger_seconds`; then the links end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links.values())
        self._store.set(f"left/{self.rank}", "1")
        deadline = time.monotonic() + linger_seconds
        for link in links:
            link.finish(max(0.0, deadline - time.monotonic()))

    def _link(self, peer: int) -> "_GlooLink":
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _GlooLink(
                self._store, self.rank, peer, self._events, self._max_payload_bytes
            )
        return link


class _GlooLink:
    """The two threads of a link."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        peer: int,
        events: queue.SimpleQueue[Arrival | Lost],
        max_payload_bytes: int,
    ) -> None:
        self.outbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._peer = peer
        self._side = int(rank > peer)
        self._events = events
        self._max_payload_bytes = max_payload_bytes
        self._pair: dist.ProcessGroupGloo | None = None
        self._stopped = threading.Event()
        self._sender = threading.Thread(
            target=self._send_all, args=(store, rank), name=f"gossipgrad-to-{peer}", daemon=True
        )
        self._sender.start()

    def stop(self) -> None:
        """Ends the link at once; what is queued is dropped."""
        self._stopped.set()
        self.outbox.put(None)
        self._pair = None

    def finish(self, timeout_seconds: float) -> None:
        """Ends the link when the queue is empty, or `timeout_seconds` are over."""
        self.outbox.put(None)
        self._sender.join(timeout_seconds)
        self.stop()

    def _make(self, store: dist.Store, rank: int) -> dist.ProcessGroupGloo | None:
        """Waits for the other end without blocking anyone; None if it left or we stopped."""
        low, high = sorted((rank, self._peer))
        # A clone has its own connection: two links in the making must not wait for each other.
        own = dist.PrefixStore(f"{low}-{high}", store.clone())
        own.set(f"ready/{rank}", "1")
        while not own.check([f"ready/{self._peer}"]):
            if self._stopped.wait(_POLL_SECONDS) or store.check([f"left/{self._peer}"]):
                return None
        return dist.ProcessGroupGloo(own, self._side, 2, _FOREVER)

    def _send_all(self, store: dist.Store, rank: int) -> None:
        try:
            pair = self._make(store, rank)
            if pair is None:
                self._lose()
                return
            self._pair = pair
            threading.Thread(
                target=self._receive_all,
                args=(pair,),
                name=f"gossipgrad-from-{self._peer}",
                daemon=True,
            ).start()
            while (message := self.outbox.get()) is not None and not self._stopped.is_set():
                header = torch.frombuffer(bytearray(message.header), dtype=torch.uint8)
                size = 0 if message.payload is None else message.payload.numel()
                sizes = torch.tensor([header.numel(), size], dtype=torch.int64)
                for tensor in (sizes, header, message.payload):
                    if tensor is not None and tensor.numel():
                        pair.send([tensor], 1 - self._side, 0).wait()
                message.done = True
        except RuntimeError:
            self._lose()
        finally:
            self._release()

    def _receive_all(self, pair: dist.ProcessGroupGloo) -> None:
        def take(count: int, dtype: torch.dtype) -> Tensor:
            tensor = torch.empty(count, dtype=dtype)
            pair.recv([tensor], 1 - self._side, 0).wait()
            return tensor

        try:
            while not self._stopped.is_set():
                header_bytes, size = take(2, torch.int64).tolist()
                if not 0 < header_bytes < 1 << 14 or not 0 <= size <= self._max_payload_bytes:
                    break
                header = take(header_bytes, torch.uint8).numpy().tobytes()
                payload = take(size, torch.uint8) if size else None
                self._events.put(Arrival(header, payload))
        except RuntimeError:
            pass
        self._lose()

    def _lose(self) -> None:
        if not self._stopped.is_set():
            self._events.put(Lost(self._peer))

    def _release(self) -> None:
        """Lets go of the memory of whatever is still queued."""
        while True:
            try:
                message = self.outbox.get_nowait()
            except queue.Empty:
                return
            if message is not None:
                message.done = True
