"""Ranks that die by script, in threads: without a word, as a process that is killed."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

import gossipgrad as gg
from gossipgrad.comm import Group, Hub, Record, ScriptedDeathError
from support.ranks import run_ranks
from support.replicas import backward, flat, network, sgd
from support.waiting import until

__all__ = ["QUICK", "Rank", "fall_silent", "run_mortals", "take_for_dead"]

QUICK = gg.Heartbeats(interval_seconds=0.03, lease_seconds=0.5, silent_seconds=20.0)
"""Half a second for one whose link broke; else long: a busy machine may hold a thread up."""


class Rank:
    """One rank of `run_mortals`: its session, and what it may do.

    Attributes:
        session: The session, inside the context.
        hub: Where its links are.
    """

    def __init__(self, rank: int, session: gg.GossipSession, hub: Hub, train: Callable[[], None]):
        self.rank = rank
        self.session = session
        self.hub = hub
        self._train = train

    def train(self, steps: int) -> None:
        """Makes some steps."""
        for _ in range(steps):
            self._train()

    def train_until(self, condition: Callable[[], Any], timeout_seconds: float = 60.0) -> None:
        """Makes steps until a condition holds; fails if it does not in time."""

        def met() -> bool:
            self._train()
            time.sleep(0.002)  # ranks of one process share the interpreter
            return bool(condition())

        until(met, timeout_seconds)

    def train_without(self, *dead: int) -> None:
        """Makes steps until this rank trains in a generation without some ranks."""
        self.train_until(lambda: not {*dead} & {*self.session.membership.living})

    def mean(self) -> Tensor:
        """The consensus, flat."""
        with self.session.consensus():
            return flat(self.session.replica.model)

    def die(self) -> NoReturn:
        """Ends this rank without a word; others hear its links break."""
        fall_silent(self.session)  # a beat behind that would be a sign of life
        self.hub.remove(self.rank)
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


def run_mortals(
    world_size: int,
    function: Callable[[Rank], Any],
    *,
    heartbeats: gg.Heartbeats | None = QUICK,
    gradients: Callable[[Any, int, int], None] = backward,
    build: Callable[[int], Any] = network,
    **settings: Any,
) -> list[Any]:
    """Runs `function(rank)` with a session in a thread a rank; None for those that die."""
    hub = Hub(world_size)
    settings = {"topology": "matching"} | settings

    def rank_main(rank: int, group: Group) -> Any:
        model = build(rank)
        optimizer = sgd(list(model.parameters()))
        steps = 0

        def train() -> None:
            nonlocal steps
            gradients(model, rank, steps)
            optimizer.step()
            steps += 1

        with (
            contextlib.suppress(ScriptedDeathError),
            gg.gossip(
                model,
                optimizer,
                process_group=group,
                transport=lambda group: hub.transport(group.rank),
                heartbeats=heartbeats,
                **settings,
            ) as session,
        ):
            return function(Rank(rank, session, hub, train))

    return run_ranks(world_size, rank_main)
