"""True processes, out of a fork server that has torch loaded: about a second for four."""

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gossipgrad.launch import ensure_fork_server
from support.patience import be_patient
from support.waiting import HANG_SECONDS

__all__ = ["free_port", "one_by_one", "run_processes", "start_fork_server"]

# All that any test forks: whoever starts the server decides for all that come later.
_PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch._dynamo",
    "gossipgrad.train",
]
_SHARED = "GOSSIPGRAD_TESTS_FORK_SERVER"


def start_fork_server() -> None:
    """Starts the fork server with all that processes of tests need loaded, if none runs yet.

    The workers of xdist share that of the process that started them: each would take as long to
    load as some twenty tests.
    """
    server = multiprocessing.forkserver._forkserver
    address = os.environ.get(_SHARED)
    if address is None:
        ensure_fork_server(_PRELOAD)
        os.environ[_SHARED] = server._forkserver_address
    elif server._forkserver_address is None:
        multiprocessing.forkserver.ensure_running = multiprocessing.resource_tracker.ensure_running
        server.ensure_running = multiprocessing.resource_tracker.ensure_running
        server._forkserver_address = address
        _, server._forkserver_alive_fd = os.pipe()


def free_port() -> int:
    """Returns a port of this host below those that the system gives away, so that none takes it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def run_processes(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = HANG_SECONDS,
    may_die: tuple[int, ...] = (),
    grouped: bool = True,
) -> list[Any]:
    """Runs `function(rank, store, *arguments)` in a process a rank; what each returned, by rank.

    The store lives in the calling process. A rank in `may_die` may end without an answer (None);
    another one that does is an error, and so is an exception anywhere. They are in the default
    process group, unless not `grouped`: one that leaves it at once breaks those who still come.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_main,
            args=(theirs, function, rank, world_size, store.port, grouped, arguments),
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers = []
        for rank, pipe in enumerate(pipes):
            answer = None
            if not pipe.poll(timeout_seconds):
                raise TimeoutError(f"rank {rank} had not answered after {timeout_seconds} s")
            try:
                error, answer = pipe.recv()
            except EOFError:
                error = None if rank in may_die else "it died without a word"
            if error is not None:
                raise AssertionError(f"rank {rank}: {error}")
            answers.append(answer)
        for process in processes:
            process.join(timeout_seconds)
        return answers
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def one_by_one(rank: int, store: dist.Store, *calls: tuple[Any, ...]) -> list[Any]:
    """What several functions return, each given with its arguments, in the same processes."""
    return [function(rank, store, *arguments) for function, *arguments in calls]


def _main(pipe, function, rank, world_size, port, grouped, arguments) -> None:
    import torch

    gc.freeze()  # else each collection goes through all that the fork server has loaded
    torch.set_num_threads(1)
    be_patient()
    try:
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
        if grouped:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        answer = function(rank, store, *arguments)
        pipe.send((None, answer))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
