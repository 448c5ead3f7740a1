"""A thread that receives partners' parts while the training thread computes."""

import threading
from collections.abc import Iterable

from gossipgrad.comm import Channel
from gossipgrad.engine._transfer import Transfer

__all__ = ["Listener"]

_LISTEN_SECONDS = 0.1  # the length of one poll, and of the wait for the last one when closing


class Listener:
    """Receives parts as they arrive and computes their deltas ahead of the step.

    It mixes nothing: only the training thread decides what is mixed, when and in which order. The
    thread starts with the first transfer, sleeps while nothing is expected, and ends with the
    channel.

    Args:
        channel: Receives the parts.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._expected: list[Transfer] = []
        self._wake = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def expect(self, transfers: Iterable[Transfer]) -> None:
        """Receive posted transfers until all of them have arrived.

        Raises:
            BaseException: The error of an earlier transfer.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        with self._wake:
            self._expected.extend(transfers)
            self._wake.notify()
        if self._expected and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._work, name="gossipgrad-listener", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Ask the thread to end; closing the channel waits for its last poll."""
        with self._wake:
            self._is_closed = True
            self._expected.clear()
            self._wake.notify()

    def _work(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            self._error = error
            self._expected.clear()

    def _receive(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._is_closed or self._expected)
                if self._is_closed or self._channel.closed:
                    return
                expected = list(self._expected)
            self._channel.poll(_LISTEN_SECONDS)
            done = {id(transfer) for transfer in expected if transfer.prepare()}
            with self._wake:
                self._expected = [t for t in self._expected if id(t) not in done]
