"""Watches over members, beaten by hand: no time passes but that of a clock of their own."""

import torch.distributed as dist

from gossipgrad.comm import Heartbeats, Membership, MemberWatch

__all__ = ["SETTINGS", "Clock", "make_watches", "pass_seconds"]

SETTINGS = Heartbeats(interval_seconds=1.0, lease_seconds=2.0, silent_seconds=10.0)


class Clock:
    """Seconds that pass when they are told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_watches(
    clock: Clock, world_size: int, settings: Heartbeats = SETTINGS
) -> list[MemberWatch]:
    """The watches of a world, on one store."""
    store, first = dist.HashStore(), Membership.first(world_size)
    return [MemberWatch(store, r, first, settings, now=clock) for r in range(world_size)]


def pass_seconds(clock: Clock, watches: list[MemberWatch], seconds: int) -> None:
    """Lets some of them beat, second by second."""
    for _ in range(seconds):
        clock.seconds += 1.0
        for watch in watches:
            watch.beat()
