"""Network namespaces: what they need, whose they are, and how they go.

A namespace is called after the process that made it, so the dead leave nothing behind for long: the
next network sweeps what belongs to a process that has ended. Nothing else is touched.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

NAMESPACES = Path("/run/netns")
PREFIX = "gglab"
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_TIMEOUT_SECONDS = 30.0
_DEATH_SECONDS = 5.0
_count = itertools.count()


class NetworkError(RuntimeError):
    """The machine cannot carry, lacks or does not keep what a network was asked for."""


def missing() -> list[str]:
    """What this machine lacks for a network, a sentence each."""
    if not sys.platform.startswith("linux"):
        return [f"network namespaces are Linux's: this is {sys.platform}"]
    lacks = []
    status = Path("/proc/self/status").read_text().splitlines()
    effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    if absent := [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]:
        lacks.append(
            f"network namespaces need root with {' and '.join(absent)}: use sudo, or start the "
            "container with --cap-add=NET_ADMIN --cap-add=SYS_ADMIN"
        )
    lacks += [
        f"the command {name!r} is not on the PATH: install the package iproute2"
        for name in ("ip", "tc", "bridge")
        if shutil.which(name) is None
    ]
    return lacks


def run(*command: str, lines: Iterable[str] = ()) -> str:
    """Runs `ip`, `tc` or `bridge` to its end, with lines of a batch; what it printed."""
    text = "".join(f"{line}\n" for line in lines)
    words = [*command, "-batch", "-"] if text else list(command)
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(words)!r} did not run: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NetworkError(f"{' '.join(words)!r} failed: {said}")
    return done.stdout


def namespaces(prefix: str = PREFIX) -> list[str]:
    """Names of the namespaces that begin so."""
    there = NAMESPACES.iterdir() if NAMESPACES.is_dir() else ()
    return sorted(path.name for path in there if path.name.startswith(prefix))


def new_name() -> str:
    """A name for a network of this process: its namespaces' names begin with it."""
    return f"{PREFIX}-{_here()}-{os.getpid()}-{started(os.getpid())}-{next(_count)}-"


def started(pid: int) -> int | None:
    """When a process began, in ticks since the machine's start; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def sweep() -> list[str]:
    """Removes the namespaces of processes that have ended; their names."""
    dead = [name for name in namespaces() if _is_dead(name)]
    remove(dead)
    return dead


def remove(names: Sequence[str]) -> None:
    """Kills what runs in these namespaces and removes them; some may be gone already."""
    deadline = time.monotonic() + _DEATH_SECONDS
    while left := _inhabitants(names):  # again: one may have forked another
        if time.monotonic() > deadline:
            raise NetworkError(f"processes {left} in {', '.join(names)} do not end")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for name in names:
        with contextlib.suppress(NetworkError):
            run("ip", "netns", "del", name)
    if still := set(names).intersection(namespaces()):
        raise NetworkError(f"namespaces {', '.join(sorted(still))} do not go")


def _here() -> int:
    """Of the process numbers: another container's stand for other processes."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _is_dead(name: str) -> bool:
    where, pid, began, *_ = [*name.removeprefix(f"{PREFIX}-").split("-"), "", "", ""]
    if not (pid.isdecimal() and began.isdecimal() and where == str(_here())):
        return False
    return started(int(pid)) != int(began)


def _inhabitants(names: Sequence[str]) -> list[int]:
    inside = set()
    for name in names:
        with contextlib.suppress(OSError):
            inside.add((NAMESPACES / name).stat().st_ino)
    inside.discard(Path("/proc/self/ns/net").stat().st_ino)
    found = []
    for entry in Path("/proc").iterdir() if inside else ():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "ns/net").stat().st_ino in inside:
                found.append(int(entry.name))
    return found
