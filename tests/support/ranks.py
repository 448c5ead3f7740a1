"""Ranks as threads of one process, with real Gloo groups between them."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist

from gossipgrad.comm import Group
from support.waiting import HANG_SECONDS

__all__ = ["run_ranks", "where"]

T = TypeVar("T")
_GRACE_SECONDS = 60.0  # for the other ranks to notice that one has failed


def run_ranks(
    world_size: int, function: Callable[[int, Group], T], timeout_seconds: float = HANG_SECONDS
) -> list[T]:
    """Runs `function(rank, group)` in a thread a rank; what each returned, by rank.

    The failure that came first is raised again, with its rank in a note (and so in the report of
    pytest); the ranks that fail because of it are not. Ranks that are not done in time are shown
    with where they stand.
    """
    store = dist.HashStore()
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []
    groups: dict[int, Group] = {}
    changed = threading.Condition()

    def run(rank: int) -> None:
        try:
            group = groups[rank] = Group(
                dist.PrefixStore("ranks", store),
                rank,
                world_size,
                timeout_seconds=float(timeout_seconds),
            )
            result = function(rank, group)
        except BaseException as error:
            with changed:
                failures.append((rank, error))
                changed.notify_all()
            if rank in groups:
                groups[rank].close()
        else:
            with changed:
                results[rank] = result
                changed.notify_all()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    with changed:
        changed.wait_for(lambda: failures or len(results) == world_size, timeout_seconds)
    deadline = time.monotonic() + _GRACE_SECONDS
    for thread in threads:
        if failures or len(results) == world_size:
            thread.join(max(0.0, deadline - time.monotonic()))
    with changed:
        # One that has handed in its result may still be on its way to the end of its thread.
        left = [thread for rank, thread in enumerate(threads) if rank not in results]
        hanging = [thread for thread in left if thread.is_alive()]
        stacks = "\n".join(where(thread) for thread in hanging)
        if failures:
            rank, error = failures[0]
            error.add_note(f"raised on rank {rank} of {world_size}")
            if hanging:
                error.add_note(f"still running then:\n{stacks}")
            raise error
    if hanging:
        raise TimeoutError(
            f"{len(hanging)} of {world_size} ranks were not done after {timeout_seconds:g} s:\n"
            f"{stacks}"
        )
    _close(groups.values())
    return [results[rank] for rank in range(world_size)]


def _close(groups: Iterable[Group]) -> None:
    """All at once: Gloo takes a hundredth of a second to let go of each connection."""
    threads = [threading.Thread(target=group.close) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def where(thread: threading.Thread) -> str:
    """The stack of a thread, for a report."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "(just ended)\n"
    return f"{thread.name} stands at:\n{stack}"
