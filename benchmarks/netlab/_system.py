"""Runs `ip` and `tc`, and says what a machine lacks."""

import select
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ._errors import NetlabError

__all__ = ["missing", "namespaces", "readable", "run", "run_batch"]

NAMESPACES = Path("/run/netns")
STATUS = Path("/proc/self/status")
_TIMEOUT_SECONDS = 60
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def missing() -> list[str]:
    """What must be there before the first namespace is made and is not; a sentence each."""
    if not sys.platform.startswith("linux"):
        return [f"network namespaces are a Linux feature: this is {sys.platform}"]
    lacks = []
    status = dict(line.split(":\t", 1) for line in STATUS.read_text().splitlines())
    user = status["Uid"].split()[1]
    effective = int(status["CapEff"], 16)
    absent = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if absent and user != "0":
        lacks.append(f"root is needed to make network namespaces: this is user {user}; use sudo")
    elif absent:
        lacks.append(
            f"root here lacks {' and '.join(absent)}, which namespaces need: a container gets them "
            "with --cap-add=NET_ADMIN --cap-add=SYS_ADMIN, or --privileged"
        )
    lacks += [
        f"the command {name!r} is not on the PATH: install the package iproute2"
        for name in ("ip", "tc")
        if shutil.which(name) is None
    ]
    if not Path("/proc/self/ns/net").exists():
        lacks.append("this kernel has no network namespaces (CONFIG_NET_NS)")
    return lacks


def run(*command: str) -> str:
    """Runs a command to its end; what it printed.

    Raises:
        NetlabError: If it failed, with what it said.
    """
    return _run(list(command), None)


def run_batch(command: Iterable[str], lines: Iterable[str]) -> None:
    """Runs many lines of `ip` or `tc` in one process; the first that fails ends it."""
    _run([*command, "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], text: str | None) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except FileNotFoundError as error:
        raise NetlabError(f"{command[0]!r} is not on the PATH: install iproute2") from error
    except subprocess.TimeoutExpired as error:
        raise NetlabError(f"{' '.join(command)!r} took over {_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NetlabError(f"{' '.join(command)!r} failed: {said}")
    return done.stdout


def namespaces() -> set[str]:
    """Names of the network namespaces there are."""
    return {path.name for path in NAMESPACES.iterdir()} if NAMESPACES.is_dir() else set()


def readable(handle: int, timeout_seconds: float | None = None) -> bool:
    """Whether a pipe has something, or the process of a handle has ended, in time."""
    poller = select.poll()  # `select` knows no handle past 1023
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(None if timeout_seconds is None else max(0.0, 1e3 * timeout_seconds)))
