"""Hundreds of ranks that come and go, and what each leaves behind with those who stay."""

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import gossipgrad as gg

from ._flat import growth
from ._rank import Training
from ._sizes import MEASURES as OF_PROCESS
from ._sizes import sizes

__all__ = ["JOINS", "MEASURES", "growth_per_join", "run_joins"]

JOINS = 300
MEASURES = ("store_keys", "record_bytes", *OF_PROCESS)
_SAMPLES = 30
_FOUNDERS = 2
_STEPS = 3  # of each newcomer
_CONSENSUS_EVERY = 10  # joins
_PAUSE_SECONDS = 0.004  # of those who stay, between two steps
_HEARTBEATS = gg.Heartbeats(interval_seconds=0.05, lease_seconds=5.0, silent_seconds=10.0)


def run_joins(joins: int) -> dict[str, Any]:
    """Two ranks train in threads of this process; others join, one after the other, and leave.

    Every tenth stays for a consensus, so that new groups are made as well. Memory and blocks are
    those of all threads; entries are those of one rank that stays.

    Returns:
        Samples, and what each measure grew by with a join, over the second half of them.

    Raises:
        RuntimeError: A rank that stays has failed.
    """
    torch.set_num_threads(1)
    home = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start, samples = time.monotonic(), []
    with _founders(home) as founders:
        address = founders[0].session.join_address()
        for number in range(1, joins + 1):
            training, meets = Training(number), number % _CONSENSUS_EVERY == 0
            with gg.join(
                training.model,
                training.optimizer,
                address,
                topology="matching",
                heartbeats=_HEARTBEATS,
            ) as session:
                for _ in range(_STEPS):
                    training.step()
                if meets:
                    for founder in founders:
                        founder.meets.release()
                    with session.consensus():
                        pass
            del session
            if number % max(1, joins // _SAMPLES) == 0:
                samples.append({"joins": number, **_look(home, founders[0].session)})
    return {
        "joins": joins,
        "seconds": round(time.monotonic() - start, 1),
        "growth_per_join": growth_per_join(samples),
        "samples": {key: [sample[key] for sample in samples] for key in samples[0]},
    }


def growth_per_join(samples: Sequence[dict[str, int]]) -> dict[str, float]:
    """What each measure rises by with a join, over the second half of the samples."""
    half = samples[len(samples) // 2 :]
    at = [sample["joins"] for sample in half]
    return {
        name: round(growth(at, [sample[name] for sample in half]) / (at[-1] - at[0]), 3)
        for name in MEASURES
    }


class _Founder(threading.Thread):
    """A rank of the start: trains until it is told to stop, and comes to each consensus."""

    def __init__(self, rank: int, home: dist.TCPStore) -> None:
        super().__init__(name=f"rank {rank}")
        self.meets, self.ready = threading.Semaphore(0), threading.Event()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.session: gg.GossipSession
        self._rank, self._home = rank, home

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error
        finally:
            self.ready.set()

    def _train(self) -> None:
        training = Training(self._rank)
        store = dist.PrefixStore("joins", _connect(self._home))
        with gg.gossip(
            training.model,
            training.optimizer,
            topology="matching",
            process_group=gg.Group(store, self._rank, _FOUNDERS),
            heartbeats=_HEARTBEATS,
        ) as self.session:
            self.ready.set()
            while not self.stop.is_set():
                training.step()
                if self.meets.acquire(blocking=False):
                    with self.session.consensus():
                        pass
                time.sleep(_PAUSE_SECONDS)


@contextmanager
def _founders(home: dist.TCPStore) -> Iterator[list[_Founder]]:
    founders = [_Founder(rank, home) for rank in range(_FOUNDERS)]
    for founder in founders:
        founder.start()
    try:
        for founder in founders:
            founder.ready.wait()
        yield founders
    finally:
        for founder in founders:
            founder.stop.set()
        for founder in founders:
            founder.join()
            if founder.error is not None:
                raise RuntimeError(f"{founder.name} has failed") from founder.error


def _look(home: dist.TCPStore, session: gg.GossipSession) -> dict[str, int]:
    """What is held in the store, in this process and by one rank."""
    gc.collect()  # a session that is over is a circle of objects
    keys = home.list_keys()
    (record,) = (key for key in keys if key.endswith("/membership"))
    return {
        "store_keys": len(keys),
        "record_bytes": len(home.get(record)),
        **sizes(session),
    }


def _connect(home: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", home.port, is_master=False, wait_for_workers=False)
