"""Ranks in processes of their own that train, stop or are cut short, and go on, act by act."""

import contextlib
import dataclasses
import json
import shutil
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gossipgrad import checkpoint
from gossipgrad.comm import Group
from gossipgrad.train import TrainConfig, _state, config_of_run
from gossipgrad.train._folder import RunDir, claim
from gossipgrad.train._rank import train_rank
from gossipgrad.train._state import reopen
from gossipgrad.train._tasks import load_job
from gossipgrad.train.strategies import _stopping
from support.waiting import HANG_SECONDS

__all__ = ["Act", "StopsAfter", "play"]


@dataclass(frozen=True, kw_only=True)
class Act:
    """A run, or the resumption of a copy of one.

    Attributes:
        name: Of its folder.
        resumes: The run that a copy of is resumed; None: it begins anew.
        options: Of the run, or those that are others at the resumption.
        stops: After how many steps of this act each rank is told to stop; empty: none is.
        patient: Whether each checkpoint waits for the disk, also where steps do not.
        world_size: How many ranks come; None: all.
    """

    name: str
    resumes: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    world_size: int | None = None
    patient: bool = False


class StopsAfter(threading.Event):
    """Is set from when it was asked more than so many times: the loop asks before each step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def is_set(self) -> bool:
        """Whether it is time to stop."""
        self._left -= 1
        if self._left < 0:
            self.set()
        return super().is_set()


def play(rank: int, store: Any, folder: str, world_size: int, acts: list[Act]) -> dict[str, Any]:
    """What each act came to on this rank: its result and the events, or the error as text.

    The ranks meet in a file: connections to a store over the network look up names of hosts.
    """
    torch.set_num_threads(1)
    # However slow the disk or a rank is, it is awaited: acts go on with what others have left.
    _state._WRITE_SECONDS = HANG_SECONDS
    _stopping._GRACE_SECONDS = HANG_SECONDS
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    warnings.simplefilter("ignore")
    came_to = {}
    for act in acts:
        size = act.world_size or world_size
        try:
            dist.barrier()  # ranks that do not meet may still be at the act before
            chosen = _prepared(rank, store, Path(folder), act, world_size)
            if rank >= size:
                continue
            with _patience() if act.patient else contextlib.nullcontext():
                came_to[act.name] = _train(rank, store, act, chosen, size)
        except Exception:
            came_to[act.name] = traceback.format_exc()
    return came_to


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    real = checkpoint.Saver.save

    def save(self: checkpoint.Saver, state: Any, **options: Any) -> bool:
        return real(self, state, **options | {"wait_seconds": HANG_SECONDS})

    with mock.patch.object(checkpoint.Saver, "save", save):
        yield


def _prepared(rank: int, store: Any, folder: Path, act: Act, world_size: int) -> TrainConfig:
    """The options, and the folder made by rank 0."""
    key = f"prepared {act.name}"
    if rank == 0:
        said = {"error": "rank 0 could not prepare it"}
        try:
            said = _prepare(folder, act, world_size)
        finally:
            store.set(key, json.dumps(said))
    return TrainConfig.from_json(json.loads(store.get(key)))


def _prepare(folder: Path, act: Act, world_size: int) -> dict[str, Any]:
    path, nproc = folder / act.name, act.world_size or world_size
    if act.resumes is None:
        run_dir = claim(path, name="", overwrite=True)
        usual = {"epochs": 1, "log_every": 1, "trace": 0, "batch_size": 64}
        usual |= {"checkpoint_every": 3, "keep_checkpoints": 9}
        config = TrainConfig(**usual | act.options)
    else:
        shutil.copytree(folder / act.resumes, path)
        given = dataclasses.replace(config_of_run(path), nproc=nproc, **act.options)
        config, run_dir = reopen(given)
    config = config.resolved(nproc=nproc, out=path)
    config.write(run_dir.config)
    return config.to_json()


def _train(
    rank: int,
    store: Any,
    act: Act,
    config: TrainConfig,
    world_size: int,
) -> dict[str, Any]:
    stop = StopsAfter(act.stops[rank]) if act.stops else threading.Event()
    events: list[dict[str, Any]] = []

    def group(name: str) -> Group:
        prefix = dist.PrefixStore(f"{act.name} {name}", store)
        return Group(prefix, rank, world_size, timeout_seconds=HANG_SECONDS)

    groups: Callable[[str], Group] | None = None if config.needs_every_rank else group
    result = train_rank(
        config,
        load_job(config),
        RunDir(config.out),
        rank=rank,
        world_size=world_size,
        stop=stop,
        emit=events.append,
        groups=groups,
    )
    return {"result": dataclasses.asdict(result), "events": events}
