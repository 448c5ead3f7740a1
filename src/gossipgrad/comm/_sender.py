"""Sending what is not filled yet: a thread that waits for a buffer, then hands it on."""

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from gossipgrad.comm._transport import Sent, Ticket
from gossipgrad.errors import GossipError

__all__ = ["DeferredSender"]

Transmit = Callable[[int, bytes, Tensor | None], Ticket]


class _Deferred:
    """A message that waits for its buffer, and its ticket."""

    def __init__(
        self, peer: int, header: bytes, payload: Tensor | None, ready: Callable[[], None] | None
    ) -> None:
        self.message = (peer, header, payload)
        self.ready = ready
        self.ticket: Ticket | None = None

    @property
    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done


class DeferredSender:
    """Hands messages on in order, some of them only once their buffer is filled.

    The thread starts with the first message that has to wait; from then on all messages go through
    it, so that their order stays. What fails in it is raised by the next `send` or `check`.

    Args:
        transmit: Gets peer, header and payload; returns the transport's ticket.
    """

    def __init__(self, transmit: Transmit) -> None:
        self._transmit = transmit
        self._queue: queue.SimpleQueue[_Deferred | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def send(
        self,
        peer: int,
        header: bytes,
        payload: Tensor | None,
        ready: Callable[[], None] | None,
    ) -> Ticket:
        """Sends at once, or when `ready` has returned.

        Raises:
            GossipError: If an earlier message could not be sent.
        """
        self.check()
        if self._thread is None:
            if ready is None:
                return self._transmit(peer, header, payload)
            self._thread = threading.Thread(
                target=self._work, name="gossipgrad-sender", daemon=True
            )
            self._thread.start()
        deferred = _Deferred(peer, header, payload, ready)
        self._queue.put(deferred)
        return deferred

    def check(self) -> None:
        """Raises what kept an earlier message from being sent.

        Raises:
            GossipError: If there was such a thing.
        """
        if isinstance(self._error, GossipError):
            raise self._error
        if self._error is not None:
            raise GossipError(f"a message could not be sent: {self._error}") from self._error

    def drain(self, timeout_seconds: float) -> None:
        """Waits until all is handed on, at most `timeout_seconds`; the thread ends then."""
        if self._thread is None:
            return
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
        self._thread = None

    def _work(self) -> None:
        while (deferred := self._queue.get()) is not None:
            if self._error is None:
                try:
                    if deferred.ready is not None:
                        deferred.ready()
                    deferred.ticket = self._transmit(*deferred.message)
                except BaseException as error:
                    self._error = error
            deferred.ticket = deferred.ticket or Sent()
