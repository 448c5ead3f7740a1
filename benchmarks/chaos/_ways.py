"""The two ways to run a script: by the launcher on this machine, or a process a host.

On hosts every rank is a process of a given world, as under torchrun with one agent a worker, and
the store lives with none of them, as with the launcher.
"""

import ctypes
import functools
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.network import Network
from gossipgrad import data
from gossipgrad.errors import GossipError
from gossipgrad.train import RunFailedError, _run, config_of_run, run

from ._inside import Events, arm, worker
from ._script import Script
from ._training import config_for

__all__ = ["PRELOAD", "run_by_launcher", "run_on_hosts"]

PRELOAD = ["gossipgrad.train._worker", "torch._dynamo", "benchmarks.chaos._inside"]
_CLONE_NEWNET = 0x40000000
_STORE_PORT = 29500


def run_by_launcher(script: Script, folder: Path, subset: Path) -> dict[str, Any]:
    """As `gossipgrad train --nproc` does it, and `--resume` where all died; what became of it."""
    data.prepare = lambda *_, **__: None  # the subset is there
    out = folder / "run"
    for start in range(1, script.resumes + 2):
        _run.worker_main = functools.partial(worker, script.to_json(), start, folder, subset)
        try:
            outcome = run(config_for(script, out) if start == 1 else config_of_run(out))
        except (GossipError, ValueError) as error:
            if start <= script.resumes and isinstance(error, RunFailedError):
                continue
            return {"error": f"{type(error).__name__}: {error}"}
        return {"exit_code": outcome.exit_code, "starts": start}
    raise AssertionError("the last start has ended somehow")


def run_on_hosts(script: Script, folder: Path, subset: Path, network: Network) -> dict[str, Any]:
    """One rank a host; the last host has the store."""
    p = script.setting.world_size
    context = multiprocessing.get_context("forkserver")
    events = Events(folder)
    with _store_on(network, p) as address:
        ranks = []
        for rank in range(p):
            environment = network.environment(rank, port=_STORE_PORT) | {
                "WORLD_SIZE": str(p),
                "MASTER_ADDR": address,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
            arguments = (script.to_json(), folder, subset, rank, network.namespace(rank))
            ranks.append(context.Process(target=_rank, args=(*arguments, environment)))
            ranks[-1].start()
        codes = {}
        for rank, process in enumerate(ranks):
            process.join()
            codes[rank] = process.exitcode
            events.tell("ends", rank=rank, how=f"exit code {process.exitcode}")
            process.close()
    return {"exit_codes": codes}


@contextmanager
def _store_on(network: Network, host: int) -> Iterator[str]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    address = network.address(host)
    process: BaseProcess = context.Process(
        target=_serve, args=(theirs, network.namespace(host), address)
    )
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
    try:
        pipe.recv()
    except EOFError:
        del store


def _rank(
    script: dict[str, Any],
    folder: Path,
    subset: Path,
    rank: int,
    namespace: str,
    environment: dict[str, str],
) -> None:
    _enter(namespace)
    os.environ.update(environment)
    with (folder / f"rank{rank}.log").open("w", buffering=1) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        fault_script = Script.from_json(script)
        arm(fault_script, folder, subset, rank)
        data.prepare = lambda *_, **__: None
        try:
            outcome = run(config_for(fault_script, folder / "run"))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        (folder / f"outcome-rank{rank}.json").write_text(json.dumps(outcome.summary))
        sys.stdout.flush()
        # As at the end of a command; the fork server's child would leave out exit handlers.
        os._exit(outcome.exit_code)


def _enter(namespace: str) -> None:
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)
