"""What benchmarks share: what is written beside figures, cells that are kept, ends, busy CPUs."""

import contextlib
import datetime
import fcntl
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gossipgrad.train._summary import machine, versions

ROOT = Path(__file__).parents[1]
# A try writes elsewhere: GOSSIPGRAD_RESULTS=/tmp/try python -m benchmarks.step --blocks 2
RESULTS = Path(os.environ.get("GOSSIPGRAD_RESULTS") or Path(__file__).parent / "results")
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 9: 2.262}


def made_by(name: str, *, module: str | None = None) -> dict:
    """Command and versions of this run, for figures that stand beside those of others."""
    command = f"python -m benchmarks.{module or name} {shlex.join(sys.argv[1:])}".strip()
    return {"command": command, "versions": versions()}


@cache
def machine_name() -> str:
    """The processors; figures of other ones do not stand for these."""
    here = machine()
    return f"{here['processor']}, {here['cores']} cores"


@cache
def where() -> str:
    """Machine, date and commit, for figures that are added one by one."""
    commit = ""
    with contextlib.suppress(OSError):
        command = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return f"{machine_name()}; {datetime.date.today().isoformat()}; {commit or 'no commit'}"


def write_json(path: Path, value: object) -> None:
    """Writes JSON, whole or not at all, with a list of numbers or words in one line."""
    text = json.dumps(value, indent=1)
    flat = re.sub(
        r"\[\n\s+([^\[\]{}]*?)\n\s*\]",
        lambda found: "[" + re.sub(r",\n\s+", ", ", found[1]) + "]",
        text,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(flat + "\n", encoding="utf-8")
    partial.replace(path)


def write(
    name: str,
    figures: dict,
    *,
    raw: Any = None,
    module: str | None = None,
    path: Path | None = None,
) -> Path:
    """Writes a benchmark's figures with machine, versions and command; whole or not at all.

    Args:
        name: Of the results, and of the benchmark.
        figures: What the pages quote: medians, spreads, seeds.
        raw: What they were made of; goes to `results/raw/NAME.json`, which git ignores.
        module: The benchmark, where its results are called otherwise.
        path: Where to; `results/NAME.json` by default.
    """
    path = path or RESULTS / f"{name}.json"
    made = made_by(name, module=module)
    if raw is not None:
        write_json(path.parent / "raw" / path.name, {**made, "raw": raw})
    write_json(path, {"command": made.pop("command"), "machine": machine(), **made, **figures})
    return path


def once(path: Path, setting: dict, compute: Callable[[], dict]) -> dict:
    """The figures of a cell: from `path` if it is done, else computed and kept there.

    So a benchmark that was interrupted goes on with the cell that it was at.

    Raises:
        ValueError: The cell was done with another setting.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "cell.json"
        ...     [once(path, {"seed": 0}, lambda: {"loss": loss}) for loss in (1.0, 2.0)]
        [{'loss': 1.0}, {'loss': 1.0}]
    """
    setting = json.loads(json.dumps(setting))
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["setting"] != setting:
            raise ValueError(
                f"{path} was made with {held['setting']}, and now the setting is {setting}: "
                "choose another --folder, or remove the file"
            )
        return held["figures"]
    figures = compute()
    write_json(path, {"setting": setting, "figures": figures})
    return figures


def quartiles(values: Sequence[float], scale: float = 1.0) -> list[float]:
    """Lower quartile, median, upper quartile; all of them the one where there is no other."""
    values = [*values, *values] if len(values) == 1 else values
    return [round(scale * q, 9) for q in statistics.quantiles(values, n=4, method="inclusive")]


def half_width_95(differences: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean of paired differences (Student's t); None of one.

    Example:
        >>> round(half_width_95([1.0, 2.0, 3.0]), 2)
        2.48
    """
    count = len(differences)
    if count < 2:
        return None
    return _STUDENT.get(count - 1, 2.0) * statistics.stdev(differences) / math.sqrt(count)


@contextlib.contextmanager
def ends_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside the block; one that is ignored stays so.

    Example:
        >>> import os
        >>> try:
        ...     with ends_as_ctrl_c():
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ... except KeyboardInterrupt as error:
        ...     print(error)
        SIGTERM
    """

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = [number for number in before if before[number] != signal.SIG_IGN]  # as of nohup
    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


class BusyError(RuntimeError):
    """Another process is at it."""


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the lock file `path` while the block runs; a process that dies gives it back, too.

    Raises:
        BusyError: Another process holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder) / "lock"):
        ...     print("nobody else is here")
        nobody else is here
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another process holds {path}: wait for it, or end it") from None
        yield


class CpuBusy:
    """How busy all of the machine's CPUs are from now on, whatever runs on them."""

    def __init__(self) -> None:
        self._before = _ticks()

    def shares(self, own_user_seconds: float) -> tuple[float, float]:
        """Of all time: what was busy, and what was taken by other programs.

        The others' share is their time in user mode, and what the host of a virtual machine took:
        the kernel's work for the shaped links is booked on whoever it interrupts.

        Args:
            own_user_seconds: What those had in user mode whose own work is measured.
        """
        user, nice, _, idle, waiting, *_, stolen = spent = [
            now - then for now, then in zip(_ticks(), self._before, strict=True)
        ]
        total = max(1, sum(spent))
        others = max(0.0, user + nice - own_user_seconds / _TICK_SECONDS) + stolen
        return 1 - (idle + waiting) / total, others / total


def _ticks() -> list[int]:
    """Of user, nice, system, idle, waiting for disks, interrupts of two kinds, stolen."""
    with Path("/proc/stat").open() as stat:
        return [int(field) for field in stat.readline().split()[1:9]]
