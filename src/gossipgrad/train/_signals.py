"""Ctrl-C and SIGTERM as a request to stop, not as an exception."""

import gc
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from gossipgrad.launch import Echoes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OVER = b"\0"  # no signal has this number


class Stops:
    """The signals caught so far, the first one first."""

    def __init__(self) -> None:
        self.caught: list[signal.Signals] = []

    @property
    def first(self) -> signal.Signals | None:
        """What asked for the stop, None if nothing did."""
        return self.caught[0] if self.caught else None

    @property
    def insisted(self) -> bool:
        """Whether a second signal asks to stop at once."""
        return len(self.caught) > 1


@contextmanager
def blocking_stops() -> Iterator[None]:
    """Block SIGINT and SIGTERM for processes that are started inside; other threads take them.

    A batch system sends SIGTERM to all processes at once, and the workers of a DataLoader must
    outlive it to the last step. No other process has them blocked: `multiprocessing.Pool`, for one,
    ends its workers by SIGTERM and waits for them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ending_workers() -> Iterator[None]:
    """End the workers of loaders that are started inside, at the latest when it is left."""
    # Persistent ones live until the loader is collected. This process may end without the functions
    # of `atexit`, and they take no SIGTERM.
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        gc.collect()
        _kill([child for child in multiprocessing.active_children() if child not in before])


def _kill(children: list[BaseProcess]) -> None:
    """Kill workers, without torch's error for a worker that is killed, in the main thread."""
    workers = [child for child in children if child.daemon]  # others may have something to end
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if workers and is_main else None
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1.0)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def catch_stops(on_stop: Callable[[Stops], None]) -> Iterator[Stops]:
    """Collect SIGINT and SIGTERM in a thread: the main one may be inside a collective.

    `on_stop` is called for the first one, and for each that is no echo of it.
    """
    stops = Stops()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    read_end, wakeup_end = socket.socketpair()
    wakeup_end.setblocking(False)

    def listen() -> None:
        echoes = Echoes()
        while (number := read_end.recv(1)) not in (b"", _OVER):
            if number[0] in _SIGNALS and not echoes.has_one_now():
                stops.caught.append(signal.Signals(number[0]))
                on_stop(stops)

    listener = threading.Thread(target=listen, daemon=True)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)
    listener.start()
    try:
        yield stops
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        wakeup_end.send(_OVER)  # a forked child may hold this end open, too
        listener.join()
        wakeup_end.close()
        read_end.close()


def end_at_once(stops: Stops) -> None:
    """End this process with the shell's code for the last signal, whatever hangs in it."""
    _kill(multiprocessing.active_children())
    os._exit(128 + stops.caught[-1])
