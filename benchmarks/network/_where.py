"""Where and with what a cell was measured."""

import contextlib
import datetime
import subprocess
from functools import cache
from pathlib import Path

from gossipgrad.train._summary import machine

_ROOT = Path(__file__).parents[2]


@cache
def machine_name() -> str:
    """The processors; cells of other ones do not stand for these."""
    here = machine()
    return f"{here['processor']}, {here['cores']} cores"


def where() -> dict[str, str | None]:
    """What every cell says: machine, date and commit; versions stand once a file."""
    date = datetime.date.today().isoformat()
    return {"machine": machine_name(), "date": date, "commit": _commit()}


@cache
def _commit() -> str | None:
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None
