import random
from functools import partial

import pytest
import torch.distributed as dist

from gossipgrad.train.strategies import _stopping
from gossipgrad.train.strategies._stopping import LockstepStop


def accords(world_size, parted=None):
    store = dist.HashStore()
    parted = [] if parted is None else parted
    return [
        LockstepStop(store, rank, world_size, partial(parted.append, rank))
        for rank in range(world_size)
    ]


def stops(world_size: int, told: list[int], rng: random.Random) -> list[int]:
    """The step before which each rank stops; `told` is the first step that it knows before."""
    ranks = accords(world_size)
    step = [1] * world_size  # the one that a rank is about to take, or in
    begun = [0] * world_size
    stopped = [0] * world_size
    while not all(stopped):
        rank = rng.choice([r for r in range(world_size) if not stopped[r]])
        if begun[rank] == step[rank]:
            if min(begun) >= step[rank]:  # an all-reduce ends when all have begun it
                step[rank] += 1
            else:
                assert not any(stopped), "one waits for a rank that has stopped"
        elif step[rank] >= told[rank] and ranks[rank].should_stop(step[rank]):
            stopped[rank] = step[rank]
        else:
            begun[rank] = step[rank]
    return stopped


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_stop_before_the_same_step_however_unequally_they_are_told(world_size, monkeypatch):
    monkeypatch.setattr(_stopping, "_GRACE_SECONDS", 60.0)
    for seed in range(100):
        rng = random.Random(seed)
        told = [rng.randint(1, 6) for _ in range(world_size)]
        stopped = stops(world_size, told, rng)
        assert stopped == [max(told) + 1] * world_size, (seed, told, stopped)


def test_a_rank_alone_stops_at_once():
    assert accords(1)[0].should_stop(1)


def test_a_rank_whose_peers_are_not_told_leaves_after_two_steps_and_the_grace(monkeypatch):
    parted = []
    first, second = accords(2, parted)
    monkeypatch.setattr(_stopping, "_GRACE_SECONDS", 60.0)
    assert not second.is_requested()
    assert not any(first.should_stop(step) for step in range(7, 20))
    monkeypatch.setattr(_stopping, "_GRACE_SECONDS", 0.0)
    assert first.should_stop(20)
    assert first.is_disconnected
    assert not second.is_disconnected
    assert second.is_requested()
    assert parted == [0]
    slow = accords(2)[0]
    assert [slow.should_stop(step) for step in (7, 8, 9)] == [False, False, True]


def test_a_store_that_is_gone_is_no_reason_to_stay():
    class Gone(dist.Store):
        def __init__(self):
            super().__init__()

        def add(self, key, amount):
            return 1

        def set(self, key, value):
            raise RuntimeError("Connection reset by peer")

        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    parted = []
    accord = LockstepStop(Gone(), 0, 2, partial(parted.append, 0))
    assert not accord.is_requested()
    assert accord.should_stop(3)
    assert accord.is_disconnected
    assert parted == [0]
