"""The end of a process of which threads ask a rendezvous store.

A thread that comes back from a call of torch's store while the interpreter ends aborts the process,
whose exit code then says that it failed (SIGABRT, "terminate called without an active exception"):
the interpreter ends the thread inside C++ that cannot be unwound. A daemon thread has to be ended,
and awaited, before.
"""

import time
import weakref
from collections.abc import Callable
from threading import Lock, Thread

__all__ = ["end_with_process"]

# A store that hangs keeps no process from its end, and its threads do not come back.
_END_SECONDS = 2.0

_ends: weakref.WeakKeyDictionary[Thread, Callable[[], object]] = weakref.WeakKeyDictionary()
_lock = Lock()


def end_with_process(thread: Thread, end: Callable[[], object]) -> None:
    """Has the end of the process end a thread, and wait for it a little.

    Args:
        thread: A daemon, which was started.
        end: Called then, to tell it to end, though it may have been told before.
    """
    with _lock:
        _ends[thread] = end


def _end_all() -> None:
    with _lock:
        left = list(_ends.items())
    for _, end in left:
        end()
    deadline = time.monotonic() + _END_SECONDS
    for thread, _ in left:
        thread.join(max(0.0, deadline - time.monotonic()))


# At the end those made last are called first: sessions that nobody has closed ask the store then.
weakref.finalize(end_with_process, _end_all)
