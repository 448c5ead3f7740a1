"""Runs scripts in processes of their own, kept alive from script to script; a hang is ended.

A runner leads its session, so that all of it can be ended at once, and ends when its owner
does. A script is run by the launcher on this machine; with faults of links each rank is a process
on a host of a network, as under torchrun with one agent a worker, and the store is on another host.
"""

import contextlib
import ctypes
import faulthandler
import functools
import json
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network import Network
from gossipgrad import data
from gossipgrad.errors import GossipError
from gossipgrad.train import RunFailedError, _run, config_of_run, run

from ._inside import Events, arm, worker
from ._outside import Director, Joiners, Traces, load, processes_of, redirect
from ._script import Script
from ._training import config_for, differences

KEPT = Path("runs/chaos")
_PRELOAD = ["gossipgrad.train._worker", "torch._dynamo", "benchmarks.chaos._inside"]
_RATE_BITS_PER_SECOND = 1e9
_HANG_SECONDS = 120.0
_START_SECONDS = 300.0
_STACKS_SECONDS = 1.0
_CLONE_NEWNET = 0x40000000
_STORE_PORT = 29500


class Runner:
    """One process that runs scripts, one at a time, with its fork server and all workers."""

    def __init__(self, folder: Path, subset: Path) -> None:
        self._folder = folder
        self._subset = subset
        self._process: Any = None
        self._pipe: Any = None
        self._scripts = 0

    def run(self, script: Script) -> dict[str, Any]:
        """What became of a script, with its story."""
        if self._process is None or not self._process.is_alive():
            self._start()
        self._scripts += 1
        folder = self._folder / f"script{self._scripts}"
        self._pipe.send((script, folder, self._subset))
        lasting = 2 * sum(fault.seconds for fault in script.faults)
        hangs_at = (script.resumes + 1) * _HANG_SECONDS + lasting
        try:
            answers = self._pipe.poll(hangs_at)
            found = self._pipe.recv() if answers else self._hung(folder, hangs_at)
        except (EOFError, ConnectionError):
            self.end()
            found = _blank("the runner ended", 0.0)
        events = Events(folder).read()
        found["begun"] = sorted({e["fault"] for e in events if e["what"] == "fault"})
        found["begun_anew"] = begun_anew(events)
        found["story"] = [*story(events, script)]
        for path in sorted(folder.glob("rank*.log")):
            lines = path.read_text(errors="replace").splitlines()
            found["story"] += [f"{path.stem}: {line}" for line in lines]
        return found

    def keep(self, script: Script) -> Path:
        """Copies what the last script has written to where it stays."""
        kept = KEPT / f"seed{script.seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self._folder / f"script{self._scripts}", kept)
        shutil.copy(self._folder / "log.txt", kept)
        return kept

    def clear(self) -> None:
        """Removes what the last script has written."""
        shutil.rmtree(self._folder / f"script{self._scripts}", ignore_errors=True)

    def end(self) -> None:
        """Ends the process and all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        deadline = time.monotonic() + 5.0
        while processes_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, self._folder))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START_SECONDS) or self._pipe.recv() != "ready":
            raise RuntimeError(f"a runner did not start; see {self._folder / 'log.txt'}")

    def _hung(self, folder: Path, seconds: float) -> dict[str, Any]:
        """Writes down where all processes are, then ends them."""
        begun = {event["pid"] for event in Events(folder).read() if event["what"] == "begins"}
        for pid in (processes_of(self._process.pid).keys() & begun) | {self._process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
        self.end()
        return _blank(f"not over after {seconds:.0f} s, stacks in {KEPT}", seconds)


def _blank(hang: str, seconds: float) -> dict[str, Any]:
    lacking: dict[str, Any] = {"left": [], "summary": None, "results": {}, "steps_seconds": {}}
    return {"hang": hang, "seconds": seconds, **lacking}


def begun_anew(events: list[dict[str, Any]]) -> list[int]:
    """Ranks that were killed as the launcher ended them to start all again, unknown to it."""
    killed = {e["rank"]: e["at"] for e in events if e["what"] == "SIGKILL"}
    begins = [e for e in events if e["what"] == "begins" and e["rank"] in killed]
    return sorted({e["rank"] for e in begins if e["at"] > killed[e["rank"]]})


def story(events: list[dict[str, Any]], script: Script) -> list[str]:
    """What happened and when, in seconds since the first worker began."""
    lines = []
    start = min((event["at"] for event in events), default=0.0)
    for event in sorted(events, key=lambda event: event["at"]):
        details = {k: v for k, v in event.items() if k not in ("at", "what", "fault")}
        said = ", ".join(f"{key} {value}" for key, value in details.items())
        if "fault" in event:
            said = f"{script.faults[event['fault']]}"
        lines.append(f"{event['at'] - start:7.3f} s  {event['what']}: {said}")
    return lines or ["no worker began"]


def _main(pipe: Connection, folder: Path) -> None:
    os.setsid()
    redirect(folder / "log.txt")
    temporary = folder / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    load(_PRELOAD)
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, orders), daemon=True).start()
    pipe.send("ready")
    while True:
        pipe.send(run_script(*orders.get()))


def _listen(pipe: Connection, orders: "queue.SimpleQueue[Any]") -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            orders.put(pipe.recv())
    os.killpg(os.getpgid(0), signal.SIGKILL)


def run_script(script: Script, folder: Path, subset: Path) -> dict[str, Any]:
    """Runs a script to its end; what became of it, as plain values."""
    folder.mkdir()
    events, before, start = Events(folder), Traces(), time.monotonic()
    if script.of_links:
        hosts = script.setting.world_size + 1
        with (
            Network(hosts=hosts, rate_bits_per_second=_RATE_BITS_PER_SECOND) as network,
            Director(script, events, network),
        ):
            found = _run_on_hosts(script, folder, subset, network)
    else:
        with (
            Joiners(script, folder, subset) as joiners,
            Director(script, events, join=joiners.let_in),
        ):
            start = time.monotonic()
            found = _run_by_launcher(script, folder, subset)
        found["joins"] = joiners.outcomes()
    seconds = time.monotonic() - start
    out, ranks = folder / "run", range(script.setting.world_size)
    if script.exact and "exit_code" in found:
        twin = _twin(script, folder.parent, subset)
        found["differs"] = differences(out, twin, len(ranks))
    summary, left = out / "summary.json", before.left()
    if (out / "partial").exists():
        left.append("temporary files left: run/partial")
    results = {rank: folder / f"result-rank{rank}.json" for rank in ranks}
    return {
        **found,
        "seconds": seconds,
        "left": left,
        "summary": json.loads(summary.read_text()) if summary.exists() else None,
        "results": {
            r: json.loads(path.read_text()) for r, path in results.items() if path.exists()
        },
        "steps_seconds": {rank: _steps_of(out / f"metrics-rank{rank}.jsonl") for rank in ranks},
    }


def _twin(script: Script, folder: Path, subset: Path) -> Path:
    """The folder of a run of the same setting that nothing disturbs, and that saves nothing."""
    twin = Script(seed=-1, setting=script.setting, kind="undisturbed", faults=())
    twin_folder = folder / f"twin-{str(script.setting).replace(', ', '-').replace(' ', '-')}"
    if not twin_folder.exists():
        twin_folder.mkdir()
        found = _run_by_launcher(twin, twin_folder, subset)
        assert found.get("exit_code") == 0, f"{script.setting}: fails without any fault: {found}"
    return twin_folder / "run"


def _steps_of(metrics: Path) -> list[float]:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    events = (json.loads(line) for line in lines)
    return [event["step_seconds"] for event in events if event["event"] == "step"]


def _run_by_launcher(script: Script, folder: Path, subset: Path) -> dict[str, Any]:
    """As `gossipgrad train --nproc` does it, and `--resume` where all died."""
    data.prepare = lambda *_, **__: None  # the subset is there
    out = folder / "run"
    for start in range(1, script.resumes + 2):
        _run.worker_main = functools.partial(worker, script, start, folder, subset)
        try:
            outcome = run(config_for(script, out) if start == 1 else config_of_run(out))
        except (GossipError, ValueError) as error:
            if start <= script.resumes and isinstance(error, RunFailedError):
                continue
            return {"error": f"{type(error).__name__}: {error}"}
        return {"exit_code": outcome.exit_code, "starts": start}
    raise AssertionError("the last start has ended somehow")


def _run_on_hosts(script: Script, folder: Path, subset: Path, network: Network) -> dict[str, Any]:
    """One rank a host; the last host has the store."""
    p = script.setting.world_size
    context = multiprocessing.get_context("forkserver")
    ranks, codes = [], {}
    with _store_on(network, p) as address:
        for rank in range(p):
            environment = network.environment(rank, port=_STORE_PORT) | {
                "WORLD_SIZE": str(p),
                "MASTER_ADDR": address,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
            arguments = (script, folder, subset, rank, network.namespace(rank), environment)
            ranks.append(context.Process(target=_rank, args=arguments))
            ranks[-1].start()
        for rank, process in enumerate(ranks):
            process.join()
            codes[rank] = process.exitcode
            Events(folder).tell("ends", rank=rank, code=process.exitcode)
            process.close()
    return {"exit_codes": codes}


@contextlib.contextmanager
def _store_on(network: Network, host: int) -> Iterator[str]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    address = network.address(host)
    process = context.Process(target=_serve, args=(theirs, network.namespace(host), address))
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield address
    finally:
        ours.close()
        process.join()
        process.close()


def _serve(pipe: Connection, namespace: str, address: str) -> None:
    _enter(namespace)
    store = dist.TCPStore(address, _STORE_PORT, is_master=True, wait_for_workers=False)
    pipe.send("up")
    with contextlib.suppress(EOFError):
        pipe.recv()
    del store


def _rank(
    script: Script,
    folder: Path,
    subset: Path,
    rank: int,
    namespace: str,
    environment: dict[str, str],
) -> None:
    _enter(namespace)
    os.environ.update(environment)
    redirect(folder / f"rank{rank}.log")
    arm(script, folder, subset, rank)
    data.prepare = lambda *_, **__: None
    try:
        code = run(config_for(script, folder / "run")).exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # as at the end of a command; the fork server's child would run exit handlers


def _enter(namespace: str) -> None:
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)
