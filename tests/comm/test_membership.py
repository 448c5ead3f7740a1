"""Generations of the membership and signs of life: on one store, with no time passing."""

import threading

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.comm import LOST, Heartbeats, Membership, MemberWatch, Record
from gossipgrad.errors import EvictedError, GossipError
from support.waiting import until
from support.watches import SETTINGS, HookedStore, make_watches, pass_seconds

ALL = (0, 1, 2, 3)
moves = st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 5), min_size=1)), max_size=30)


@settings(max_examples=60)
@given(moves=moves, stale=st.lists(st.booleans(), min_size=30, max_size=30))
def test_two_proposers_never_both_win_a_generation(moves, stale):
    """Whatever each has last read, a generation has one winner, and follows the one before."""
    store = dist.HashStore()
    records = [Record(store, Membership.first(6)) for _ in range(4)]
    known = [Membership.first(6)] * 4
    won = {0: known[0]}
    for (who, ends), is_stale in zip(moves, stale, strict=False):
        if not is_stale:
            known[who] = records[who].read()
        desired = known[who].without(dict.fromkeys(ends, "silent"), left=False, by=who)
        stands = records[who].replace(known[who], desired)
        if stands == desired and desired is not known[who]:
            assert desired.generation not in won or won[desired.generation] == desired
            assert set(desired.living) < set(won[desired.generation - 1].living)
            won[desired.generation] = desired
        known[who] = stands
    newest = records[0].read()
    assert newest == won[max(won)]
    assert set(newest.living) | set(newest.gone) == set(range(6))


def test_nobody_joins_a_run_whose_members_have_all_left():
    """Though a joiner that knows an older generation still sees some of them."""
    first = Membership.first(2)
    record = Record(dist.HashStore(), first)
    over = record.replace(first, first.without({0: "left", 1: "left"}, left=True, by=0))
    with pytest.raises(GossipError, match="the run is over"):
        record.change(first, lambda of: of.with_joiner(2, ()))
    assert record.read() == over


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_seconds": 0.0},
        {"silent_seconds": float("inf")},
        {"lease_seconds": 0.1},
        {"lease_seconds": 20.0},
    ],
)
def test_heartbeats_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Heartbeats(**wrong)


@pytest.mark.parametrize("dead", [set(), {1}, {1, 2}, {0, 1, 2}, {1, 3}, {0, 2, 4, 5}, {*range(5)}])
def test_the_silent_are_given_up_and_all_others_learn_of_it(watches, clock, dead):
    all_watches = watches(6)
    pass_seconds(clock, all_watches, 3)
    living = [watch for rank, watch in enumerate(all_watches) if rank not in dead]
    pass_seconds(clock, living, 9)
    assert living[0].latest.generation == 0
    pass_seconds(clock, living, 4 + 4 * len(dead))
    for watch in living:
        assert {*watch.latest.living} == {*range(6)} - dead
        assert watch.expelled() == watch.latest.lost.keys() == dead
        assert all(loss.why == "no sign of life for 10 s" for loss in watch.latest.lost.values())
        assert watch.is_member()


def test_a_broken_link_makes_a_loss_quick_and_a_sign_of_life_makes_the_link_anew(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    for here, there in ((0, 2), (2, 0)):
        all_watches[here].report_down(there, LOST)
    pass_seconds(clock, all_watches, 19)
    assert {watch.latest.generation for watch in all_watches} == {1}, "both ends ask for one"
    assert all_watches[0].latest.living == ALL
    all_watches[1].beat()
    all_watches[1].beat()  # its last, which rank 0 has not seen: it may be older than the break
    all_watches[0].report_down(1, LOST)
    pass_seconds(clock, [all_watches[r] for r in (0, 2, 3)], 5)
    assert all_watches[3].latest.living == (0, 2, 3)


@pytest.mark.parametrize("dead", [None, 1, 2])
def test_after_a_collective_broke_the_dead_are_given_up_or_a_generation_of_all_follows(
    watches, clock, dead
):
    all_watches = watches(3)
    pass_seconds(clock, all_watches, 3)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(all_watches[0].examine(0, {1, 2})))
    asking.start()
    living = [watch for rank, watch in enumerate(all_watches) if rank != dead]
    until(lambda: pass_seconds(clock, living, 1) or not asking.is_alive())
    assert answers == [dead is not None]
    pass_seconds(clock, living, 2)
    assert living[0].latest.living == tuple(rank for rank in range(3) if rank != dead)
    assert living[0].latest.generation == 1
    assert living[1].examine(0), "it broke before that generation, and asks for none after it"
    pass_seconds(clock, living, 30)
    assert living[0].latest.generation == 1


@pytest.mark.parametrize("lease_seconds", [1.5, 4.0, 10.0])
def test_nobody_is_given_up_before_its_lease_has_run_out(clock, lease_seconds):
    settings = Heartbeats(interval_seconds=1.0, lease_seconds=lease_seconds, silent_seconds=10.0)
    mine, other = make_watches(clock, 2, settings)
    pass_seconds(clock, [other, mine], 3)
    mine.report_down(1, LOST)
    last_seconds = clock.seconds
    while mine.latest.generation == 0:
        clock.seconds += 0.95
        mine.beat()
    assert lease_seconds < clock.seconds - last_seconds < max(3.0, lease_seconds) + 2.0


@pytest.fixture
def hooked(clock):
    """Four watches, each with its own connection; rank 1 has been silent for 9 seconds."""
    inner = dist.HashStore()
    stores = [HookedStore(inner) for _ in range(4)]
    made = make_watches(clock, 4, store=stores.__getitem__)
    pass_seconds(clock, made, 3)
    pass_seconds(clock, [made[r] for r in (0, 2, 3)], 9)
    return stores, made


def in_the_middle_of_writing(store, happen):
    def before(what, key):
        if what == "compare_set":
            store.before = lambda what, key: None
            happen()

    store.before = before


def test_a_rank_that_was_given_up_gives_up_nobody(hooked, clock):
    """Rank 0 is stopped as it writes that rank 1 is lost, and rank 1 shows a sign of life."""
    stores, made = hooked
    in_the_middle_of_writing(stores[0], lambda: pass_seconds(clock, made[1:], 30))
    pass_seconds(clock, made[:1], 2)
    pass_seconds(clock, made, 5)
    assert [watch.latest.living for watch in made] == [(1, 2, 3)] * 4
    assert not made[0].is_member()
    with pytest.raises(EvictedError, match=r"rank 0 was taken for dead.*silent_seconds"):
        made[0].confirm()


def test_a_rank_that_was_stopped_itself_gives_nobody_up(watches, clock):
    """The beats that it saw last are old then, and tell nothing; nor do many looks in a moment."""
    mine, other = watches(2)
    pass_seconds(clock, [mine, other], 3)
    pass_seconds(clock, [other], 5)
    clock.seconds += 1000.0
    for watch in (mine, other, mine):
        watch.beat()
    mine.report_down(1, LOST)
    for _ in range(50):
        mine.beat()
    assert mine.latest.generation == 0


def test_beats_of_those_who_joined_and_left_long_ago_are_removed_from_the_store(clock):
    store, newest = dist.HashStore(), Membership.first(1)
    store.set("beat/0", "0")
    for rank in range(1, 40):
        one = MemberWatch(store, rank, newest, SETTINGS, now=clock)
        one.enter(one.ask(()))
        one.start()
        one.leave()
        newest = Record(store).read()
    assert not store.check(["beat/1"])
    assert store.check(["beat/39"])
