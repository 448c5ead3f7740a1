"""Ranks that die by script, in threads: without a word, as a process that is killed."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Hub, Record, ScriptedDeathError
from support.replicas import backward
from support.sessions import Trainer, run_sessions
from support.waiting import NEVER_SECONDS

__all__ = ["QUICK", "Rank", "fall_silent", "run_mortals", "take_for_dead"]

QUICK = gg.Heartbeats(interval_seconds=0.03, lease_seconds=0.5, silent_seconds=NEVER_SECONDS)
"""Half a second for one whose link broke. Nobody is given up for its silence alone."""


class Rank(Trainer):
    """One rank in its session, that may die; `cut` ends its links."""

    cut: Callable[[], object]

    def train_without(self, *dead: int) -> None:
        """Makes steps until this rank trains in a generation without some ranks."""
        self.train_until(lambda: not {*dead} & {*self.session.membership.living})

    def die(self) -> NoReturn:
        """Ends this rank without a word; others hear its links break."""
        fall_silent(self.session)  # a beat behind that would be a sign of life
        self.cut()
        raise ScriptedDeathError(f"rank {self.rank} dies by script")


def fall_silent(session: gg.GossipSession) -> None:
    """Shows no sign of life from now on, as a process that stands still."""
    watch = session._members.watch
    if watch is not None:
        watch.stop()
        assert watch._thread is not None
        watch._thread.join()


def take_for_dead(session: gg.GossipSession, rank: int) -> None:
    """Writes what a member would that has seen no sign of life of a rank for long enough."""
    record = Record(dist.PrefixStore(session._members.name, session.group.store))
    while rank in (known := record.read()).living:
        record.replace(known, known.without({rank: "no sign of life"}, left=False, by=0))


def run_mortals(world_size: int, function: Callable[[Rank], Any], **settings: Any) -> list[Any]:
    """Runs `function(rank)` with a session in a thread a rank; None for those that die."""
    hub = Hub(world_size)

    def use(me: Rank) -> Any:
        me.cut = lambda: hub.remove(me.rank)
        return function(me)

    settings = {"topology": "matching", "heartbeats": QUICK, "gradients": backward, **settings}
    settings |= {"kind": Rank, "leaves_together": False}
    return run_sessions(
        world_size, use, transport=lambda group: hub.transport(group.rank), **settings
    )
