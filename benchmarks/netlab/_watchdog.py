"""Waits for a laboratory's owner to die and takes down what it left.

A process of its own, in a session of its own: neither `kill -9` nor Ctrl-C of the owner reaches it.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from ._errors import NetlabError
from ._record import Record, alive, locked, read
from ._sweep import dismantle
from ._system import namespaces, readable

__all__ = ["guard", "watch"]

_ROOT = Path(__file__).parents[2]
_SETTLE_SECONDS = 0.3
_PASSES = 20


def guard(record: Record) -> "subprocess.Popen[bytes]":
    """Starts the process that waits for this one to end."""
    start = "import sys; sys.path.insert(0, sys.argv[1]); " + (
        "from benchmarks.netlab._watchdog import watch; watch(sys.argv[2])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start, str(_ROOT), str(record.path)],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch(path: str) -> None:
    """Returns when the laboratory written down in `path` is gone, by whosever hand."""
    record = read(Path(path))
    if record is None:
        return
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(record.owner)
        if alive(record):
            readable(owner)
    # Again until nothing was left: an `ip` that the owner had started goes on to its last line.
    for _ in range(_PASSES):
        with locked():
            if not record.path.exists():
                return
            if not namespaces().intersection(record.namespaces):
                record.remove()
                return
            with contextlib.suppress(NetlabError):
                dismantle(record, keep=True)
        time.sleep(_SETTLE_SECONDS)
