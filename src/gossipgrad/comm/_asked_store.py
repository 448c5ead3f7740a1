"""Asking a rendezvous store that may hang, without hanging oneself."""

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

from gossipgrad.comm._store_threads import end_with_process

__all__ = ["AskedStore", "Deadline", "StoreSilentError"]

T = TypeVar("T")

_LISTEN_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # of the time between two looks count; whoever waits looks far more often

_Asked = tuple[Callable[[dist.Store], Any], "Future[Any]"]


class StoreSilentError(RuntimeError):
    """The rendezvous store did not answer in time: its host stands still, or is out of reach."""


class Deadline:
    """A timeout of which only the time counts that this process itself has run.

    A process that is stopped (SIGSTOP, a host that sleeps) would else find that others, who may
    have answered long ago, are late.

    Args:
        seconds: How long.
    """

    def __init__(self, seconds: float) -> None:
        self._left_seconds = seconds
        self._looked_seconds = time.monotonic()

    def is_over(self) -> bool:
        """Whether the time is over; to be asked again and again while waiting."""
        now = time.monotonic()
        self._left_seconds -= min(now - self._looked_seconds, _LOOK_SECONDS)
        self._looked_seconds = now
        return self._left_seconds <= 0


class AskedStore:
    """A rendezvous store, asked by a thread with a connection of its own.

    A store whose host is stopped accepts questions and never answers, and its client waits in them
    for as long. Here it is the thread that waits. One thread asks, one question at a time; while
    one is unanswered, every other fails at once, and it goes on when the answer comes.

    Args:
        store: The store, of which a clone is asked; or what makes a connection to it.
        timeout_seconds: How long an answer is awaited.
    """

    def __init__(
        self, store: dist.Store | Callable[[], dist.Store], *, timeout_seconds: float = 10.0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._questions: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._pending: Future[Any] | None = None
        # A daemon: one that hangs would keep the interpreter from its end.
        connect: Callable[[], dist.Store]
        connect = store.clone if isinstance(store, dist.Store) else store  # pyrefly: ignore
        thread = threading.Thread(
            target=_answer, args=(connect, self._questions), name="gossipgrad-store", daemon=True
        )
        thread.start()
        end = partial(self._questions.put, None)
        self.close = weakref.finalize(self, end)
        end_with_process(thread, end)

    def ask(
        self,
        question: Callable[[dist.Store], T],
        *,
        timeout_seconds: float | None = None,
        listen: Callable[[], object] = lambda: None,
    ) -> T:
        """What `question` returns for the store; can be interrupted.

        Args:
            question: Called with the store, in the thread.
            timeout_seconds: How long its answer is awaited; None: as always.
            listen: Called in between; what it raises ends the wait.

        Raises:
            StoreSilentError: There is no answer in time, or to an earlier question.
            RuntimeError: As the store does.
        """
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        if self._pending is not None and not self._pending.done():
            raise StoreSilentError("the rendezvous store has not answered an earlier question")
        answer = self.begin(question)
        deadline = Deadline(limit)
        while not answer.done():
            if deadline.is_over():
                raise StoreSilentError(f"the rendezvous store did not answer within {limit:g} s")
            try:
                return answer.result(_LISTEN_SECONDS)
            except NotYetError:
                listen()
        return answer.result()

    def begin(self, question: Callable[[dist.Store], T]) -> "Future[T]":
        """Asks without waiting, behind all that was asked before; the answer comes in time."""
        answer: Future[T] = Future()
        self._pending = answer
        self._questions.put((question, answer))
        return answer


def _answer(
    connect: Callable[[], dist.Store], questions: "queue.SimpleQueue[_Asked | None]"
) -> None:
    connection: dist.Store | None = None
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            if connection is None:
                connection = connect()
            answer.set_result(question(connection))
        except BaseException as error:
            connection = None  # one that has failed once stays broken
            answer.set_exception(error)
        del asked, question, answer
