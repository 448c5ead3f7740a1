"""A thread that takes in what partners send while the training thread computes."""

import threading
from collections.abc import Iterable

from gossipgrad.comm import Channel
from gossipgrad.decentralized._transfer import Transfer

__all__ = ["Listener"]

_LISTEN_SECONDS = 0.1  # how long one look takes; closing waits so long for the last one


class Listener:
    """Takes parts as they come, and their deltas, so that little is left to do at the step's end.

    Nothing is mixed here: what is mixed, when and in which order is the training thread's alone.
    The thread starts with the first transfer, sleeps while nothing is awaited, and ends with the
    channel.

    Args:
        channel: Where the parts come.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._awaited: list[Transfer] = []
        self._wake = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def expect(self, transfers: Iterable[Transfer]) -> None:
        """Looks after transfers that were posted, until all of them have come.

        Raises:
            BaseException: What taking in earlier ones failed with.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        with self._wake:
            self._awaited.extend(transfers)
            self._wake.notify()
        if self._awaited and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._listen, name="gossipgrad-listener", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Lets the thread end; what it is at is let go of by whoever closes the channel."""
        with self._wake:
            self._closed = True
            self._awaited.clear()
            self._wake.notify()

    def _listen(self) -> None:
        try:
            self._take_in()
        except BaseException as error:
            self._error = error
            self._awaited.clear()

    def _take_in(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._awaited)
                if self._closed or self._channel.closed:
                    return
                awaited = list(self._awaited)
            self._channel.poll(_LISTEN_SECONDS)
            done = {id(transfer) for transfer in awaited if transfer.prepare()}
            with self._wake:
                self._awaited = [t for t in self._awaited if id(t) not in done]
