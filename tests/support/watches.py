"""Watches over members, beaten by hand: no time passes but that of a clock of their own."""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch.distributed as dist

from gossipgrad.comm import Heartbeats, Membership, MemberWatch

__all__ = ["SETTINGS", "Clock", "HookedStore", "make_watches", "pass_seconds"]

SETTINGS = Heartbeats(interval_seconds=1.0, lease_seconds=2.0, silent_seconds=10.0)


class Clock:
    """Seconds that pass when they are told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class HookedStore:
    """A connection to a store; something may happen before each question, such as an error."""

    def __init__(self, store: dist.Store | None = None) -> None:
        self.inner = dist.HashStore() if store is None else store
        self.before: Callable[[str, str], object] = lambda what, key: None

    def _ask(self, what: str, key: str, *arguments: Any) -> Any:
        self.before(what, key)
        return getattr(self.inner, what)(key, *arguments)

    set = partialmethod(_ask, "set")
    get = partialmethod(_ask, "get")
    compare_set = partialmethod(_ask, "compare_set")
    delete_key = partialmethod(_ask, "delete_key")


def make_watches(
    clock: Clock, world_size: int, settings: Heartbeats = SETTINGS, store: Any = None
) -> list[MemberWatch]:
    """The watches of a world, on one store; or each on one that `store(rank)` makes."""
    shared, first = dist.HashStore(), Membership.first(world_size)
    stores = [shared if store is None else store(rank) for rank in range(world_size)]
    return [MemberWatch(each, rank, first, settings, now=clock) for rank, each in enumerate(stores)]


def pass_seconds(clock: Clock, watches: list[MemberWatch], seconds: int) -> None:
    """Lets some of them beat, second by second."""
    for _ in range(seconds):
        clock.seconds += 1.0
        for watch in watches:
            watch.beat()
