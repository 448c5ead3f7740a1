"""Ranks that wait for partners stop in the same round, however unequally they are told."""

import random

import pytest
import torch.distributed as dist

from gossipgrad.comm import Group
from gossipgrad.topology import by_name, dissemination, ring
from gossipgrad.train.strategies import _stopping
from gossipgrad.train.strategies._stopping import RoundStop, first_beyond


class Rank:
    """One whose rounds are of `every` steps: it comes to the next when its partner is in this."""

    def __init__(self, rank, store, schedule, every):
        group = Group(store, rank, schedule.world_size, members=(rank,))
        everyone = range(schedule.world_size)
        self.rank, self.every, self.done, self.stopped = rank, every, 0, False
        self.schedule = schedule
        self.accord = RoundStop(
            group,
            lambda: tuple(everyone),
            lambda: self.round,
            lambda here: first_beyond(schedule, everyone, here),
        )

    @property
    def round(self):
        return self.done // self.every

    def waits(self, ranks):
        source = self.schedule.peers(self.round, self.rank).recv_from
        closes = (self.done + 1) % self.every == 0
        return closes and source is not None and ranks[source].round < self.round


def stops(schedule, every, told, rng):
    """After how many steps each rank stops; `told` says after how many it is told to."""
    store = dist.HashStore()
    ranks = [Rank(rank, store, schedule, every) for rank in range(schedule.world_size)]
    weights = [rng.choice([0.01, 1.0]) for _ in ranks]  # some run ahead as far as they can
    in_step, waiting = set(), set()
    while not all(one.stopped for one in ranks):
        able = [one for one in ranks if not one.stopped and one.rank not in waiting]
        assert able, "all wait for a rank that has stopped"
        one = rng.choices(able, [weights[one.rank] for one in able])[0]
        if one.rank not in in_step:
            one.stopped = one.done >= told[one.rank] and one.accord.should_stop()
            in_step.add(one.rank)
        elif one.waits(ranks):
            waiting.add(one.rank)
        else:
            in_step.remove(one.rank)
            waiting.clear()
            one.done += 1
    for one in ranks:
        one.accord.close()
    return [one.done for one in ranks]


@pytest.mark.parametrize(
    ("name", "world_size", "every"),
    [
        ("dissemination", 2, 1),
        ("hypercube", 4, 3),
        ("matching", 5, 1),
        pytest.param("dissemination", 5, 2, marks=pytest.mark.slow),
        pytest.param("ring", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_all_stop_after_as_many_steps(name, world_size, every, monkeypatch):
    monkeypatch.setattr(_stopping, "_GRACE_SECONDS", 60.0)
    for seed in range(3):
        rng = random.Random(seed)
        schedule = by_name(name, world_size, seed=seed)
        told = [rng.randint(0, 8) for _ in range(world_size)]
        stopped = stops(schedule, every, told, rng)
        assert len(set(stopped)) == 1, (seed, told, stopped)
        assert max(told) <= stopped[0] <= max(told) + every * (2 * schedule.period + world_size)


def test_the_bound_is_as_near_as_it_can_be():
    assert first_beyond(dissemination(2), range(2), 10) == 12
    assert first_beyond(ring(5), range(5), 0) == 5
    assert first_beyond(dissemination(8, rotate=False), range(8), 3) == 7
    # One that sits out, or is gone, holds up nobody, and is held up by nobody.
    assert first_beyond(by_name("matching", 2, seed=0), [0], 3) == 4


def test_who_does_not_hear_of_the_others_in_time_stops_alone(monkeypatch):
    store = dist.HashStore()
    one = Rank(0, store, dissemination(2), 1)
    monkeypatch.setattr(_stopping, "_GRACE_SECONDS", 60.0)
    assert not one.accord.should_stop()
    monkeypatch.setattr(_stopping, "_GRACE_SECONDS", -1.0)
    assert one.accord.should_stop()
    assert store.get("gossipgrad/stop/0") == b"0"
