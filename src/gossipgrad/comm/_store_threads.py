"""The end of a process of which threads ask a rendezvous store.

A thread that comes back from a call of torch's store while the interpreter ends aborts the process,
whose exit code then says that it failed (SIGABRT, "terminate called without an active exception"):
the interpreter ends the thread inside C++ that cannot be unwound. A daemon thread has to be ended,
and awaited, before.
"""

import atexit
import os
import time
import weakref
from collections.abc import Callable
from inspect import ismethod
from threading import Lock, Thread

import zmq.utils.garbage  # noqa: F401  # before `finalize_early`: it registers with `atexit`, too

__all__ = ["end_with_process", "finalize_early"]

# A store that hangs keeps no process from its end, and its threads do not come back.
_END_SECONDS = 2.0

_End = Callable[[], object]
_ends: weakref.WeakKeyDictionary[Thread, Callable[[], _End | None]] = weakref.WeakKeyDictionary()
_lock = Lock()


def end_with_process(thread: Thread, end: _End) -> None:
    """Has the end of the process end a thread, and wait for it a little.

    Args:
        thread: A daemon, which was started.
        end: Called then, to tell it to end, though it may have been told before. The object of a
            method is not kept alive for that: the thread has to, as long as it runs.
    """
    # Whoever has a thread and its end would else be kept for good, and a connection with it.
    ending = weakref.WeakMethod(end) if ismethod(end) else lambda: end
    with _lock:
        _ends[thread] = ending


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


def _end_all() -> None:
    with _lock:
        left = list(_ends.items())
    for _, ending in left:
        if (end := ending()) is not None:
            end()
    deadline = time.monotonic() + _END_SECONDS
    for thread, _ in left:
        thread.join(max(0.0, deadline - time.monotonic()))


def _forget_all() -> None:
    """In a fork of the process: no thread came along, and who was to end it may hold its locks."""
    global _lock
    _lock = Lock()
    _ends.clear()


os.register_at_fork(after_in_child=_forget_all)
# After the sessions that nobody has closed, which ask the store at the end (`finalize_early`).
weakref.finalize(end_with_process, _end_all)
