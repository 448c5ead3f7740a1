"""Workers on the hosts of a network, kept alive while rates, groups and contestants change."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from benchmarks.netlab import Network

_START_SECONDS = 180.0
_STORE_PORT = 29500
_FASTEST_TOGETHER = 16e9
_IDLE_RATE = 1e6
START_RATE = 1e8  # of a network that is given to a laboratory
_LEAD_SECONDS = 0.05  # between the order to run and the start
_STILL_SECONDS = 0.03  # links are silent when so long next to nothing has passed
_STILL_BYTES_PER_HOST = 4096
_DRAIN_SECONDS = 60.0
ROOT = Path(__file__).parents[2]


class Hosts(Protocol):
    """What the laboratory needs of a network."""

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen: ...
    def environment(self, host: int) -> dict[str, str]: ...
    def address(self, host: int) -> str: ...
    def set_rate(self, host: int, rate_bits_per_second: float) -> None: ...
    def passed_bytes(self, hosts: int) -> int: ...


class Shaped(Network):
    """A network whose bytes are counted at once, as is needed between two blocks."""

    def passed_bytes(self, hosts: int) -> int:
        """Bytes that have come to the first `hosts` hosts: whole frames, at the switch."""
        shown = subprocess.run(
            ["tc", "-n", self.wiring.switch, "-s", "-j", "qdisc", "show"],
            capture_output=True,
            check=True,
        )
        ports = {f"host{host}" for host in range(hosts)}
        return sum(
            queue["bytes"]
            for queue in json.loads(shown.stdout)
            if queue.get("root") and queue["dev"] in ports
        )


class Loopback:
    """Hosts that are no hosts: processes on this machine's loopback, unshaped and uncounted."""

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen:
        return subprocess.Popen(argv, **options)

    def environment(self, host: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def set_rate(self, host: int, rate_bits_per_second: float) -> None:
        """Nothing is shaped."""

    def passed_bytes(self, hosts: int) -> int:
        return 0


class WorkerError(RuntimeError):
    """Workers failed, died, or did not answer; the others cannot go on without them."""


class Laboratory:
    """Starts one worker a host; orders go to the first `world_size` of them.

    Args:
        network: The hosts; they stay the caller's.
        hosts: How many there are, each at `START_RATE`.
    """

    def __init__(self, network: Hosts, hosts: int) -> None:
        self.network = network
        self._hosts = hosts
        self._rates = [START_RATE] * hosts
        self._folder = tempfile.TemporaryDirectory(prefix="gossipgrad-")
        self._joined = 0
        self._workers: list[subprocess.Popen] = []
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
        address, port = self.network.address(0), _STORE_PORT + self._ports
        if isinstance(self.network, Loopback):
            port = _free_port()
        self._tell({r: ("join", (r, world_size, address, port)) for r in range(world_size)}, 120.0)
        self._joined = world_size

    def leave(self) -> None:
        """Lets the contestants and the group go."""
        self._everyone("leave", (), 120.0)
        self._joined = 0

    def set_rate(self, rate_bits_per_second: float | None) -> None:
        """Shapes the links of the joined hosts; None to the fastest that all may have at once.

        Raises:
            NetlabError: The machine cannot carry it. The rates are as they were.
        """
        if rate_bits_per_second is None:
            rates = [_FASTEST_TOGETHER / self._hosts] * self._hosts
        else:
            # Others are out of the way: what they could move does not count.
            others = self._hosts - self._joined
            rates = [rate_bits_per_second] * self._joined + [_IDLE_RATE] * others
        before = self._rates
        try:
            self._shape(rates)
        except RuntimeError:
            self._shape(before)
            raise

    def _shape(self, rates: list[float]) -> None:
        """Slower links first, so that all together are never faster than before and after."""
        for host in sorted(range(self._hosts), key=lambda host: rates[host] - self._rates[host]):
            self.network.set_rate(host, rates[host])
            self._rates = [*self._rates[:host], rates[host], *self._rates[host + 1 :]]

    def make(self, name: str, profile: dict, size_factor: float) -> int:
        """Makes a contestant on all ranks; the bytes of its parameters on one."""
        return self._everyone("make", (name, profile, size_factor), 180.0)[0]

    def run(self, name: str, warm_up: int, steps: int, timeout_seconds: float) -> dict[str, Any]:
        """Runs one block on all ranks at once, then waits until the links are silent.

        Returns:
            `seconds`: of each step, the mean over the steps of the slowest rank; `late_share`;
            `cpu_seconds` of all ranks, a step; `cpu_busy`: share of the machine; `bytes_on_wire`:
            sent by a host, a step; `clocks`: what contestants count, a step, mean of the ranks;
            `uneven_share`: how much later than told the last rank began, of the time it took.
        """
        before = self.network.passed_bytes(self._joined)
        busy = _CpuBusy()
        start_at = time.perf_counter() + _LEAD_SECONDS
        told = self._everyone("run", (name, warm_up, steps, start_at), timeout_seconds)
        cpu_busy = busy.share()
        sent = self._drain() - before
        planned = sum(one["planned_seconds"] for one in told)
        late = max(one["started_late_seconds"] for one in told)
        return {
            "uneven_share": late / max(sum(one["seconds"]) for one in told),
            "seconds": max(sum(one["seconds"]) / steps for one in told),
            "late_share": sum(one["late_seconds"] for one in told) / planned if planned else 0.0,
            "cpu_seconds": sum(one["cpu_seconds"] for one in told) / steps,
            "cpu_busy": cpu_busy,
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
        self._folder.cleanup()

    def _end(self) -> None:
        for orders in self._orders.values():
            orders.close()
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._workers, self._orders = [], {}

    def _start(self) -> None:
        hosts = self._hosts
        path = str(Path(self._folder.name) / "orders")
        with Listener(path, family="AF_UNIX", backlog=hosts) as listener:
            for host in range(hosts):
                log = Path(self._folder.name) / f"worker{host}.log"
                with log.open("wb") as errors:
                    self._workers.append(
                        self.network.popen(
                            host,
                            [
                                *(sys.executable, "-m", "benchmarks.network._worker"),
                                *("--socket", path, "--host", str(host)),
                            ],
                            env=self._environment(host),
                            stdout=errors,
                            stderr=errors,
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
        for rank, order in orders.items():
            self._orders[rank].send(order)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        what = next(iter(orders.values()))[0]
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
        log = Path(self._folder.name) / f"worker{rank}.log"
        lines = log.read_text(errors="replace").strip().splitlines() or ["no word"]
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


class _CpuBusy:
    """How busy all of the machine's CPUs are from now on, whatever runs on them."""

    def __init__(self) -> None:
        self._idle, self._total = self._read()

    @staticmethod
    def _read() -> tuple[int, int]:
        with Path("/proc/stat").open() as stat:
            fields = [int(field) for field in stat.readline().split()[1:9]]
        return fields[3] + fields[4], sum(fields)

    def share(self) -> float:
        idle, total = self._read()
        return 1 - (idle - self._idle) / max(1, total - self._total)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
