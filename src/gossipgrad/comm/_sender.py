"""Sending what is not filled yet: a thread that waits for a buffer, then hands it on."""

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from gossipgrad.comm._transport import Ticket, Transport

__all__ = ["DeferredSender"]


class _Deferred:
    """The ticket of a message that waits for its buffer."""

    def __init__(self) -> None:
        self.ticket: Ticket | None = None

    @property
    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done


class DeferredSender:
    """Hands messages to a transport in order, some of them only once their buffer is filled.

    The thread starts with the first message that has to wait; from then on all messages go through
    it, so that their order stays.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(
        self,
        peer: int,
        header: bytes,
        payload: Tensor | None,
        ready: Callable[[], None] | None,
    ) -> Ticket:
        """Sends at once, or when `ready` has returned."""
        if self._thread is None:
            if ready is None:
                return self._transport.send(peer, header, payload)
            self._thread = threading.Thread(
                target=self._work, name="gossipgrad-sender", daemon=True
            )
            self._thread.start()
        deferred = _Deferred()

        def hand_on() -> None:
            if ready is not None:
                ready()
            deferred.ticket = self._transport.send(peer, header, payload)

        self._queue.put(hand_on)
        return deferred

    def drain(self, timeout_seconds: float) -> None:
        """Waits until all is handed on, at most `timeout_seconds`; the thread ends then."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        self._thread = None

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
