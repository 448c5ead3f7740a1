"""Processes on loopback that do something together."""

import multiprocessing
import os
import queue
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def in_processes(world_size: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """What `function(group, *arguments)` returns on each rank of new processes.

    Each has one thread for compute, and a Gloo group of all by default.

    Raises:
        RuntimeError: One of them failed.
    """
    # torch asks for the name of whoever connects, and a resolver may not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of = world_size, store.port, results, function, arguments
    processes = [context.Process(target=_main, args=(rank, *of)) for rank in range(world_size)]
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
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    function: Callable[..., Any],
    arguments: tuple,
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results.put((rank, function(dist.group.WORLD, *arguments)))
    dist.barrier()
    dist.destroy_process_group()
