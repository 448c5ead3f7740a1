"""A worker of the laboratory: joins groups, makes contestants and runs blocks, as it is told.

It lives in a host's network namespace; orders come through a socket of the file system, which
namespaces share, so that they take nothing of the shaped links.
"""

import argparse
import gc
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad.planning import Profile

from ._block import run_block
from ._contestants import Contestant, Surroundings
from ._kinds import kind_of
from ._replay import sharpen_sleep

_GROUP_SECONDS = 120.0
_HARDLY = 0.02  # of the compute


class Worker:
    """What a worker holds between orders."""

    def __init__(self) -> None:
        self._held: dict[str, Contestant] = {}
        self._bytes_before: dict[str, int] = {}  # of memory, when it was made
        self._store: dist.TCPStore | None = None

    def listen(self, address: str, port: int) -> int:
        """Opens the store of the next group, on a free port if that is 0; which it is.

        The port is taken from then on: none that was free a moment ago has to be so still.
        """
        self._store = _store(address, port, is_master=True)
        return self._store.port

    def join(self, rank: int, world_size: int, address: str, port: int) -> None:
        """Makes the default process group; rank 0 keeps the store that it has opened."""
        if rank:
            self._store = _store(address, port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_GROUP_SECONDS),
        )

    def make(self, name: str, profile: dict, size_factor: float, *more: Any) -> int:
        """Makes a contestant; the bytes of its parameters. What is more goes to `compete`."""
        # The kernel keeps a high-water mark: from here on it is this contestant's.
        Path("/proc/self/clear_refs").write_text("5")
        self._bytes_before[name] = _memory_bytes("VmRSS")
        surroundings = Surroundings(profile=Profile.from_json(profile), size_factor=size_factor)
        made = self.compete(name, surroundings, *more)
        self._held[name] = made
        # What stays is not looked at again: a collection in a block would hold up this rank, and
        # with it all that wait for it.
        gc.collect()
        gc.freeze()
        model = getattr(made, "model", None)
        return 0 if model is None else sum(p.nbytes for p in model.parameters())

    def compete(self, name: str, surroundings: Surroundings, *more: Any) -> Contestant:
        """A contestant by its name."""
        return kind_of(name).make(surroundings)

    def settle(self, name: str, steps: int) -> dict[str, float]:
        """Steps with hardly any compute, after a barrier that takes the others along."""
        contestant = self._held[name]
        contestant.device.pace = _HARDLY
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            contestant.step()
        seconds = (time.perf_counter() - start) / steps
        contestant.device.pace = 1.0
        return {
            "seconds": seconds,
            "memory_bytes": _memory_bytes("VmHWM") - self._bytes_before[name],
        }

    def run(
        self, name: str, warm_up: int, steps: int, hurried: bool, load_former_states: float
    ) -> dict[str, Any]:
        """Runs a block from a moment (`time.perf_counter`, the same in all processes) on."""
        user = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        late = max(0.0, time.perf_counter() - load_former_states)
        time.sleep(max(0.0, load_former_states - time.perf_counter()))
        block = run_block(self._held[name], warm_up, steps, hurried=hurried)
        return {
            **asdict(block),
            "started_late_seconds": late,
            "user_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime - user,
        }

    def leave(self) -> None:
        """Lets go of all contestants and of the group."""
        for contestant in self._held.values():
            contestant.close()
        self._held.clear()
        dist.barrier()
        dist.destroy_process_group()
        self._store = None
        gc.unfreeze()
        gc.collect()


def _store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    timeout = timedelta(seconds=_GROUP_SECONDS)
    return dist.TCPStore(address, port, is_master=is_master, timeout=timeout)


def _memory_bytes(what: str) -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{what}:"))


def _load() -> None:
    """A step of training: what torch loads for the first one is no contestant's memory."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    weight.sum().backward()
    optimizer.step()


def main(kind: type[Worker] = Worker) -> None:
    """Carries out orders until the socket closes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--host", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sharpen_sleep()
    _load()
    worker = kind()
    with Client(options.socket, family="AF_UNIX") as orders:
        orders.send(options.host)
        while True:
            try:
                method, arguments = orders.recv()
            except EOFError:
                return
            orders.send(_carry_out(getattr(worker, method), arguments))


def _carry_out(method: Callable[..., Any], arguments: tuple) -> tuple[bool, Any]:
    try:
        return True, method(*arguments)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


if __name__ == "__main__":
    main()
