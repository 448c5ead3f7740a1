"""One command on every host, its lines marked with the rank."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from ._network import Network

__all__ = ["fill_in", "run_everywhere"]

_POLL_SECONDS = 0.05
_TIMED_OUT = 124


def fill_in(argv: Sequence[str], values: dict[str, str]) -> list[str]:
    """`{rank}` and its like in the arguments; other braces stay."""
    filled = []
    for word in argv:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        filled.append(word)
    return filled


def run_everywhere(
    network: Network,
    argv: Sequence[str],
    *,
    port: int,
    keep_going: bool = False,
    timeout_seconds: float | None = None,
) -> int:
    """Runs `argv` on every host until all have ended; the first exit status that is not 0.

    When one fails the others are ended, unless they are to `keep_going`.
    """
    processes: list[subprocess.Popen[bytes]] = []
    printers = []
    for host in range(network.hosts):
        values = {
            "rank": str(host),
            "world_size": str(network.hosts),
            "address": network.address(host),
            "master": network.address(0),
        }
        process = network.popen(
            host,
            fill_in(argv, values),
            env=os.environ | network.environment(host, port=port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        printer = threading.Thread(target=_mark, args=(host, process.stdout), daemon=True)
        printer.start()
        processes.append(process)
        printers.append(printer)
    status = _wait(processes, keep_going, timeout_seconds)
    for process in processes:
        process.kill()
        process.wait()
    for printer in printers:
        printer.join(1.0)
    return status


def _wait(
    processes: list["subprocess.Popen[bytes]"], keep_going: bool, timeout_seconds: float | None
) -> int:
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    status = 0
    told: set[int] = set()
    while True:
        for host, process in enumerate(processes):
            if host not in told and process.poll() is not None:
                told.add(host)
                if process.returncode:
                    status = status or process.returncode % 256
                    print(f"host {host}: exit status {process.returncode}", file=sys.stderr)
        if len(told) == len(processes) or (status and not keep_going):
            return status
        if deadline is not None and time.monotonic() > deadline:
            running = [host for host in range(len(processes)) if host not in told]
            print(f"hosts {running} had not ended after {timeout_seconds:g} s", file=sys.stderr)
            return status or _TIMED_OUT
        time.sleep(_POLL_SECONDS)


def _mark(host: int, lines: IO[bytes]) -> None:
    with lines:
        for line in lines:
            sys.stdout.write(f"{host}| {line.decode(errors='replace')}")
            sys.stdout.flush()
