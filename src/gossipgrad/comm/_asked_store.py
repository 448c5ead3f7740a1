"""Asking a rendezvous store that may hang, without hanging oneself; and ending with the process."""

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
import zmq.utils.garbage  # noqa: F401  # registers with `atexit`, too: before `_end_all`

__all__ = ["AskedStore", "Deadline", "StoreSilentError", "StoreThread", "finalize_early"]

T = TypeVar("T")

_LISTEN_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # of the time between two looks count; a thread that waits looks far more often
_END_SECONDS = 2.0  # a store that hangs keeps no process from its end

_Question = tuple[Callable[[dist.Store], Any], "Future[Any]"]


class StoreSilentError(RuntimeError):
    """The rendezvous store did not answer in time: its host hangs, or is out of reach."""


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


class StoreThread(threading.Thread):
    """A daemon that asks a store. The end of the process ends it first, and waits for it a little.

    A thread that comes back from a call of torch's store while the interpreter ends aborts the
    process ("terminate called without an active exception"), whose exit code then says that it
    failed: the interpreter ends the thread inside C++ that cannot be unwound.

    Args:
        target: What it does.
        end: Tells it to end; may be called several times, and returns at once.
        name: Of the thread.
    """

    def __init__(
        self, target: Callable[[], object], end: Callable[[], object], *, name: str
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.end = end


class AskedStore:
    """A rendezvous store, asked by a thread with a connection of its own.

    A store whose host is stopped accepts questions and never answers, and its client waits in them
    for as long. Here it is the thread that waits. One thread asks, one question at a time and in
    order; once one is not answered in time, every other fails at once until its answer comes.

    Args:
        store: The store, of which a clone is asked; or what makes a connection to it.
        timeout_seconds: How long an answer is awaited.
    """

    def __init__(
        self, store: dist.Store | Callable[[], dist.Store], *, timeout_seconds: float = 10.0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._silent: Future[Any] | None = None
        connect: Callable[[], dist.Store]
        connect = store.clone if isinstance(store, dist.Store) else store  # pyrefly: ignore
        end = partial(self._questions.put, None)
        answer = partial(_answer, connect, self._questions)
        self._thread = StoreThread(answer, end, name="gossipgrad-store")
        self.close = weakref.finalize(self, end)

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
        if self._silent is not None and not self._silent.done():
            raise StoreSilentError("the rendezvous store has not answered an earlier question")
        answer, deadline = self.begin(question), Deadline(limit)
        while not deadline.is_over():
            try:
                return answer.result(_LISTEN_SECONDS)
            except NotYetError:
                if answer.done():  # just now, or the error is the store's own
                    return answer.result()
                listen()
        self._silent = answer
        raise StoreSilentError(f"the rendezvous store did not answer within {limit:g} s")

    def begin(self, question: Callable[[dist.Store], T]) -> "Future[T]":
        """Asks without waiting, behind all that was asked before; the answer comes in time."""
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        if self._thread.ident is None:
            self._thread.start()
        return answer


def finalize_early(
    owner: object, end: Callable[..., object], *arguments: object
) -> weakref.finalize:
    """As `weakref.finalize`, but at the end of the process before libraries in use shut down.

    What `atexit` has last comes first. `weakref` registered before ZeroMQ did, over which the last
    word of a session goes.
    """
    finalizer = weakref.finalize(owner, end, *arguments)
    finalizer.atexit = False  # pyrefly: ignore[missing-attribute]
    atexit.register(finalizer)  # does nothing once it was called or detached
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
            connection = None  # one that has failed once stays broken
            answer.set_exception(error)
        del asked, question, answer


def _end_all() -> None:
    threads = [each for each in threading.enumerate() if isinstance(each, StoreThread)]
    for thread in threads:
        thread.end()
    deadline = time.monotonic() + _END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


# Before what registers later: sessions that nobody has closed ask the store at the end.
atexit.register(_end_all)
