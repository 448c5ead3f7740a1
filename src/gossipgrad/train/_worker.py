"""A worker process of the launcher: joins the others, trains, reports over its pipe."""

import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from gossipgrad.comm import Group

from ._batches import Groups
from ._config import TrainConfig
from ._layout import RunDir
from ._living import take_part
from ._metrics import Event
from ._rank import train_rank
from ._result import RankResult
from ._serving import serve
from ._tasks import load_job

LOOPBACK = "127.0.0.1"


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

    See `serve` for what goes over `pipe`.
    """

    def work(stop: threading.Event, emit: Callable[[Event], None]) -> RankResult:
        config = spec.config
        job = load_job(config)
        with take_part(spec.run_dir):  # a launcher that is killed goes a moment before its workers
            return train_rank(
                config,
                job,
                spec.run_dir,
                rank=spec.rank,
                world_size=spec.world_size,
                stop=stop,
                emit=emit,
                groups=_join(spec) if config.needs_links else None,
                members=spec.members,
            )

    serve(pipe, work, errors=lambda: spec.run_dir.errors(spec.rank), quiet=spec.rank != 0)


def _join(spec: WorkerSpec) -> Groups | None:
    # Without this Gloo listens where the host name leads, which may be a public address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if spec.config.needs_every_rank:
        store = _store(spec.store_port)
        dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world_size)
        return None
    return lambda name: Group(
        group_store(spec.store_port, spec.members, name),
        spec.rank,
        spec.world_size,
        members=spec.members,
    )


def group_store(port: int, members: Collection[int], name: str) -> dist.Store:
    """Where the group of that name meets, of a start with such members."""
    # Groups of their own can be among those who are left of an earlier start.
    return dist.PrefixStore(name, dist.PrefixStore(f"start{len(members)}", _store(port)))


def _store(port: int) -> dist.Store:
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(minutes=5))
