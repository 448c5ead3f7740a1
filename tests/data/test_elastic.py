"""Samples that are dealt anew when ranks come or go: over an epoch none is lost or doubled."""

import random
from datetime import timedelta

import pytest
import torch.distributed as dist

from gossipgrad.comm import Membership
from gossipgrad.data import ShardedBatches
from gossipgrad.errors import EvictedError
from support.shares import Run
from support.shares import let_go as let_go


def tcp_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def sharded(run, rank, epoch, **kwargs):
    settings = {name: run.settings[name] for name in ("batch_size", "seed", "world_size")}
    batches = ShardedBatches(samples=run.samples, rank=rank, **settings)
    return [y.tolist() for _, y in batches.epoch(epoch, **kwargs)]


def once(samples):
    return dict.fromkeys(range(samples), 1)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("samples", [64, 67])
def test_undisturbed_they_are_those_of_sharded_batches(samples, threads):
    run = Run(samples, 3, threads=threads)
    for epoch in range(3):
        run.in_turn(0, 1, 2, epoch=epoch)
        for rank, one in run.ranks.items():
            assert one.trained[epoch] == sharded(run, rank, epoch)
            assert one.batches.position == (epoch + 1) * len(one.batches)
            assert len(one.trained[epoch]) == len(one.batches)
    assert run.total("samples_dealt_anew") == run.total("disturbed_epochs") == 0
    assert run.total("samples") == 3 * 3 * (samples // 3)


def test_an_undisturbed_rank_claims_a_chunk_at_a_time_and_asks_nothing_else():
    run = Run(400, 2, chunk_batches=10)
    for epoch in range(3):
        run.in_turn(0, 1, epoch=epoch)
    for one in run.ranks.values():
        one.leave()
    # That it begins, 10 chunks of a share, and what was used of the last one.
    assert 2 * 3 * 11 <= run.total("store_requests") <= 2 * 3 * 14


def test_an_undisturbed_epoch_is_entered_at_any_batch():
    run = Run(64, 2)
    for rank, one in run.ranks.items():
        assert one.step(1, start_batch=5)
        assert one.batches.position == 1 * 16 + 6
        one.finish(1)
        assert one.trained[1] == sharded(run, rank, 1, start_batch=5)


def test_what_was_used_before_a_resumption_is_dealt_to_nobody():
    run = Run(96, 2)
    for rank in (0, 1):
        run.ranks[rank].step(0, start_batch=9)
    run.change(0, 1, 2)
    run.in_turn(0, 1, 2, epoch=0)
    rest = [s for rank in (0, 1) for batch in sharded(run, rank, 0, start_batch=9) for s in batch]
    assert run.times(0) == dict.fromkeys(rest, 1)
    assert run.ranks[2].trained[0], "the newcomer had its part"


@pytest.mark.parametrize("make_store", [dist.HashStore, tcp_store])
def test_three_ranks_become_six_and_then_two_in_one_epoch(make_store):
    """Every sample exactly once, but what the dead had begun."""
    run = Run(602, 3, make_store(), chunk_batches=4)
    run.together(0, 1, 2, epoch=0, steps=20)
    run.change(0, 1, 2, 3, 4, 5)
    run.together(0, 1, 2, 3, 4, 5, epoch=0, steps=15)
    run.change(1, 4)  # the others are dead without a word
    run.together(1, 4, epoch=0)
    times, dead = run.times(0), run.times(0, 0, 2, 3, 5)
    assert len(times) == 600
    assert {*run.times(0, 1, 4).values(), *dead.values()} == {1}
    doubled = {sample for sample, count in times.items() if count > 1}
    most = run.total("samples_used_twice_at_most")
    assert len(doubled) <= most <= 4 * 2 * 4 * 2, "two chunks of four batches of two, each"
    for rank in (1, 4):
        batches = run.ranks[rank].batches
        assert batches.is_disturbed(0)
        assert batches.position == len(batches)


def test_ranks_come_to_the_end_of_a_disturbed_epoch_together():
    run = Run(240, 3)
    run.in_turn(0, 1, 2, epoch=0, steps=10)
    run.change(0, 1, 3, 4)
    made = run.in_turn(0, 1, 3, 4, epoch=0)
    assert max(made.values()) - min(made.values()) <= 2
    assert len(run.times(0)) == 240


def test_the_position_goes_by_the_share_of_the_epoch_that_is_done():
    run = Run(600, 3)  # 100 batches a rank
    run.in_turn(0, 1, 2, epoch=0, steps=50)
    run.change(*range(6))
    newcomer = run.ranks[5].batches
    run.in_turn(*range(6), epoch=0, steps=1)
    assert 46 <= newcomer.position <= 53, "in the middle of the epoch, as the others"
    run.in_turn(*range(6), epoch=0, steps=11)
    assert all(66 <= run.ranks[rank].batches.position <= 75 for rank in range(6))
    run.in_turn(*range(6), epoch=0)
    assert {run.ranks[rank].batches.position for rank in range(6)} == {100}
    assert run.times(0) == once(600)


def test_who_leaves_in_order_has_told_all_and_nothing_is_used_twice():
    run = Run(300, 3)
    run.in_turn(0, 1, 2, epoch=0, steps=11)
    run.ranks[2].leave()
    run.change(0, 1)
    run.in_turn(0, 1, epoch=0)
    assert run.times(0) == once(300)
    assert run.total("samples_dealt_anew", 0, 1) >= 300 // 3 - 2 * 11


def test_ranks_that_disagree_on_the_generation_double_nothing():
    """Rank 0 has not heard yet of the newcomers, nor that rank 2 left, and claims as ever."""
    run = Run(400, 4)
    run.in_turn(0, 1, 2, 3, epoch=0, steps=5)
    run.ranks[2].leave()
    run.change(0, 1, 3, 4, known_to=(1, 4))
    run.in_turn(0, 1, 3, 4, epoch=0, steps=9)
    run.change(0, 1, 3, 4, 5, known_to=(3, 5))
    run.in_turn(0, 1, 3, 4, 5, epoch=0, steps=9)
    run.learn(0)
    run.in_turn(0, 1, 3, 4, 5, epoch=0)
    assert run.times(0) == once(400)


def test_a_newcomer_that_the_others_do_not_know_is_no_dead_rank():
    """Its claims are of a later generation than theirs."""
    run = Run(80, 2)
    run.change(0, 1, 2, known_to=(2,))
    run.in_turn(2, epoch=0, steps=3)
    run.in_turn(0, 1, epoch=0)
    run.in_turn(2, epoch=0)
    assert run.times(0) == once(80)


def test_what_a_dead_rank_left_of_an_epoch_is_used_in_the_next():
    """The others had come to the end of theirs when it died."""
    run = Run(120, 3)
    run.in_turn(0, 1, 2, epoch=0, steps=7)
    run.in_turn(0, 1, epoch=0)
    assert len(run.times(0)) == 120 - 20 * 2 + 7 * 2
    run.change(0, 1)
    run.in_turn(0, 1, epoch=1)
    doubled = sum(run.times(0).values()) - 120
    assert len(run.times(0)) == 120
    assert doubled <= run.total("samples_used_twice_at_most") <= 2 * 2 * 2
    assert run.times(1) == once(120)


@pytest.mark.parametrize("heard_of", [False, True])
def test_what_a_newcomer_left_that_came_unheard_of_is_used_in_the_next(heard_of):
    """The others had come to the end of the epoch without it; it died before they knew, or soon."""
    run = Run(80, 2)
    run.in_turn(0, 1, epoch=0, steps=3)
    run.change(0, 1, 2, known_to=(2,))
    run.in_turn(2, epoch=0, steps=3)
    run.in_turn(0, 1, epoch=0)
    assert len(run.times(0)) < 80
    if heard_of:
        run.learn(0, 1)
        run.in_turn(0, 1, epoch=1, steps=3)
    run.change(0, 1)
    run.in_turn(0, 1, epoch=1)
    assert len(run.times(0)) == 80
    assert sum(run.times(0).values()) - 80 <= run.total("samples_used_twice_at_most", 0, 1)
    for rank in (0, 1):
        run.ranks[rank].leave()
    assert run.total("samples_left", 0, 1) == 0


def test_what_nobody_trains_on_any_more_is_told():
    run = Run(120, 3)
    run.in_turn(0, 1, 2, epoch=0, steps=7)
    run.in_turn(0, 1, epoch=0)
    run.change(0, 1)
    missing = 120 - len(run.times(0))
    for rank in (0, 1):
        run.ranks[rank].leave()
        left = run.ranks[rank].batches.stats().samples_left
        assert missing <= left <= missing + 2 * 2 * 2


def test_a_rank_that_never_came_has_no_share():
    run = Run(90, 3)
    run.membership = Membership.first(3, (0, 2))
    run.learn(0, 2)
    run.in_turn(0, 2, epoch=0)
    assert run.times(0) == once(90)


def test_a_newcomer_that_is_too_late_for_an_epoch_goes_on_with_the_next():
    run = Run(60, 2)
    assert run.ranks[0].batches.newest_epoch() is None
    run.in_turn(0, 1, epoch=0)
    run.change(0, 1, 2)
    assert run.ranks[2].batches.newest_epoch() == 0
    run.in_turn(2, epoch=0)
    assert not run.ranks[2].batches.is_behind()
    run.ranks[0].step(1)
    assert run.ranks[2].batches.is_behind()
    drawn = run.ranks[2].batches.epoch(1)
    assert not run.ranks[2].batches.is_behind(), "though it has no batch of it yet"
    del drawn
    run.in_turn(0, 1, 2, epoch=1)
    assert not run.ranks[2].batches.is_behind()
    assert {one.batches.newest_epoch() for one in run.ranks.values()} == {1}
    assert run.times(0) == run.times(1) == once(60)
    assert 2 not in run.times(0, 2)
    assert len(run.ranks[2].trained[1]) > 5


def test_a_rank_that_was_given_up_gets_no_samples():
    run = Run(60, 2)
    run.ranks[1].step(0)
    run.ranks[1].membership = Membership(generation=1, living=(0,))
    with pytest.raises(EvictedError, match=r"rank 1 is none of the living \(0\) in generation 1"):
        run.ranks[1].finish(0)
    run.ranks[1].leave()


def test_long_past_epochs_are_forgotten_in_the_store():
    store = dist.HashStore()
    run = Run(12, 2, store)
    for epoch in range(12):
        run.in_turn(0, 1, epoch=epoch)
    for one in run.ranks.values():
        one.leave()
    assert not any(store.check([f"shares/{epoch}/{share}"]) for epoch in (0, 3) for share in (0, 1))
    assert store.check(["shares/11/0", "shares/11/1"])


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("make_store", [dist.HashStore, tcp_store])
def test_a_rank_that_is_many_epochs_behind_doubles_nothing(make_store, disturbed):
    """The others have let go of the epoch that it is in, and it has news to tell of that."""
    run = Run(36, 3, make_store())
    run.in_turn(0, 1, 2, epoch=0, steps=1)
    if disturbed:
        run.change(1, 2)
    run.in_turn(2, epoch=0, steps=1)
    others = (1,) if disturbed else (0, 1)
    for epoch in range(10):
        run.in_turn(*others, epoch=epoch)
    for epoch in range(10):
        run.in_turn(2, epoch=epoch)
        lost = run.times(epoch, 0) if disturbed else {}
        assert set(run.times(epoch)) == set(range(36))
        assert all(times == 1 + (one in lost) for one, times in run.times(epoch).items()), epoch
    run.ranks[2].leave()
    assert run.total("samples_untold") == 0, "the store is never awaited in vain"


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_comings_and_goings(seed):
    """Ranks come, leave or die, and hear of it at unlike times, or when their epoch is over."""
    draw = random.Random(seed)
    run = Run(100, 3, chunk_batches=draw.choice([1, 2, 3]))
    alive, after, orderly = [0, 1, 2], 3, seed % 2 == 0
    for _ in range(8):
        event = draw.choice(["come", "go", "learn"])
        if event == "come":
            run.change(*alive, after, known_to=(*draw.sample(alive, len(alive) // 2), after))
            alive, after = [*alive, after], after + 1
        elif event == "go" and len(alive) > 2:
            gone = alive.pop(draw.randrange(len(alive)))
            if orderly:
                run.ranks[gone].leave()
            run.change(*alive, known_to=tuple(draw.sample(alive, len(alive) // 2)))
        else:
            run.learn(*alive)
        run.together(*alive, epoch=0, steps=draw.randrange(5))
    run.together(*alive, epoch=0)  # by what some of them know
    run.learn(*alive)
    run.together(*alive, epoch=1)
    times = run.times(0)
    assert len(times) == 99
    doubled = sum(times.values()) - 99
    assert doubled <= (0 if orderly else run.total("samples_used_twice_at_most"))
