"""The thread in which a ring shuffle works: no signal cuts an exchange in two."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """Does one thing after another in a thread of its own, while the caller waits.

    Signal handlers run in the main thread alone, between any two of its instructions, and may
    raise: Ctrl-C does. An exchange that was cut there would have taken a row from one list and not
    yet put it into another. Here the exception ends the waiting, and what was begun is finished.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gossipgrad-ring-shuffle")
        self._pool.submit(int).result()  # the thread runs before anything could cut its start
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._ended = False
        self._process = os.getpid()

    def do(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises.

        Where an exception reaches the caller meanwhile, `function` goes on to its end all the same;
        it learns of it from `is_awaited`.
        """
        if os.getpid() != self._process:  # no thread came along into a fork
            return function()
        abandoned = threading.Event()

        def work() -> T:
            with self._lock:
                self._abandoned = abandoned
                return function()

        try:
            try:
                future = self._pool.submit(work)
            except RuntimeError:
                if self._ended or not threading.main_thread().is_alive():
                    return work()  # the thread is no more, and neither are the links
                raise
            return future.result()
        except BaseException:
            abandoned.set()
            raise

    def is_awaited(self) -> bool:
        """Whether somebody still waits for what is being done."""
        return not self._abandoned.is_set()

    def end(self) -> None:
        """Lets the thread go once it has done what it was given; then callers do it themselves."""
        self._ended = True
        self._pool.shutdown(wait=False)
