"""Runs of the command that others join: ranks in threads, with samples that can be held up."""

import json
import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from gossipgrad.comm import Group
from gossipgrad.data import Dataset, DatasetInfo, TensorSamples
from gossipgrad.train import TrainConfig, config_of_run
from gossipgrad.train._folder import claim
from gossipgrad.train._join import RunJoiner, invite
from gossipgrad.train._rank import train_rank
from gossipgrad.train._state import reopen
from support.jobs import job_of
from support.launched import count
from support.waiting import HANG_SECONDS, until

__all__ = ["SAMPLES", "Dead", "Gate", "Gated", "Run", "Slow"]

ENDLESS = 100_000
SAMPLES = 48


class Slow(TensorSamples):
    """Samples that take their time, until somebody has joined."""

    should_hurry = threading.Event()
    pause_seconds = 0.01

    def batch(self, indices, *, augment=None):
        self.should_hurry.wait(self.pause_seconds)
        return super().batch(indices, augment=augment)


class Dead(BaseException):
    """Ends the thread of a rank that is to die."""


class Gate:
    """What holds readers up while it is shut.

    Attributes:
        open: Set while it is open.
        shut_for: How many readers it shuts for as soon as all have gone through equally often; 0:
            it does not. One that waits there has none beyond it that waits for it.
        waiting: How many readers wait.
        deadly: By the name of a thread, what is done as it is let through and dies.
    """

    def __init__(self):
        self.open, self.waiting, self.deadly = threading.Event(), 0, {}
        self.shut_for = self._passed = 0
        self.open.set()
        self._lock = threading.Lock()

    def go_through(self):
        with self._lock:
            if self.shut_for and self._passed % self.shut_for == 0:
                self.open.clear()
                self.shut_for = 0
            if self.open.is_set():
                self._passed += 1
                return
            self.waiting += 1
        assert self.open.wait(HANG_SECONDS)
        with self._lock:
            self.waiting -= 1
            self._passed += 1
        if (die := self.deadly.pop(threading.current_thread().name, None)) is not None:
            die()
            raise Dead


@dataclass(frozen=True)
class Gated(TensorSamples):
    """Samples behind a gate."""

    gate: Gate = field(default_factory=Gate)

    def batch(self, indices, *, augment=None):
        self.gate.go_through()
        return super().batch(indices, augment=augment)


class Run:
    """Two ranks that gossip, and those who join them; all in threads."""

    def __init__(self, tmp_path, train=None, resumed=False, **options):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(SAMPLES, 1, 2, 3, generator=generator), torch.arange(SAMPLES) % 3
        info = DatasetInfo(
            name="toy",
            input_shape=(1, 2, 3),
            num_classes=3,
            train_samples=SAMPLES,
            test_samples=SAMPLES,
        )
        self.dataset = Dataset(info=info, train=(train or Slow)(x, y), test=Gated(x, y))
        Slow.should_hurry.clear()
        if resumed:
            config, self.run_dir = reopen(config_of_run(tmp_path / "run"))
        else:
            self.run_dir = claim(tmp_path / "run", name="", overwrite=True)
            usual = {"batch_size": 4, "log_every": 1, "trace": 0, "epochs": ENDLESS}
            config = TrainConfig(nproc=2, **usual | options)
        self.config = config.resolved(nproc=2, out=self.run_dir.path)
        if not resumed:
            self.config.write(self.run_dir.config)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stop = threading.Event()
        self.events, self.results, self.threads = [], {}, []
        for rank in range(2):
            self._start(rank, self._train, rank)
        self.wait(self.run_dir.invitation.exists)

    def wait(self, condition):
        """Until it holds; what a rank has failed of is raised before."""
        until(lambda: self._failure() is not None or condition())
        if (failure := self._failure()) is not None:
            raise failure

    def join(self, *, steps=8):
        """Has another join and make some steps; its rank, and what tells it to leave."""
        rank, leave = self.begin_to_join()
        self.wait(lambda: count(self.run_dir.path, rank()) >= steps)
        Slow.should_hurry.set()
        return rank(), leave

    def begin_to_join(self):
        """Has another join: a function that waits for its rank, and what tells it to leave."""
        leave, joined = threading.Event(), []

        def emit(event):
            if event["event"] == "joined":
                joined.append(event["rank"])

        self._start(-1, self._join, leave, emit)

        def rank():
            self.wait(lambda: bool(joined))
            return joined[0]

        return rank, leave

    def end(self):
        """Waits until all are at their end; their results."""
        self.wait(lambda: not any(thread.is_alive() for thread in self.threads))
        return self.results

    def _failure(self):
        found = [one for one in self.results.values() if isinstance(one, BaseException)]
        return found[0] if found else None

    def _start(self, name, body, *arguments):
        def run():
            try:
                result = body(*arguments)
                self.results[result.rank] = result
            except Dead:
                pass
            except BaseException as error:
                self.results[threading.current_thread().name] = error

        self.threads.append(threading.Thread(target=run, name=f"rank {name}", daemon=True))
        self.threads[-1].start()

    def _train(self, rank):
        store = dist.TCPStore(
            "127.0.0.1", self.store.port, is_master=False, timeout=timedelta(seconds=100)
        )
        return train_rank(
            self.config,
            job_of(self.config, self.dataset),
            self.run_dir,
            rank=rank,
            world_size=2,
            stop=self.stop,
            emit=self.events.append,
            groups=lambda name: Group(dist.PrefixStore(name, store), rank, 2),
            invite=invite,
        )

    def _join(self, leave, emit):
        invited = json.loads(self.run_dir.invitation.read_text())
        newcomer = RunJoiner(invited["address"], self.run_dir, stop=leave, emit=emit)
        config = TrainConfig.from_file(self.run_dir.config, same_run=True)
        try:
            return train_rank(
                config.resolved(nproc=2, out=self.run_dir.path),
                job_of(self.config, self.dataset),
                self.run_dir,
                rank=0,
                world_size=2,
                stop=leave,
                emit=emit,
                joiner=newcomer,
                invite=invite,
            )
        finally:
            newcomer.close()
