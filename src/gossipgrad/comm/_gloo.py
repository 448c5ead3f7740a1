"""Links over torch's Gloo: a 2-rank group and three threads a link, for where ZeroMQ cannot go."""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossipgrad.comm._group import Group
from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket

__all__ = ["GlooTransport"]

_POLL_SECONDS = (0.001, 0.05)  # how often a link looks for its other end, at first and later
_CONNECT = timedelta(seconds=60)
_FOREVER = timedelta(days=30)  # a deadline that expires inside Gloo breaks the pair for good
_MID_MESSAGE = timedelta(minutes=5)
_AT_ONCE = timedelta(milliseconds=1)
_JOIN_SECONDS = 0.5
_LET_GO_SECONDS = 1.0
_MESSAGE_TAG, _WATCH_TAG, _UNUSED_TAG = range(3)
_GIVEN_UP = 1 << 20
_HEADER_BYTES = 1 << 14
_LET_GO = " (let go)"  # a thread in the middle of a message of a broken pair


class _Message:
    """What stands in a link's queue, and its ticket."""

    def __init__(self, header: bytes, payload: Tensor | None) -> None:
        self.header = header
        self.payload = payload
        self.done = False


def _abandon(links: "dict[int, _GlooLink]") -> None:
    """Ends the links of a transport that nobody closed: their threads would live on."""
    for link in links.values():
        link.stop()


class GlooTransport:
    """Links of real `torch.distributed` Gloo pairs, made when first used.

    Gloo's point-to-point works have no future and poll false until waited for, so each link has a
    thread that sends and one that receives; a late partner blocks only its own link. A broken pair
    wakes whoever waits to begin a message, but not who is in the middle of one: hence a third
    thread that only waits for the end and lets everything go, and a deadline on the middles. A
    partner that stands still for five minutes while a message is on its way to it is lost.

    Args:
        group: Its store is where the two ends of a link find each other.
        max_payload_bytes: A larger message is refused before memory is taken, and ends its link.
    """

    def __init__(self, group: Group, *, max_payload_bytes: int = 1 << 32) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._store = dist.PrefixStore("links", group.store)
        self.max_payload_bytes = max_payload_bytes
        self._events: queue.SimpleQueue[Arrival | Lost] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._links: dict[int, _GlooLink] = {}
        self._closed = False
        abandoned = weakref.finalize(self, _abandon, self._links)
        abandoned.atexit = False  # pyrefly: ignore[missing-attribute]

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
            self._link(peer).put(message)
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
            self._links.clear()
        with contextlib.suppress(RuntimeError):  # the store may have died before us
            self._store.set(f"left/{self.rank}", "1")
        for link in links:
            link.say_bye()
        deadline = time.monotonic() + linger_seconds
        for link in links:
            link.finish(deadline)

    def _link(self, peer: int) -> "_GlooLink":
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _GlooLink(
                self._store, self.rank, peer, self._events, self.max_payload_bytes
            )
        return link


class _GlooLink:
    """The three threads of a link. It ends when both ends have said bye, or when one breaks it."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        peer: int,
        events: queue.SimpleQueue[Arrival | Lost],
        max_payload_bytes: int,
    ) -> None:
        self._peer = peer
        self._side = int(rank > peer)
        self._events = events
        self._max_payload_bytes = max_payload_bytes
        self._outbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way: _Message | None = None
        self._over = False
        self._lost = False
        self._pair: Any = None  # a ProcessGroupGloo, whose stub lacks send and recv
        self._stopped = threading.Event()
        self._receiver: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._sender: threading.Thread | None = None
        self._sender = self._start("to", self._send_all, store, rank)

    def put(self, message: _Message) -> None:
        """Queues a message; once the link is over it is let go at once."""
        with self._lock:
            if self._over:
                message.done = True
            else:
                self._outbox.put(message)

    def say_bye(self) -> None:
        """Lets the link end once its queue is empty."""
        self._outbox.put(None)

    def stop(self) -> None:
        """Breaks the link; what is queued is dropped, and its threads end."""
        self._stopped.set()
        self._outbox.put(None)
        pair, self._pair = self._pair, None
        if pair is not None:
            # The one thing that makes Gloo let go of a receive: a deadline that expires.
            with contextlib.suppress(RuntimeError):
                pair.recv([torch.empty(1)], 1 - self._side, _UNUSED_TAG).wait(_AT_ONCE)

    def finish(self, deadline: float) -> None:
        """After `say_bye`: waits for the other end's until `deadline` (monotonic), then stops."""
        self._join(self._sender, deadline)
        self._join(self._receiver, deadline)
        self.stop()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in (self._watcher, self._sender, self._receiver):
            self._join(thread, deadline)

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        name = f"gossipgrad-{name}-{self._peer}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    @staticmethod
    def _join(thread: threading.Thread | None, deadline: float) -> None:
        if thread is not None and not thread.name.endswith(_LET_GO):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _make(self, store: dist.Store, rank: int) -> Any:
        """Waits for the other end without blocking anyone; None if it left or we stopped."""
        low, high = sorted((rank, self._peer))
        # A clone has its own connection: two links in the making must not wait for each other.
        own = dist.PrefixStore(f"{low}-{high}", store.clone())  # pyrefly: ignore[missing-attribute]
        joined = own.add("joined", 1)
        wait, longest = _POLL_SECONDS
        while joined == 1:
            if self._stopped.wait(wait) or store.check([f"left/{self._peer}"]):
                joined = own.add("joined", _GIVEN_UP) - _GIVEN_UP
                if joined == 1:
                    return None
                break  # the other end came just now and would wait for us: connect, then break
            joined = own.add("joined", 0)
            wait = min(2 * wait, longest)
        if joined > _GIVEN_UP:
            return None
        return dist.ProcessGroupGloo(own, self._side, 2, _CONNECT)

    def _send_all(self, store: dist.Store, rank: int) -> None:
        try:
            pair = self._make(store, rank)
            if pair is None:
                self._lose()
                return
            self._watcher = self._start("with", self._watch, pair)
            self._receiver = self._start("from", self._receive_all, pair)
            self._pair = pair
            while (message := self._next()) is not None:
                self._send(pair, message)
            if not self._stopped.is_set():
                self._send(pair, None)
        except RuntimeError:
            if self._watcher is None:
                self._lose()
        finally:
            self._release()
            if self._stopped.is_set():
                self.stop()

    def _next(self) -> _Message | None:
        """The next message to send; None when there is no more, or the link is over."""
        message = self._outbox.get()
        with self._lock:
            self._under_way = message
            over = self._over or self._stopped.is_set()
        return None if over else message

    def _send(self, pair: Any, message: _Message | None) -> None:
        """Sends sizes, header and payload; sizes of zero are the bye."""
        header, payload = (b"", None) if message is None else (message.header, message.payload)
        size = 0 if payload is None else payload.numel()
        tensors = [torch.tensor([len(header), size], dtype=torch.int64)]
        if header:
            tensors.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if payload is not None and size:
            tensors.append(payload)
        for tensor in tensors:
            pair.send([tensor], 1 - self._side, _MESSAGE_TAG).wait(_MID_MESSAGE)
        if message is not None:
            message.done = True

    def _receive_all(self, pair: Any) -> None:
        def take(count: int, dtype: torch.dtype, deadline: timedelta) -> Tensor:
            tensor = torch.empty(count, dtype=dtype)
            pair.recv([tensor], 1 - self._side, _MESSAGE_TAG).wait(deadline)
            return tensor

        with contextlib.suppress(RuntimeError):
            while not self._stopped.is_set():
                header_bytes, size = take(2, torch.int64, _FOREVER).tolist()
                if not 0 < header_bytes < _HEADER_BYTES or not 0 <= size <= self._max_payload_bytes:
                    break
                header = take(header_bytes, torch.uint8, _MID_MESSAGE).numpy().tobytes()
                payload = take(size, torch.uint8, _MID_MESSAGE) if size else None
                self._events.put(Arrival(header, payload))
        self._lose()
        self.say_bye()

    def _watch(self, pair: Any) -> None:
        """Waits for the pair to break, on whichever side; then nobody touches our memory."""
        with contextlib.suppress(RuntimeError):
            pair.recv([torch.empty(1)], 1 - self._side, _WATCH_TAG).wait(_FOREVER)
        self._release()
        self.say_bye()
        deadline = time.monotonic() + _LET_GO_SECONDS
        for thread in (self._receiver, self._sender):
            self._join(thread, deadline)
            if thread is not None and thread.is_alive():
                thread.name += _LET_GO
        self._lose()  # after what the receiver still lays down

    def _lose(self) -> None:
        with self._lock:
            lost, self._lost = self._lost, True
        if not lost and not self._stopped.is_set():
            self._events.put(Lost(self._peer))

    def _release(self) -> None:
        """Lets go of the memory of whatever is under way or still queued."""
        with self._lock:
            self._over = True
            if self._under_way is not None:
                self._under_way.done = True
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._outbox.get_nowait()
                if message is not None:
                    message.done = True
