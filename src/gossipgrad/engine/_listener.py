"""A thread that receives what partners send while the training thread computes."""

import threading
from collections.abc import Iterable

from gossipgrad.comm import Channel
from gossipgrad.engine._transfer import Transfer

__all__ = ["Listener"]

_LISTEN_SECONDS = 0.1  # of one poll; closing waits so long for the last one


class Listener:
    """Receives parts as they arrive and makes their deltas, so that less is left for the step.

    Nothing is mixed here: what is mixed, when and in which order is the training thread's alone.
    The thread starts with the first transfer, sleeps while nothing is expected, and ends with the
    channel.

    Args:
        channel: Where the parts arrive.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._expected: list[Transfer] = []
        self._wake = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def expect(self, transfers: Iterable[Transfer]) -> None:
        """Looks after transfers that were posted, until all of them have arrived.

        Raises:
            BaseException: What receiving earlier ones failed with.
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
        """Tells the thread to end; closing the channel waits for its last poll."""
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
