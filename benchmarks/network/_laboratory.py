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

from benchmarks.netlab._traffic import idle

from ._busy import CpuBusy
from ._hosts import Hosts, Loopback

_START_SECONDS = 180.0
_STORE_PORT = 29500
_LEAD_SECONDS = 0.05  # between the order to run and the start
_STILL_SECONDS = 0.03  # links are silent when so long next to nothing has passed
_STILL_BYTES_PER_HOST = 4096
_DRAIN_SECONDS = 60.0
ROOT = Path(__file__).parents[2]


class WorkerError(RuntimeError):
    """Workers failed, died, or did not answer; the others cannot go on without them."""


class Laboratory:
    """Starts one worker a host; orders go to the first `world_size` of them.

    Args:
        network: The hosts; they stay the caller's.
        hosts: How many there are.

    Attributes:
        worker: The module that a worker runs.
    """

    worker = "benchmarks.network._worker"

    def __init__(self, network: Hosts, hosts: int) -> None:
        self.network = network
        self._hosts = hosts
        self._joined = 0
        self._workers: list[subprocess.Popen] = []
        self._said: list[IO[bytes]] = []
        self._files = contextlib.ExitStack()
        self._orders: dict[int, Connection] = {}
        self._ports = 0
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
        self._ports += 1  # a port that was closed may not be listened on again at once
        address, wanted = self.network.address(0), _STORE_PORT + self._ports
        if isinstance(self.network, Loopback):
            wanted = 0  # whatever is free: others live here, too
        (port,) = self._tell({0: ("listen", (address, wanted))}, 120.0)
        self._tell({r: ("join", (r, world_size, address, port)) for r in range(world_size)}, 120.0)
        self._joined = world_size

    def leave(self) -> None:
        """Lets the contestants and the group go."""
        self._everyone("leave", (), 120.0)
        self._joined = 0

    def refusal(self, world_size: int, rate_bits_per_second: float) -> str | None:
        """Why links of so many hosts cannot have this rate here, None if they can."""
        return self.network.refusal(world_size, rate_bits_per_second)

    def set_rate(self, rate_bits_per_second: float | None) -> None:
        """Shapes the links of the joined hosts and tries them out; None for a fast one.

        Raises:
            NetlabError: The machine cannot carry it, or did not when it was tried.
        """
        self.network.shape(self._joined, rate_bits_per_second)

    def wait_until_quiet(self, patience_seconds: float) -> None:
        """Waits a bounded time for other programs to leave the processors alone."""
        if patience_seconds:
            idle(patience_seconds)

    def make(self, name: str, profile: dict, size_factor: float, *more: Any) -> int:
        """Makes a contestant on all ranks; the bytes of its parameters on one."""
        return self._everyone("make", (name, profile, size_factor, *more), 180.0)[0]

    def settle(self, name: str, steps: int, timeout_seconds: float) -> dict[str, Any]:
        """Steps with hardly any compute, not measured: links and buffers come to what they will be.

        Returns:
            `seconds` of a step of the slowest rank; `memory_bytes`: by how much the worker's memory
            has been larger since the contestant was made, at most, on the worst rank.
        """
        told = self._everyone("settle", (name, steps), timeout_seconds)
        self._drain()
        return {what: max(one[what] for one in told) for what in ("seconds", "memory_bytes")}

    def run(
        self,
        name: str,
        warm_up: int,
        steps: int,
        timeout_seconds: float,
        *,
        spread_seconds: float = 0.0,
        hurried: bool = False,
    ) -> dict[str, Any]:
        """Runs one block on all ranks, then waits until the links are silent.

        Args:
            name: Of the contestant.
            warm_up: Steps before those that are measured.
            steps: Those.
            timeout_seconds: For all of them together.
            spread_seconds: Within which the ranks begin, one after the other.
            hurried: Take steps of a period that are like the one before as that one.

        Returns:
            `seconds`: of each step, the mean over the steps of the slowest rank; `steps_run`;
            `late_share`: of the worst rank; `cpu_seconds` of all ranks, a step; `cpu_busy`: share
            of the machine; `cpu_busy_by_others`; `bytes_on_wire`: sent by a host, a step; `clocks`:
            what contestants count, a step, mean of the ranks; `uneven_share`: how much later than
            told the last rank began, of the time it took.
        """
        before = self.network.passed_bytes(self._joined)
        busy, own = CpuBusy(), _user_seconds()
        load_former_states = time.perf_counter() + _LEAD_SECONDS
        delay = spread_seconds / self._joined
        told = self._tell(
            {
                rank: ("run", (name, warm_up, steps, hurried, load_former_states + rank * delay))
                for rank in range(self._joined)
            },
            timeout_seconds,
        )
        own = _user_seconds() - own + sum(one["user_seconds"] for one in told)
        cpu_busy, by_others = busy.shares(own)
        sent = self._drain() - before
        late = max(one["started_late_seconds"] for one in told)
        return {
            "uneven_share": late / max(sum(one["seconds"]) for one in told),
            "seconds": max(sum(one["seconds"]) / steps for one in told),
            "steps_run": told[0]["steps_run"],
            "late_share": max(
                one["late_seconds"] / one["planned_seconds"] if one["planned_seconds"] else 0.0
                for one in told
            ),
            "cpu_seconds": sum(sum(one["cpu_seconds"]) for one in told) / steps,
            "cpu_busy": cpu_busy,
            "cpu_busy_by_others": by_others,
            "clocks": {
                what: sum(one["clocks"][what] for one in told) / steps / len(told)
                for what in told[0]["clocks"]
            },
            "bytes_on_wire": sent / (steps + warm_up) / len(told),
        }

    def restart(self) -> None:
        """New workers in place of the old ones."""
        self._end()
        self._joined = 0
        self._start()

    def close(self) -> None:
        """Ends the workers, whatever they are at."""
        self._end()

    def _end(self) -> None:
        for orders in self._orders.values():
            orders.close()
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._files.close()
        self._workers, self._orders, self._said = [], {}, []

    def _start(self) -> None:
        hosts = self._hosts
        # What has a name is gone once all have connected: a process that is killed leaves nothing.
        with (
            contextlib.ExitStack() as files,
            tempfile.TemporaryDirectory(prefix="gossipgrad-") as folder,
            Listener(f"{folder}/orders", family="AF_UNIX", backlog=hosts) as listener,
        ):
            for host in range(hosts):
                self._said.append(files.enter_context(tempfile.TemporaryFile()))
                self._workers.append(
                    self.network.popen(
                        host,
                        [
                            *(sys.executable, "-m", self.worker),
                            *("--socket", f"{folder}/orders", "--host", str(host)),
                        ],
                        env=self._environment(host),
                        stdout=self._said[-1],
                        stderr=self._said[-1],
                        cwd=ROOT,
                    )
                )
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            deadline = time.monotonic() + _START_SECONDS
            while len(self._orders) < hosts:
                try:
                    orders = listener.accept()
                except TimeoutError:
                    self._check_alive()
                    if time.monotonic() > deadline:
                        raise WorkerError(
                            f"{hosts - len(self._orders)} of {hosts} workers did not start in "
                            f"{_START_SECONDS:g} s"
                        ) from None
                    continue
                self._orders[orders.recv()] = orders
            self._files = files.pop_all()

    def _environment(self, host: int) -> dict[str, str]:
        return {
            **os.environ,
            **self.network.environment(host),
            "OMP_NUM_THREADS": "1",
        }

    def _everyone(self, method: str, arguments: tuple, timeout_seconds: float) -> list[Any]:
        orders = dict.fromkeys(range(self._joined), (method, arguments))
        return self._tell(orders, timeout_seconds)

    def _tell(self, orders: dict[int, tuple[str, tuple]], timeout_seconds: float) -> list[Any]:
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
                raise WorkerError(
                    f"{what}: ranks {sorted(waiting.values())} did not answer in "
                    f"{timeout_seconds:g} s"
                )
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

    def _check_alive(self) -> None:
        for rank, worker in enumerate(self._workers):
            if worker.poll() is not None:
                raise WorkerError(self._last_words(rank))

    def _last_words(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(5.0)
        said = self._said[rank].fileno()
        text = os.pread(said, os.fstat(said).st_size, 0).decode(errors="replace")
        lines = text.strip().splitlines() or ["no word"]
        return f"worker {rank} ended with {self._workers[rank].returncode}: {lines[-1][:300]}"

    def _drain(self) -> int:
        """Waits until what is still under way has arrived; the bytes sent so far."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        before = self.network.passed_bytes(self._joined)
        while True:
            time.sleep(_STILL_SECONDS)
            now = self.network.passed_bytes(self._joined)
            if now - before <= _STILL_BYTES_PER_HOST * self._joined:
                return now
            if time.monotonic() > deadline:
                raise WorkerError(f"links were not silent after {_DRAIN_SECONDS:g} s")
            before = now


def _user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime
