"""How many bits a second all hosts together may move on this machine."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from ._errors import NetlabError
from ._rates import format_rate

__all__ = ["DEFAULT_BITS_PER_SECOND", "Envelope", "check_load", "envelope", "store"]

# Measured with 2 cores at 2.5 GHz: 16 hosts at 1 Gbit/s full duplex carry 955 Mbit/s of payload
# each way, which is all of it; 32 hosts carry 750.
DEFAULT_BITS_PER_SECOND = 16e9


class Envelope(NamedTuple):
    """What a machine carries, and how that is known."""

    bits_per_second: float
    source: str


def envelope() -> Envelope:
    """What `check` has measured on this machine, else the default."""
    try:
        stored = json.loads(_path().read_text())
        if stored["machine"] == _machine():
            return Envelope(float(stored["bits_per_second"]), f"measured here on {stored['date']}")
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return Envelope(
        DEFAULT_BITS_PER_SECOND,
        "the default, measured on 2 cores at 2.5 GHz; `python -m benchmarks.netlab check` measures "
        "this machine",
    )


def store(bits_per_second: float, date: str) -> Path:
    """Writes down what was measured, for this machine alone."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"bits_per_second": bits_per_second, "date": date, "machine": _machine()}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
    return path


def check_load(load: float, hosts: int, asked: float | None, others: float = 0.0) -> None:
    """Refuses what the machine cannot carry.

    Args:
        load: Bits a second that the hosts can move together.
        hosts: How many they are.
        asked: What the machine is said to carry; None asks `envelope`.
        others: What other laboratories can move meanwhile.

    Raises:
        NetlabError: With the reason.
    """
    limit, source = envelope() if asked is None else Envelope(asked, "as asked for")
    if load + others > limit * 1.001:
        beside = f", other laboratories that are up {format_rate(others)}" if others else ""
        way_out = "Take fewer hosts or lower rates" + ", or wait for the others" * bool(others)
        raise NetlabError(
            f"{hosts} hosts at {format_rate(load / hosts)} on average can move {format_rate(load)} "
            f"together{beside}, and this machine carries {format_rate(limit)} ({source}): above, "
            f"the processors and not the links would set the pace. {way_out}"
        )


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gossipgrad" / "netlab.json"


def _machine() -> dict[str, str | int]:
    names = {
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "kernel": os.uname().release,
        "processor": ", ".join(sorted(names)) or os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
    }
