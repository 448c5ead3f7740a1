"""Who made which namespaces: a record a laboratory, so that the dead leave nothing behind.

The record is written before the first namespace is made and removed after the last is gone. What
no record names is never touched. It holds the rates of the links, too, which any process may
change, so that all laboratories together stay within what the machine carries.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ._errors import NetlabError
from ._system import namespaces

__all__ = [
    "PREFIX",
    "Record",
    "alive",
    "allocate",
    "others_load",
    "read",
    "records",
    "unrecorded",
]

PREFIX = "gglab-"
DIRECTORY = Path("/run/gossipgrad-netlab")
LABORATORIES = 64  # the second byte of their addresses, 10.64.0.0 to 10.127.0.0
_FIRST_NETWORK = 64
_LOCK_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """One laboratory: its owner, and what was made for it.

    Attributes:
        name: Of the laboratory.
        network: The second byte of its addresses.
        owner: The process that made it.
        started: When that began, in ticks since the machine's start.
        pid_namespace: Where its number is that.
        boot: Of the machine.
        namespaces: The switch's, then the hosts'.
        rates: Of each host's link now, in bits a second.
        uplinks: Of each rack's link to the core; None does not constrict.
        load: Bits a second that all of it may move.
    """

    name: str
    network: int
    owner: int
    started: int
    pid_namespace: str
    boot: str
    namespaces: tuple[str, ...]
    rates: tuple[float, ...] = ()
    uplinks: tuple[float | None, ...] = ()
    load: float = 0.0

    @property
    def path(self) -> Path:
        """Where it is written down."""
        return DIRECTORY / f"{self.name}.json"

    def write(self) -> None:
        """Writes it down, whole at any time."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.replace(self.path)

    def remove(self) -> None:
        """Forgets it, when nothing of it is left."""
        self.path.unlink(missing_ok=True)


def started(pid: int) -> int | None:
    """When process `pid` began, in ticks since the machine's start; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(record: Record) -> bool | None:
    """Whether the owner lives; None if this process cannot know: other process numbers."""
    if record.boot != _boot():
        return False
    if record.pid_namespace != _pid_namespace():
        return None
    return started(record.owner) == record.started


def records() -> list[Record]:
    """All that are written down."""
    found = [read(path) for path in sorted(DIRECTORY.glob(f"{PREFIX}*.json"))]
    return [record for record in found if record is not None]


def read(path: Path) -> Record | None:
    """A record, or None if it is gone."""
    try:
        content = json.loads(path.read_text())
        lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
        return Record(**content | lists)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise NetlabError(f"{path} is no record of a laboratory: {error}; remove it") from error


def unrecorded() -> list[str]:
    """Namespaces that are called like ours and that no record names: nobody's to remove."""
    known = {name for record in records() for name in record.namespaces}
    return sorted(name for name in namespaces() if name.startswith(PREFIX) and name not in known)


def others_load(name: str | None = None) -> float:
    """Bits a second that the laboratories may move that are up, but for the one of a name."""
    return sum(
        record.load for record in records() if record.name != name and alive(record) is not False
    )


def allocate(
    suffixes: list[str],
    *,
    rates: Sequence[float] = (),
    uplinks: Sequence[float | None] = (),
    load: float = 0.0,
) -> Record:
    """A name and a network of its own for a new laboratory, written down; call it `locked`."""
    taken = {record.network for record in records()}
    free = [i for i in range(_FIRST_NETWORK, _FIRST_NETWORK + LABORATORIES) if i not in taken]
    if not free:
        raise NetlabError(
            f"{LABORATORIES} laboratories are up: end one, or run python -m benchmarks.netlab clean"
        )
    owner = os.getpid()
    name = PREFIX + secrets.token_hex(3)
    began = started(owner)
    assert began is not None
    record = Record(
        name=name,
        network=free[0],
        owner=owner,
        started=began,
        pid_namespace=_pid_namespace(),
        boot=_boot(),
        namespaces=tuple(f"{name}-{suffix}" for suffix in suffixes),
        rates=tuple(rates),
        uplinks=tuple(uplinks),
        load=load,
    )
    record.write()
    return record


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time makes or sweeps records; waits a bounded time for the others."""
    DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_SECONDS
    with (DIRECTORY / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NetlabError(
                        f"another process has held {DIRECTORY / 'lock'} for {_LOCK_SECONDS:g} s: "
                        "end it and try again"
                    ) from None
                time.sleep(0.02)
        yield


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
