"""A worker process of the launcher: joins the others, trains, reports over its pipe."""

import contextlib
import logging
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from gossipgrad import data
from gossipgrad.comm import Group
from gossipgrad.errors import GossipError

from ._batches import Groups
from ._config import TrainConfig
from ._layout import RunDir
from ._metrics import Event
from ._rank import train_rank
from ._result import DivergedError, PeerLostError

LOOPBACK = "127.0.0.1"
BEAT_SECONDS = 0.5
# Before the first step a lost rank shows in these.
_OTHERS_GONE = (GossipError, dist.DistError)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a worker is told."""

    config: TrainConfig
    run_dir: RunDir
    rank: int
    world_size: int
    store_port: int
    members: tuple[int, ...]
    """The ranks that are started; others were lost in an earlier start."""


def worker_main(spec: WorkerSpec, pipe: Connection) -> None:
    """Body of a worker process.

    Whatever comes over `pipe` means stop; its end means that the launcher is gone, and the process
    ends at once. Back go events: "beat" all the time, whatever it is busy with, "ready" when it
    trains, then "progress", "epoch", "store", and as the last "result" or "failed". Ctrl-C reaches
    the launcher, which passes it on; here it is ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher tells of lost ranks and of a lost store, and all ranks would warn of the same.
    logger = logging.getLogger("gossipgrad")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    if spec.rank != 0:
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
        config = spec.config
        dataset = data.load(config.data, config.data_dir, image_size=config.image_size)
        groups = _join(spec) if spec.config.needs_links else None
        result = train_rank(
            spec.config,
            dataset,
            spec.run_dir,
            rank=spec.rank,
            world_size=spec.world_size,
            stop=stop,
            emit=emit,
            groups=groups,
        )
        emit({"event": "result", "result": result.to_json()})
    except Exception as error:
        with contextlib.suppress(OSError):
            spec.run_dir.errors(spec.rank).write_text(traceback.format_exc())
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


def _join(spec: WorkerSpec) -> Groups | None:
    # Without this Gloo listens where the host name leads, which may be a public address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(LOOPBACK, spec.store_port, is_master=False, timeout=timedelta(minutes=5))
    if spec.config.needs_every_rank:
        dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world_size)
        return None
    # Groups of their own can be among those who are left of an earlier start.
    start = dist.PrefixStore(f"start{len(spec.members)}", store)
    return lambda name: Group(
        dist.PrefixStore(name, start), spec.rank, spec.world_size, members=spec.members
    )


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
