"""Two processes on loopback that do something together."""

import multiprocessing
import os
import queue
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 2


def in_two_processes(function: Callable[..., Any], *arguments: object) -> Any:
    """What `function(group, *arguments)` returns on rank 0 of two new processes.

    Each has one thread for compute, and a Gloo group of both by default.

    Raises:
        RuntimeError: One of them failed.
    """
    # torch asks for the name of whoever connects, and a resolver may not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_main, args=(rank, store.port, results, function, arguments))
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    try:
        while True:
            try:
                result = results.get(timeout=1)
                break
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise RuntimeError("a process failed; its error stands above") from None
    except BaseException:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.join()
    return result


def _main(
    rank: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    result = function(dist.group.WORLD, *arguments)
    if rank == 0:
        results.put(result)
    dist.destroy_process_group()
