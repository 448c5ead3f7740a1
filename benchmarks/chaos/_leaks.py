"""What a script may leave behind: processes, ports, threads, temporary files, namespaces."""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.network._namespaces import namespaces, new_name

__all__ = ["Traces", "processes_of"]

_LISTENING = "0A"
_GRACE_SECONDS = 5.0


class Traces:
    """What this process, the leader of its session, and all others of it have now."""

    def __init__(self) -> None:
        self._before = {what: look() for what, look in _LOOKS.items()}

    def left(self) -> list[str]:
        """What has come since and does not go within a few seconds, in words."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while left := self._more():
            if time.monotonic() > deadline:
                return left
            time.sleep(0.02)
        return []

    def _more(self) -> list[str]:
        return [
            f"{what} left: {', '.join(sorted(map(str, more)))}"
            for what, look in _LOOKS.items()
            if (more := look() - self._before[what])
        ]


def processes_of(session: int) -> set[int]:
    """Processes of a session, whoever their parent is now."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _fields_of(folder)
            if fields and fields[0] not in "ZX" and int(fields[3]) == session:
                found.add(int(folder.name))
    return found


def _fields_of(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _processes() -> set[str]:
    return {f"{pid} ({_command(pid)})" for pid in processes_of(os.getsid(0))}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def _ports() -> set[int]:
    """On which processes of this session listen, in this network namespace."""
    ours = set()
    for pid in processes_of(os.getsid(0)):
        try:
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                ours.add(str(handle.readlink()))
        except OSError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in ours:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _files() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir()}


def _namespaces() -> set[str]:
    """Of laboratories that belong to this process; others may come and go beside it."""
    return set(namespaces(new_name().rpartition("-")[0].rpartition("-")[0]))


_LOOKS: dict[str, Callable[[], set]] = {
    "processes": _processes,
    "ports": _ports,
    "threads": _threads,
    "temporary files": _files,
    "namespaces": _namespaces,
}
