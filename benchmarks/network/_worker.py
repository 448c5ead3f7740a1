"""A worker of the laboratory: joins groups, makes contestants and runs blocks of steps on order.

It lives in a host's network namespace; orders come through a socket of the file system, which
namespaces share, so that they take nothing of the shaped links.
"""

import gc
import resource
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad.planning import Profile

from ._contestants import Contestant, Surroundings
from ._kinds import KINDS
from ._replay import sharpen_sleep
from ._sparse import Sparsified

_GROUP_SECONDS = 120.0
_HARDLY = 0.02  # of the compute


class Worker:
    """What a worker holds between orders."""

    def __init__(self) -> None:
        self._held: dict[str, Contestant] = {}
        self._bytes_before: dict[str, int] = {}  # of memory, when it was made
        self._store: dist.TCPStore | None = None

    def join(self, rank: int, world_size: int, address: str, port: int) -> None:
        """Makes the default process group; rank 0 keeps its store."""
        timeout = timedelta(seconds=_GROUP_SECONDS)
        self._store = dist.TCPStore(
            address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo", store=self._store, rank=rank, world_size=world_size, timeout=timeout
        )

    def make(self, name: str, profile: dict, size_factor: float, sparse: Any) -> None:
        """Makes a contestant."""
        # The kernel keeps a high-water mark: from here on it is this contestant's.
        Path("/proc/self/clear_refs").write_text("5")
        self._bytes_before[name] = _memory_bytes("VmRSS")
        surroundings = Surroundings(
            profile=Profile.from_json(profile), size_factor=size_factor, sparse=sparse
        )
        self._held[name] = KINDS[name].make(surroundings)
        # What stays is not looked at again: a collection in a block would hold up this rank, and
        # with it all that wait for it.
        gc.collect()
        gc.freeze()

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
        memory = _memory_bytes("VmHWM") - self._bytes_before[name]
        return {"seconds": seconds, "memory_bytes": memory}

    def measured(self, name: str) -> dict[str, Any]:
        """What a session has measured that plans itself."""
        dist.barrier()
        contestant = self._held[name]
        assert isinstance(contestant, Sparsified)
        return contestant.measured()

    def run(
        self, name: str, warm_up: int, steps: int, hurried: bool, begin: float
    ) -> dict[str, Any]:
        """Runs a block from a moment (`time.perf_counter`, the same in all processes) on.

        Steps of the warm-up are not measured; in a hurry, a step that is like the one before is not
        run, and takes what that one took.
        """
        contestant, device = self._held[name], self._held[name].device
        user = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        late = max(0.0, time.perf_counter() - begin)
        time.sleep(max(0.0, begin - time.perf_counter()))
        for _ in range(warm_up):
            contestant.step()
        device.reset()
        seconds: list[float] = []
        cpu_seconds: list[float] = []
        for _ in range(steps):
            if hurried and seconds and contestant.skip():
                seconds.append(seconds[-1])
                cpu_seconds.append(cpu_seconds[-1])
                continue
            start, cpu = time.perf_counter(), time.process_time()
            contestant.step()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu)
        planned = device.planned_seconds
        return {
            "seconds": sum(seconds),
            "cpu_seconds": sum(cpu_seconds),
            "late_share": device.late_seconds / planned if planned else 0.0,
            "started_late_seconds": late,
            "user_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime - user,
        }

    def leave(self) -> None:
        """Closes all contestants and the group."""
        for contestant in self._held.values():
            contestant.close()
        self._held.clear()
        dist.barrier()
        dist.destroy_process_group()
        self._store = None
        gc.unfreeze()
        gc.collect()


def _memory_bytes(what: str) -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{what}:"))


def main(socket: str, host: int) -> None:
    """Carries out orders until the socket closes."""
    torch.set_num_threads(1)
    sharpen_sleep()
    # A step of training: what torch loads for the first one is no contestant's memory.
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.SGD([weight]).step()
    worker = Worker()
    with Client(socket, family="AF_UNIX") as orders:
        orders.send(host)
        while True:
            try:
                method, arguments = orders.recv()
            except EOFError:
                return
            try:
                answer = True, getattr(worker, method)(*arguments)
            except Exception as error:
                answer = False, f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            orders.send(answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
