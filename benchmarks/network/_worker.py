"""A worker of the laboratory: joins groups, makes contestants and runs blocks of steps on order.

It lives in a host's network namespace; orders come through a socket of the file system, which
namespaces share, so that they take nothing of the shaped links.
"""

import gc
import resource
import sys
import time
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._common import forget_peak, memory_bytes
from gossipgrad.planning import Profile

from ._contestants import KINDS, Contestant, Surroundings
from ._replay import sharpen_sleep

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

    def make(self, name: str, profile: dict, *surroundings: Any) -> None:
        """Makes a contestant."""
        self._bytes_before[name] = forget_peak()  # from here on the peak is this contestant's
        self._held[name] = KINDS[name].make(Surroundings(Profile.from_json(profile), *surroundings))
        # What stays is not looked at again: a collection in a block would hold up this rank, and
        # with it all that wait for it.
        gc.collect()
        gc.freeze()

    def prepare(self, name: str) -> None:
        """What a contestant needs before its steps are those that it takes for long."""
        dist.barrier()
        self._held[name].settle()

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
        grown = memory_bytes("VmHWM") - self._bytes_before[name]
        return {"seconds": seconds, "memory_bytes": grown}

    def run(self, name: str, warm_up: int, steps: int, begin: float) -> dict[str, Any]:
        """Runs a block from a moment (`time.perf_counter`, the same in all processes) on.

        Steps of the warm-up are not measured.
        """
        contestant, device = self._held[name], self._held[name].device
        user = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        late = max(0.0, time.perf_counter() - begin)
        time.sleep(max(0.0, begin - time.perf_counter()))
        for _ in range(warm_up):
            contestant.step()
        device.reset()
        cpu, ends = time.process_time(), [time.perf_counter()]
        for _ in range(steps):
            contestant.step()
            ends.append(time.perf_counter())
        planned = device.planned_seconds
        return {
            "steps": [end - start for start, end in pairwise(ends)],
            "cpu_seconds": time.process_time() - cpu,
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
