"""What any worker process does around its work: signs of life, the word to stop, its end."""

import contextlib
import logging
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from gossipgrad.errors import GossipError

from ._metrics import Event
from ._model_file import write_errors
from ._result import DivergedError, PeerLostError, RankResult

BEAT_SECONDS = 0.5
# Before the first step a lost rank shows in these.
_OTHERS_GONE = (GossipError, dist.DistError)

Work = Callable[[threading.Event, Callable[[Event], None]], RankResult]


def serve(pipe: Connection, work: Work, *, errors: Callable[[], Path], quiet: bool = False) -> None:
    """Do the work of a worker process, and report over its pipe.

    Whatever comes over `pipe` means stop; its end means that the launcher is gone, and the process
    ends at once. Back go events: "beat" all the time, whatever it is busy with, those of the work
    ("ready" when it trains), and as the last "result" or "failed". Ctrl-C reaches the launcher,
    which passes it on; here it is ignored.

    Args:
        pipe: To the launcher.
        work: Gets an event that is set when it is to stop, and what sends events.
        errors: Where the traceback of an error goes.
        quiet: Whether warnings are left to another worker, which has the same.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher tells of lost ranks and of a lost store, and all ranks would warn of the same.
    logger = logging.getLogger("gossipgrad")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    if quiet:
        warnings.simplefilter("ignore")
    stop = threading.Event()
    threading.Thread(target=_listen, args=(pipe, stop), daemon=True).start()
    ready, over = threading.Event(), threading.Event()
    sending = threading.Lock()

    def emit(event: Event) -> None:
        if event["event"] == "ready":
            ready.set()
        if event["event"] in ("result", "failed"):
            over.set()
        with sending:
            pipe.send(event)

    threading.Thread(target=_beat, args=(emit, over), daemon=True).start()
    try:
        result = work(stop, emit)
        emit({"event": "result", "result": result.to_json()})
    except Exception as error:
        write_errors(errors(), traceback.format_exc())
        started = ready.is_set()
        emit(
            {
                "event": "failed",
                "started": started,
                "cause": short_cause(error),
                "is_consequence": isinstance(error, PeerLostError)
                or (not started and isinstance(error, _OTHERS_GONE)),
                "is_fatal": isinstance(error, DivergedError),
            }
        )
        # A broken process group may hang in its own teardown; there is nothing left to save.
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def short_cause(error: BaseException) -> str:
    """An exception in one line; its type is left out where the message is meant for the user."""
    lines = str(error).strip().splitlines() or ["no message"]
    if isinstance(error, (ValueError, GossipError)):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0]}"


def _beat(emit: Callable[[Event], None], over: threading.Event) -> None:
    """Show signs of life until the end: only a process that stands still as a whole is silent."""
    with contextlib.suppress(OSError):
        while not over.wait(BEAT_SECONDS):
            emit({"event": "beat"})


def _listen(pipe: Connection, stop: threading.Event) -> None:
    try:
        while True:
            pipe.recv()
            stop.set()
    except (EOFError, OSError):
        os._exit(1)
