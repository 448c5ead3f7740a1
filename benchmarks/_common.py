"""The harness: what stands beside figures, statistics, kept runs, rates, processes, busy CPUs."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import queue
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
# A try writes elsewhere: GOSSIPGRAD_RESULTS=/tmp/try python -m benchmarks.stall --repeats 1
RESULTS = Path(os.environ.get("GOSSIPGRAD_RESULTS") or Path(__file__).parent / "results")
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 9: 2.262}
_PACKAGES = ("gossipgrad", "torch", "numpy", "decent-dp")


@cache
def machine() -> dict[str, Any]:
    """The machine; figures of another one are not comparable."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def machine_name() -> str:
    """The processors in a few words."""
    return f"{machine()['processor']}, {machine()['cores']} cores"


@cache
def where() -> str:
    """Machine, date and commit, for figures that are added one by one."""
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    commit = ""
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return f"{machine_name()}; {datetime.date.today().isoformat()}; {commit or 'no commit'}"


def made_by(module: str) -> dict[str, Any]:
    """Command and versions of this run."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = f"python -m benchmarks.{module} {shlex.join(sys.argv[1:])}".strip()
    return {"command": command, "versions": versions}


def write_json(path: Path, value: object) -> None:
    """Writes JSON atomically, with a list of numbers or words in one line."""
    text = re.sub(
        r"\[\n\s+([^\[\]{}]*?)\n\s*\]",
        lambda found: "[" + re.sub(r",\n\s+", ", ", found[1]) + "]",
        json.dumps(value, indent=1),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def write(
    name: str,
    figures: dict,
    *,
    raw: Any = None,
    module: str | None = None,
    path: Path | None = None,
) -> Path:
    """Writes a benchmark's figures with machine, versions and command.

    Args:
        name: The results are called so, and the benchmark too unless `module` names it.
        figures: What the pages quote: medians, spreads, seeds.
        raw: What they were made of; goes to `results/raw/NAME.json`, which git ignores.
        module: The benchmark.
        path: Where to; `results/NAME.json` by default.
    """
    path = path or RESULTS / f"{name}.json"
    made = made_by(module or name)
    if raw is not None:
        write_json(path.parent / "raw" / path.name, {**made, "raw": raw})
    write_json(path, {"command": made.pop("command"), "machine": machine(), **made, **figures})
    return path


def merged(name: str, rows: Sequence[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The published rows of a benchmark, with these in place of those of equal keys."""
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {tuple(row[key] for key in keys) for row in rows}
    return [row for row in before if tuple(row[key] for key in keys) not in new] + [*rows]


def once(path: Path, setting: dict, compute: Callable[[], dict]) -> dict:
    """The figures of a run: from `path` if it is done, else computed and kept there.

    So a benchmark that was interrupted continues with the run that it was at.

    Raises:
        ValueError: The run was done with another setting.

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
    """Lower quartile, median, upper quartile."""
    values = [*values, *values] if len(values) == 1 else values
    return [round(scale * q, 9) for q in statistics.quantiles(values, n=4, method="inclusive")]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and longest of times, to five digits.

    Example:
        >>> spread([1.0, 2.0, 3.0])
        {'median': 2.0, 'p99': 2.98, 'longest': 3.0}
    """
    p99 = float(torch.tensor(seconds, dtype=torch.float64).quantile(0.99))
    found = {"median": statistics.median(seconds), "p99": p99, "longest": max(seconds)}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


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


def paired(ours: Sequence[float], theirs: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Mean and 95 % interval of the differences, paired by seed."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    half = half_width_95(differences)
    return {
        "difference": round(statistics.fmean(differences), digits),
        "interval": None if half is None else round(half, digits),
    }


def verdict(difference: float, interval: float | None, margin: float, *, higher: bool) -> str:
    """What a difference of two contestants says, given its 95 % interval.

    Nothing while the interval is wider than the margin; "equal" where it holds 0.

    Example:
        >>> verdict(-0.5, 0.4, 0.2, higher=True), verdict(-0.5, 0.2, 0.2, higher=True)
        ('undecided', 'worse')
        >>> verdict(-0.05, 0.01, 0.02, higher=False), verdict(0.1, 0.2, 0.2, higher=True)
        ('better', 'equal')
    """
    if interval is None or interval > margin:
        return "undecided"
    if abs(difference) <= interval:
        return "equal"
    return "better" if (difference > 0) == higher else "worse"


def best_rate(
    rates: Sequence[float], loss_of: Callable[[float], float], factor: float
) -> tuple[float, dict[float, float]]:
    """The learning rate of the lowest loss, and the losses of all that were tried.

    While the best is the first or the last, the next one beyond it is tried, up to six more.

    Example:
        >>> best_rate([1.0, 2.0], lambda rate: abs(rate - 7), 2.0)
        (8.0, {1.0: 6.0, 2.0: 5.0, 4.0: 3.0, 8.0: 1.0, 20.0: 13.0})
    """
    tried: dict[float, float] = {}
    most = len(rates) + 6
    new: float | None = None
    for rate in rates:
        tried[rate] = _finite(loss_of(rate))
    while len(tried) < most:
        best = min(tried, key=lambda rate: tried[rate])
        new = best * factor if best == max(tried) else best / factor
        if best not in (min(tried), max(tried)):
            break
        new = float(f"{new:.1g}")
        tried[new] = _finite(loss_of(new))
    return min(tried, key=lambda rate: tried[rate]), tried


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


@contextlib.contextmanager
def ends_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside the block; one that is ignored stays so."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number in before if before[number] != signal.SIG_IGN]  # as of nohup
    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def memory_bytes(what: str = "VmRSS") -> int:
    """Of this process now; `VmHWM` is the most since `forget_peak`."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{what}:"))


def forget_peak() -> int:
    """Begins a new high-water mark of memory; the bytes that the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes()


class CpuBusy:
    """How busy all of the machine's CPUs are from now on, whatever runs on them."""

    def __init__(self) -> None:
        self._before = _ticks()

    def shares(self, own_user_seconds: float) -> tuple[float, float]:
        """Of all time: what was busy, and what was taken by other programs.

        The others' share is their time in user mode, and what the host of a virtual machine took:
        the kernel's work for the shaped links is counted for whatever it interrupts.

        Args:
            own_user_seconds: The time in user mode of the processes that are measured.
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


def in_processes(world_size: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """What `function(group, *arguments)` returns on each rank of new processes on loopback.

    Each has one thread for compute, and a Gloo group of all by default.

    Raises:
        RuntimeError: One of them failed.
    """
    # torch asks for the name of whatever connects, and a resolver may not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = world_size, store.port, results, function, arguments
    processes = [context.Process(target=_main, args=(rank, *common)) for rank in range(world_size)]
    found: dict[int, Any] = {}
    try:
        for process in processes:
            process.start()
        while len(found) < world_size:
            try:
                rank, result = results.get(timeout=1)
                found[rank] = result
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise RuntimeError("a process failed; its error stands above") from None
    except BaseException:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.join()
    return [found[rank] for rank in range(world_size)]


def _main(
    rank: int, world_size: int, port: int, results: Any, function: Callable, arguments: tuple
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results.put((rank, function(dist.group.WORLD, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def tell(label: str, figures: Mapping[str, Any]) -> None:
    """Prints a line at once."""
    print(label, figures, flush=True)
