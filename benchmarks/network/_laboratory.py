"""Workers on the hosts of a network, kept alive while rates, groups and contestants change."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks._common import CpuBusy

from ._links import MOST_BITS_PER_SECOND
from ._network import Network

BLOCK_SECONDS = 240.0  # the longest a block may take
_START_SECONDS = 180.0
_ORDER_SECONDS = 180.0
_STORE_PORT = 29500
_LEAD_SECONDS = 0.05  # between the order to run and the start
_STILL_SECONDS = 0.03  # links are silent when so long next to nothing has passed
_STILL_BYTES_PER_HOST = 4096
_DRAIN_SECONDS = 60.0
_FAST_BITS_PER_SECOND = 1e9
_PLAN_SECONDS = 1800.0  # of a session that measures and plans
ROOT = Path(__file__).parents[2]


class WorkerError(RuntimeError):
    """Workers failed, died, or did not answer; the others cannot go on without them."""


class Laboratory:
    """Starts one worker a host; orders go to the first `world_size` of them."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._joined = 0
        self._workers: list[subprocess.Popen] = []
        self._output: list[IO[bytes]] = []
        self._orders: dict[int, Connection] = {}
        self._groups = 0
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def join(self, world_size: int) -> None:
        """Makes a new default process group of the first workers."""
        self._groups += 1  # a port that was closed may not be listened on again at once
        address, port = self._network.address(0), _STORE_PORT + self._groups
        self._ask({r: ("join", (r, world_size, address, port)) for r in range(world_size)})
        self._joined = world_size

    def leave(self) -> None:
        """Closes the contestants and the group."""
        self._ask_all("leave")
        self._joined = 0

    def set_rate(self, rate_bits_per_second: float | None) -> None:
        """Shapes the links of all hosts; None for a fast one."""
        fast = min(_FAST_BITS_PER_SECOND, MOST_BITS_PER_SECOND / self._joined)
        rate = rate_bits_per_second or fast
        self._network.set_rates(dict.fromkeys(range(self._network.hosts), rate), used=self._joined)

    def make(self, name: str, *surroundings: Any) -> None:
        """Makes a contestant on all ranks."""
        self._ask_all("make", name, *surroundings)

    def prepare(self, name: str) -> None:
        """Lets a contestant measure and plan, at the rate that it is to be measured at."""
        self._ask_all("prepare", name, timeout_seconds=_PLAN_SECONDS)
        self._drain()

    def settle(self, name: str, steps: int) -> dict[str, Any]:
        """Steps with hardly any compute, not measured, in which links and buffers are made."""
        answers = self._ask_all("settle", name, steps, timeout_seconds=BLOCK_SECONDS)
        self._drain()
        return {what: max(one[what] for one in answers) for what in ("seconds", "memory_bytes")}

    def run(self, name: str, warm_up: int, steps: int, spread_seconds: float) -> dict[str, Any]:
        """Runs one block on all ranks, then waits until the links are silent.

        Returns what a cell holds: times of a step are those of the slowest rank, processor seconds
        those of all ranks, bytes those that a host has sent.
        """
        before = self._network.passed_bytes(self._joined)
        busy, own = CpuBusy(), _user_seconds()
        begin = time.perf_counter() + _LEAD_SECONDS
        delay = spread_seconds / self._joined
        answers = self._ask(
            {
                rank: ("run", (name, warm_up, steps, begin + rank * delay))
                for rank in range(self._joined)
            },
            BLOCK_SECONDS,
        )
        own = _user_seconds() - own + sum(one["user_seconds"] for one in answers)
        cpu_busy, by_others = busy.shares(own)
        sent = self._drain() - before
        slowest = max(sum(one["steps"]) for one in answers)
        return {
            "seconds": slowest / steps,
            "steps": [max(times) for times in zip(*(o["steps"] for o in answers), strict=True)],
            "uneven_share": max(one["started_late_seconds"] for one in answers) / slowest,
            "late_share": max(one["late_share"] for one in answers),
            "cpu_seconds": sum(one["cpu_seconds"] for one in answers) / steps,
            "cpu_busy": cpu_busy,
            "cpu_busy_by_others": by_others,
            "bytes_on_wire": sent / (steps + warm_up) / len(answers),
        }

    def restart(self) -> None:
        """New workers instead of the old ones."""
        self.close()
        self._joined = 0
        self._start()

    def close(self) -> None:
        """Ends the workers, whatever they are at."""
        for orders in self._orders.values():
            orders.close()
        for worker in self._workers:
            worker.kill()
            worker.wait()
        for output in self._output:
            output.close()
        self._workers, self._orders, self._output = [], {}, []

    def _start(self) -> None:
        hosts = self._network.hosts
        # What has a name is gone once all have connected: a process that is killed leaves nothing.
        with (
            tempfile.TemporaryDirectory(prefix="gossipgrad-") as folder,
            Listener(f"{folder}/orders", family="AF_UNIX", backlog=hosts) as listener,
        ):
            for host in range(hosts):
                self._output.append(tempfile.TemporaryFile())  # noqa: SIM115
                environment = self._network.environment(host)
                command = [sys.executable, "-m", "benchmarks.network._worker"]
                self._workers.append(
                    self._network.popen(
                        host,
                        [*command, f"{folder}/orders", str(host)],
                        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
                        stdout=self._output[-1],
                        stderr=self._output[-1],
                        cwd=ROOT,
                    )
                )
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            deadline = time.monotonic() + _START_SECONDS
            while len(self._orders) < hosts:
                try:
                    orders = listener.accept()
                except TimeoutError:
                    for rank, worker in enumerate(self._workers):
                        if worker.poll() is not None:
                            raise WorkerError(self._last_words(rank)) from None
                    if time.monotonic() > deadline:
                        raise WorkerError(f"no {hosts} workers in {_START_SECONDS:g} s") from None
                    continue
                self._orders[orders.recv()] = orders

    def _ask_all(
        self, method: str, *arguments: Any, timeout_seconds: float = _ORDER_SECONDS
    ) -> list[Any]:
        return self._ask(dict.fromkeys(range(self._joined), (method, arguments)), timeout_seconds)

    def _ask(
        self, orders: dict[int, tuple[str, tuple]], timeout_seconds: float = _ORDER_SECONDS
    ) -> list[Any]:
        """Sends an order to each rank; the answers in the order of ranks."""
        what = next(iter(orders.values()))[0]
        for rank, order in orders.items():
            try:
                self._orders[rank].send(order)
            except OSError:  # it has died since it answered last
                raise WorkerError(f"{what}: {self._last_words(rank)}") from None
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(answers) < len(orders):
            waiting = {self._orders[rank]: rank for rank in orders if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise WorkerError(f"{what}: ranks {late} did not answer in {timeout_seconds:g} s")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    fine, answer = self._orders[rank].recv()
                except (EOFError, ConnectionError):
                    raise WorkerError(f"{what}: {self._last_words(rank)}") from None
                if not fine:
                    raise WorkerError(f"on rank {rank}: {answer}")
                answers[rank] = answer
        return [answers[rank] for rank in sorted(answers)]

    def _last_words(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(5.0)
        output = self._output[rank].fileno()
        text = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
        lines = text.strip().splitlines() or ["no output"]
        return f"worker {rank} ended with {self._workers[rank].returncode}: {lines[-1][:300]}"

    def _drain(self) -> int:
        """Waits until what is still under way has arrived; the bytes sent so far."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        before = self._network.passed_bytes(self._joined)
        while True:
            time.sleep(_STILL_SECONDS)
            now = self._network.passed_bytes(self._joined)
            if now - before <= _STILL_BYTES_PER_HOST * self._joined:
                return now
            if time.monotonic() > deadline:
                raise WorkerError(f"links were not silent after {_DRAIN_SECONDS:g} s")
            before = now


def _user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime
