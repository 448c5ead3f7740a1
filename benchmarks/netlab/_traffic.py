"""Real transfers: a worker on every host, rounds of flows between them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from ._errors import NetlabError
from ._system import readable

__all__ = ["Busy", "Moved", "Traffic"]

_WORKER = Path(__file__).with_name("_worker.py")
_START_SECONDS = 30.0
_GRACE_SECONDS = 15.0
_CHUNK_BYTES = (1448, 1 << 18)
_BUFFER_BYTES = (1 << 16, 1 << 22)
_WAITING_SECONDS = 0.1
_HEAD_START_SECONDS = 0.03  # until the slowest worker has read when to begin
_LOOK_SECONDS, _QUIET_SHARE = 0.3, 0.2


class Moved(NamedTuple):
    """What a round moved: payload of each flow, and the processors' busy share meanwhile."""

    bits_per_second: list[float]
    cpu_busy: float


class Busy:
    """Busy share of all processors since it was made, the kernel's own work included."""

    def __init__(self) -> None:
        self._idle, self._total = _ticks()

    def share(self) -> float:
        """Between 0 and 1."""
        idle, total = _ticks()
        return 1 - (idle - self._idle) / max(1, total - self._total)


def idle(patience_seconds: float = 0.0) -> float:
    """How busy other programs keep the processors; waits for them to be quiet."""
    deadline = time.monotonic() + patience_seconds
    while True:
        busy = Busy()
        time.sleep(_LOOK_SECONDS)
        share = busy.share()
        if share <= _QUIET_SHARE or time.monotonic() > deadline:
            return share


class Traffic:
    """Workers on the hosts named, kept from round to round."""

    def __init__(
        self,
        popen: Callable[..., "subprocess.Popen[bytes]"],
        address: Callable[[int], str],
        hosts: Sequence[int],
    ) -> None:
        self._popen = popen
        self._address = address
        self._workers: dict[int, subprocess.Popen[bytes]] = dict.fromkeys(hosts)  # type: ignore
        self._ports: dict[int, int] = {}

    def __enter__(self) -> Self:
        try:
            for host in self._workers:
                self._workers[host] = self._popen(
                    host,
                    [sys.executable, "-I", "-S", _WORKER, self._address(host)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                )
            for host in self._workers:
                self._ports[host] = self._hear(host, _START_SECONDS)["port"]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def round(
        self, flows: Sequence[tuple[int, int]], *, rate: float, settle: float, seconds: float
    ) -> Moved:
        """Sends on all flows at once and measures for some seconds after those to settle.

        Args:
            flows: Sender and receiver of each.
            rate: Of the slowest link among theirs; sizes chunks and buffers.
            settle: Seconds until TCP has found the rate.
            seconds: How long to measure then.
        """
        hosts = sorted({host for flow in flows for host in flow})
        for host in hosts:
            order = {
                "connect": [
                    (flow, self._address(receiver), self._ports[receiver])
                    for flow, (sender, receiver) in enumerate(flows)
                    if sender == host
                ],
                "accept": sum(receiver == host for _, receiver in flows),
                "settle": settle,
                "seconds": seconds,
                "chunk": _within(rate / 8 * 0.01, _CHUNK_BYTES),
                "buffer": _within(rate / 8 * _WAITING_SECONDS, _BUFFER_BYTES),
            }
            self._say(host, json.dumps(order))
        for host in hosts:
            self._hear(host, _GRACE_SECONDS)
        busy = Busy()
        begin = time.monotonic() + _HEAD_START_SECONDS
        for host in hosts:
            self._say(host, repr(begin))
        rates: dict[str, float] = {}
        for host in hosts:
            rates |= self._hear(host, settle + seconds + _GRACE_SECONDS)["rates"]
        return Moved([rates[str(flow)] for flow in range(len(flows))], busy.share())

    def _say(self, host: int, line: str) -> None:
        stdin = self._workers[host].stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise self._ended(host) from None

    def _hear(self, host: int, timeout_seconds: float) -> dict[str, Any]:
        stdout = self._workers[host].stdout
        assert stdout is not None
        if not readable(stdout.fileno(), timeout_seconds):
            raise NetlabError(
                f"the worker on host {host} did not answer within {timeout_seconds:g} s: the "
                "machine is too busy to measure on, or its processes are stopped"
            )
        line = stdout.readline()
        if not line:
            raise self._ended(host)
        return json.loads(line)

    def _ended(self, host: int) -> NetlabError:
        status = self._workers[host].wait(_GRACE_SECONDS)
        return NetlabError(
            f"the worker on host {host} ended with status {status}; what it said stands above"
        )

    def _end(self) -> None:
        started = [worker for worker in self._workers.values() if worker is not None]
        for worker in started:
            worker.kill()
        for worker in started:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                pipe.close()


def _ticks() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)  # idle and waiting for disks; everything


def _within(size: float, bounds: tuple[int, int]) -> int:
    return int(min(max(size, bounds[0]), bounds[1]))
