"""Runs that others join: ranks in threads, over TCP, with a store that can be reached."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group, ScriptedDeathError
from support.deaths import QUICK, Rank
from support.ranks import run_ranks
from support.replicas import backward, network, sgd
from support.waiting import HANG_SECONDS

__all__ = ["Run", "run_open"]


class Run:
    """What the threads of a run share."""

    def __init__(self, world_size: int, newcomers: int) -> None:
        self.world_size = world_size
        self.invited = [threading.Event() for _ in range(newcomers)]
        self.address = ""
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def invite(self, session: gg.GossipSession, *which: int) -> None:
        """Lets newcomers begin, by default all."""
        self.address = session.join_address()
        for each in which or range(len(self.invited)):
            self.invited[each].set()

    def connect(self) -> dist.Store:
        """A connection to the store."""
        port = self.store.port
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def run_open(
    world_size: int,
    member: Callable[[Rank, Run], Any],
    newcomer: Callable[[Rank, Run], Any],
    *,
    newcomers: int = 1,
    heartbeats: gg.Heartbeats = QUICK,
    gradients: Callable[[Any, int, int], None] = backward,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    build: Callable[[int], torch.nn.Module] = network,
    timeout_seconds: float = HANG_SECONDS,
    **settings: Any,
) -> list[Any]:
    """Runs `member(me, run)` in a thread a rank, `newcomer(me, run)` for those who join.

    What each returned, those who joined behind the others; None for those that die.
    """
    run = Run(world_size, newcomers)
    settings = {"topology": "matching"} | settings

    def main(place: int, group: Group) -> Any:
        joins = place >= world_size
        model = build(place)
        made = optimizer(list(model.parameters()))
        if joins:
            assert run.invited[place - world_size].wait(timeout_seconds)
            try:
                session = gg.join(
                    model,
                    made,
                    run.address,
                    heartbeats=heartbeats,
                    timeout_seconds=HANG_SECONDS,
                    **settings,
                )
            except ScriptedDeathError:
                return None
        else:
            store = dist.PrefixStore("run", run.connect())
            private = Group(store, place, world_size, timeout_seconds=float(timeout_seconds))
            session = gg.gossip(
                model, made, process_group=private, heartbeats=heartbeats, **settings
            )
        with contextlib.suppress(ScriptedDeathError), session:
            me = Rank(session.group, model, made, session, gradients)
            me.cut = session._rounds.channel.transport.close
            return (newcomer if joins else member)(me, run)

    return run_ranks(world_size + newcomers, main, timeout_seconds)
