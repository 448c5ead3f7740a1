"""Beginning to train in a given world with those who come, again if one is lost on the way."""

import threading
from collections.abc import Callable

import torch.distributed as dist

from gossipgrad.comm import Group, Membership
from gossipgrad.errors import AgreementError, EvictedError, GossipError

from ._config import TrainConfig
from ._gathering import Gathering
from ._given_world import World
from ._layout import RunDir
from ._metrics import Event
from ._rank import train_rank
from ._result import RankResult
from ._tasks import load_job


def train_with_those_who_come(
    config: TrainConfig,
    run_dir: RunDir,
    world: World,
    store: dist.Store,
    gathering: Gathering,
    *,
    stop: threading.Event,
    met: Callable[[Membership], None],
    emit: Callable[[Event], None],
) -> RankResult:
    """Train one rank, as `train_rank`, among the ranks that are ready.

    Gossip and local runs begin without those who were lost before, others end. One that is lost
    between the gathering and the first step makes those who are left gather again.

    Args:
        config: The options.
        run_dir: Where files go.
        world: Which rank this is.
        store: Where private groups meet.
        gathering: Tells who comes.
        stop: As in `train_rank`.
        met: Told of the members that begin, each time.
        emit: As in `train_rank`.

    Raises:
        GossipError: A rank is missing that is needed.
    """
    while True:
        job = load_job(config)
        membership = gathering.meet()
        if membership.gone and config.needs_every_rank:
            rank, loss = next(iter(membership.gone.items()))
            raise GossipError(
                f"rank {rank} was lost before the start ({loss.why}), and strategy "
                f"{config.strategy} needs every rank"
            )
        met(membership)
        started = False

        def heard(event: Event, membership: Membership = membership) -> None:
            nonlocal started
            if event["event"] == "ready":
                gathering.begin(membership.generation)
                started = True
            emit(event)

        groups = None if config.needs_every_rank else _Groups(store, world, gathering, membership)
        if config.needs_every_rank:
            dist.init_process_group(
                "gloo", store=store, rank=world.rank, world_size=world.world_size
            )
        try:
            return train_rank(
                config,
                job,
                run_dir,
                rank=world.rank,
                world_size=world.world_size,
                stop=stop,
                emit=heard,
                groups=groups,
                members=membership.living,
            )
        except (GossipError, dist.DistError) as error:
            final = isinstance(error, AgreementError | EvictedError)
            if started or final or groups is None:
                raise
            groups.close()
            if not gathering.starts_again(membership.generation):
                raise


class _Groups:
    """Private groups of the members that begin, by name."""

    def __init__(
        self, store: dist.Store, world: World, gathering: Gathering, membership: Membership
    ) -> None:
        self._store = dist.PrefixStore(f"gossipgrad/start{membership.generation}", store)
        self._world = world
        self._gathering = gathering
        self._members = membership.living
        self._made: list[Group] = []

    def __call__(self, name: str) -> Group:
        group = Group(
            dist.PrefixStore(name, self._store),
            self._world.rank,
            self._world.world_size,
            members=self._members,
            gone=self._gathering.gone,
        )
        self._made.append(group)
        return group

    def close(self) -> None:
        """Leave all of them; others' collectives then fail."""
        for group in self._made:
            group.close()
