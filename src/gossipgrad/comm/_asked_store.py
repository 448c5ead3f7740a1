"""Requests to a rendezvous store that may hang, without hanging; shutdown with the process."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["AskedStore", "Deadline", "StoreSilentError", "StoreThread", "finalize_early"]

T = TypeVar("T")

_LISTEN_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # the most that counts between two checks; waits check far more often
_END_SECONDS = 2.0  # a store that hangs must not keep a process from exiting

_Question = tuple[Callable[[dist.Store], Any], "Future[Any]"]


class StoreSilentError(RuntimeError):
    """The rendezvous store did not answer in time: its host hangs or cannot be reached."""


class Deadline:
    """A timeout that counts only time in which this process ran.

    A process that was stopped (SIGSTOP, a sleeping host) would else find others late that answered.
    """

    def __init__(self, seconds: float) -> None:
        self._left_seconds = seconds
        self._looked_seconds = time.monotonic()

    def is_over(self) -> bool:
        """Whether the time is over; call it repeatedly while waiting."""
        now = time.monotonic()
        self._left_seconds -= min(now - self._looked_seconds, _LOOK_SECONDS)
        self._looked_seconds = now
        return self._left_seconds <= 0


class StoreThread(threading.Thread):
    """A daemon thread that queries a store; at exit it is stopped first, and joined briefly.

    A thread that returns from a call of torch's store while the interpreter shuts down aborts the
    process ("terminate called without an active exception"), whose exit code then says that it
    failed: the interpreter ends the thread inside C++ that cannot be unwound.

    Args:
        target: The function to run.
        end: Asks the thread to end; may be called several times, and returns immediately.
        name: The thread's name.
    """

    def __init__(
        self, target: Callable[[], object], end: Callable[[], object], *, name: str
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.end = end


class AskedStore:
    """A rendezvous store, queried by a thread with its own connection.

    A store whose host is stopped accepts requests and never answers, and its client blocks. Here
    only the thread blocks. It sends one request at a time, in order; after a timeout every other
    request fails immediately until the answer arrives.

    Args:
        store: The store, which is cloned; or a function that connects to it.
        timeout_seconds: How long to wait for an answer.
    """

    def __init__(
        self, store: dist.Store | Callable[[], dist.Store], *, timeout_seconds: float = 10.0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._silent: Future[Any] | None = None
        self._last: Future[Any] | None = None
        self._starting = threading.Lock()
        connect: Callable[[], dist.Store]
        connect = store.clone if isinstance(store, dist.Store) else store  # pyrefly: ignore
        end = partial(self._questions.put, None)
        answer = partial(_answer, connect, self._questions)
        self._thread = StoreThread(answer, end, name="gossipgrad-store")
        self.close = weakref.finalize(self, end)

    @property
    def is_busy(self) -> bool:
        """Whether a question has no answer yet."""
        return self._last is not None and not self._last.done()

    def ask(
        self,
        question: Callable[[dist.Store], T],
        *,
        timeout_seconds: float | None = None,
        listen: Callable[[], object] = lambda: None,
    ) -> T:
        """Return `question(store)`; can be interrupted.

        Args:
            question: Called with the store, in the thread.
            timeout_seconds: How long to wait for its answer; None: the default.
            listen: Called while waiting; an error that it raises ends the wait.

        Raises:
            StoreSilentError: This question or an earlier one was not answered in time.
            RuntimeError: As the store does.
        """
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        if self._silent is not None and not self._silent.done():
            raise StoreSilentError("the rendezvous store has not answered an earlier question")
        answer, deadline = self.begin(question), Deadline(limit)
        while not deadline.is_over():
            try:
                return answer.result(_LISTEN_SECONDS)
            except NotYetError:
                if answer.done():  # answered just now, or the store's own error
                    return answer.result()
                listen()
        self._silent = answer
        raise StoreSilentError(f"the rendezvous store did not answer within {limit:g} s")

    def begin(self, question: Callable[[dist.Store], T]) -> "Future[T]":
        """Queue a question without waiting; the future gets its answer."""
        answer: Future[T] = Future()
        if not self.close.alive:
            answer.set_exception(
                StoreSilentError("this rank has closed its connection to the store")
            )
            return answer
        self._last = answer
        self._questions.put((question, answer))
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        return answer


def finalize_early(
    owner: object, end: Callable[..., object], *arguments: object
) -> weakref.finalize:
    """Like `weakref.finalize`, but at exit it runs before `_end_all`.

    `atexit` calls in reverse order of registration. `weakref` registered before this module did,
    and a session that leaves still queries the store.
    """
    finalizer = weakref.finalize(owner, end, *arguments)
    finalizer.atexit = False  # pyrefly: ignore[missing-attribute]
    atexit.register(finalizer)  # does nothing after it was called or detached
    return finalizer


def _answer(
    connect: Callable[[], dist.Store], questions: "queue.SimpleQueue[_Question | None]"
) -> None:
    connection: dist.Store | None = None
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            if connection is None:
                connection = connect()
            answer.set_result(question(connection))
        except BaseException as error:
            connection = None  # a connection that failed once stays broken
            answer.set_exception(error)
        del asked, question, answer


def _end_all() -> None:
    threads = [each for each in threading.enumerate() if isinstance(each, StoreThread)]
    for thread in threads:
        thread.end()
    deadline = time.monotonic() + _END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


# Registered first, so it runs after later ones: unclosed sessions query the store at exit.
atexit.register(_end_all)
