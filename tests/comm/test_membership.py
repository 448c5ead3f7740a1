"""Generations of the membership, signs of life, leases: on one store, with no time passing."""

import threading

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.comm import Heartbeats, Membership, MemberWatch
from gossipgrad.comm._membership import Record
from gossipgrad.errors import GossipError
from support.waiting import until
from support.watches import SETTINGS, pass_seconds

moves = st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 5), min_size=1)), max_size=30)


@settings(max_examples=200)
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
            before = won[desired.generation - 1]
            assert set(desired.living) < set(before.living)
            won[desired.generation] = desired
        known[who] = stands
        assert desired is stands or records[who].read() == stands
    newest = records[0].read()
    assert newest == won[max(won)]
    assert set(newest.living) | set(newest.gone) == set(range(6))


def test_many_proposers_at_once_have_one_winner():
    store, start = dist.HashStore(), threading.Barrier(8)
    won = []

    def propose(rank):
        record = Record(store, Membership.first(8))
        current = record.read()
        desired = current.without({(rank + 1) % 8: "silent"}, left=False, by=rank)
        start.wait()
        if record.replace(current, desired) == desired:
            won.append(rank)

    threads = [threading.Thread(target=propose, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert Record(store, Membership.first(8)).read().generation == 1


def test_a_record_comes_back_from_its_text():
    first = Membership.first(3)
    second = first.without({1: "silent"}, left=False, by=0).without({0: "left"}, left=True, by=0)
    assert Membership.from_text(second.to_text()) == second
    assert (second.generation, second.living, set(second.lost)) == (2, (2,), {1})
    assert second.without({1: "again"}, left=False, by=2) is second
    third = second.with_newcomer(3, donor=2, introduction=("tcp://host:1", "00", False, "ab"))
    assert Membership.from_text(third.to_text()) == third
    assert third.joined[3].introduction == ("tcp://host:1", "00", False, "ab")
    assert third.without({3: "silent"}, left=False, by=2).joined[3].introduction == ()


def test_nobody_joins_a_run_whose_members_have_all_left():
    """Though a newcomer that knows an older generation still sees some of them."""
    first = Membership.first(2)
    record = Record(dist.HashStore(), first)
    over = record.replace(first, first.without({0: "left", 1: "left"}, left=True, by=0))
    with pytest.raises(GossipError, match="the run is over: rank 2 joins nobody"):
        record.add(first, 2, donor=0, introduction=())
    assert record.read() == over


def test_who_beats_stays(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 40)
    assert {watch.latest.generation for watch in all_watches} == {0}


def test_who_is_silent_is_given_up_and_all_learn_of_it(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    living = [all_watches[r] for r in (0, 2, 3)]
    pass_seconds(clock, living, 9)
    assert living[0].latest.generation == 0
    pass_seconds(clock, living, 4)
    for watch in living:
        assert watch.latest.living == (0, 2, 3)
        assert watch.latest.lost[1].why == "no sign of life for 10 s"
        assert watch.latest.lost[1].by == 0, "the one before it watches it"
        assert watch.expelled() == {1}
        assert watch.is_member()


@pytest.mark.parametrize("dead", [{1, 2}, {0, 1, 2}, {1, 3}, {0, 2, 4, 5}, {0, 1, 2, 3, 4}])
def test_several_at_once_down_to_one_survivor(watches, clock, dead):
    all_watches = watches(6)
    pass_seconds(clock, all_watches, 3)
    living = [watch for rank, watch in enumerate(all_watches) if rank not in dead]
    pass_seconds(clock, living, 12 + 4 * len(dead))
    for watch in living:
        assert set(watch.latest.living) == set(range(6)) - dead


def test_a_broken_link_makes_it_quick_but_a_sign_of_life_clears(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    all_watches[0].gone(2, left=False)
    pass_seconds(clock, all_watches, 6)
    assert all_watches[0].latest == Membership(generation=1, living=(0, 1, 2, 3)), "rank 2 lives"
    living = [all_watches[r] for r in (0, 1, 3)]
    all_watches[0].gone(2, left=False)
    pass_seconds(clock, living, 5)
    assert all_watches[3].latest.living == (0, 1, 3)


def examine_in_the_middle_of(pass_seconds, watch):
    """What `watch.examine()` says, if it takes some seconds."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(watch.examine()))
    thread.start()
    until(lambda: watch._examined)
    pass_seconds()
    thread.join(60)
    return answers


def test_a_collective_that_broke_makes_nobody_dead_who_stands_still(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    living = [all_watches[r] for r in (0, 1, 3)]
    all_watches[0]._question(all_watches[0]._examined, {1, 2, 3})
    pass_seconds(clock, living, 8)
    assert all_watches[0].latest.generation == 0
    assert all_watches[0]._examined == {2}
    pass_seconds(clock, living, 5)
    assert all_watches[3].latest.living == (0, 1, 3)
    assert all_watches[3].latest.lost[2].why == "no sign of life for 10 s"


def test_an_examination_waits_for_who_is_silent(watches, clock):
    all_watches = watches(3)
    pass_seconds(clock, all_watches, 3)

    def wait():
        pass_seconds(clock, [all_watches[0], all_watches[1]], 13)

    assert examine_in_the_middle_of(wait, all_watches[0]) == [True]
    assert all_watches[0].latest.living == (0, 1)


def test_an_examination_ends_when_all_have_shown_a_sign_of_life(watches, clock):
    all_watches = watches(3)
    pass_seconds(clock, all_watches, 3)
    assert examine_in_the_middle_of(
        lambda: pass_seconds(clock, all_watches, 2), all_watches[0]
    ) == [False]


def test_a_beat_from_before_the_link_broke_is_no_sign_of_life(watches, clock):
    all_watches = watches(3)
    pass_seconds(clock, all_watches, 3)
    all_watches[1].beat()  # its last, which rank 0 has not seen
    all_watches[0].gone(1, left=False)
    pass_seconds(clock, [all_watches[0], all_watches[2]], 5)
    assert all_watches[0].latest.living == (0, 2)


@pytest.mark.parametrize("lease_seconds", [1.5, 4.0, 10.0])
def test_nobody_is_given_up_before_its_lease_has_run_out(clock, lease_seconds):
    settings = Heartbeats(interval_seconds=1.0, lease_seconds=lease_seconds, silent_seconds=10.0)
    store, first = dist.HashStore(), Membership.first(2)
    mine, other = (MemberWatch(store, r, first, settings, now=clock) for r in range(2))
    for _ in range(3):
        clock.seconds += 0.95
        other.beat()
        mine.beat()
    mine.gone(1, left=False)
    last_seconds = clock.seconds
    while mine.latest.generation == 0:
        clock.seconds += 0.95
        mine.beat()
    assert lease_seconds < clock.seconds - last_seconds < max(3.0, lease_seconds) + 2.0


class Hooked:
    """A store of one rank, in which something happens just before it writes a generation."""

    def __init__(self, store):
        self._store = store
        self.set, self.get, self.delete_key = store.set, store.get, store.delete_key
        self.before = lambda: None

    def compare_set(self, key, expected, desired):
        before, self.before = self.before, lambda: None
        before()
        return self._store.compare_set(key, expected, desired)


@pytest.fixture
def hooked_watches(clock):
    inner, first = dist.HashStore(), Membership.first(4)
    return [MemberWatch(Hooked(inner), r, first, SETTINGS, now=clock) for r in range(4)]


def test_who_was_given_up_gives_up_nobody(hooked_watches, clock):
    """Rank 0 stands still as it writes that rank 1 is lost, and rank 1 shows a sign of life."""
    pass_seconds(clock, hooked_watches, 3)
    pass_seconds(clock, [hooked_watches[r] for r in (0, 2, 3)], 9)
    hooked_watches[0]._store.before = lambda: pass_seconds(clock, hooked_watches[1:], 30)
    pass_seconds(clock, hooked_watches[:1], 2)
    pass_seconds(clock, hooked_watches, 5)
    for watch in hooked_watches:
        assert watch.latest.living == (1, 2, 3)
    assert not hooked_watches[0].is_member()


def test_who_was_slower_looks_again_before_it_gives_anybody_up(hooked_watches, clock):
    def meanwhile():
        hooked_watches[1].beat()
        hooked_watches[3].leave()
        hooked_watches[3]._give_up({3: "left"}, left=True)

    pass_seconds(clock, hooked_watches, 3)
    pass_seconds(clock, [hooked_watches[r] for r in (0, 2, 3)], 9)
    hooked_watches[0]._store.before = meanwhile
    pass_seconds(clock, hooked_watches[:1], 2)
    pass_seconds(clock, hooked_watches[:3], 5)
    assert hooked_watches[0].latest.living == (0, 1, 2)


def test_who_stood_still_itself_gives_nobody_up(watches, clock):
    """After a SIGSTOP of this rank the beats that it saw last are old, and tell nothing."""
    all_watches = watches(2)
    pass_seconds(clock, all_watches, 3)
    pass_seconds(clock, all_watches[1:], 5)
    clock.seconds += 1000.0
    all_watches[0].beat()
    all_watches[1].beat()
    all_watches[0].beat()
    assert all_watches[0].latest.generation == 0


def test_many_looks_in_a_moment_count_as_one(watches, clock):
    all_watches = watches(2)
    pass_seconds(clock, all_watches, 3)
    all_watches[0].gone(1, left=False)
    for _ in range(50):
        all_watches[0].beat()
    assert all_watches[0].latest.generation == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"interval_seconds": 0.0}, "interval_seconds must be a number of seconds above 0"),
        ({"silent_seconds": float("inf")}, "silent_seconds must be .* finite"),
        ({"lease_seconds": 0.1}, r"must rise in this order: .* renew its lease"),
        ({"lease_seconds": 20.0}, "must rise in this order"),
    ],
)
def test_durations_that_make_no_sense(wrong, why):
    with pytest.raises(ValueError, match=why):
        Heartbeats(**wrong)


def test_a_record_keeps_the_last_of_those_who_joined_and_went_and_all_of_the_start():
    """All members read it at every beat."""
    store, first = dist.HashStore(), Membership.first(2)
    watch, other = (MemberWatch(store, rank, first, SETTINGS) for rank in range(2))
    known = first.without({1: "left"}, left=True, by=1)
    watch._learn(watch._record.replace(first, known))
    for rank in range(2, 52):
        one = MemberWatch(store, rank, watch.latest, SETTINGS)
        one.enter(0, ("tcp://127.0.0.1:9",))
        one._give_up({rank: "left"}, left=True)
        watch._learn(one.latest)
        known = watch.latest.remembering(known)
    assert {*watch.latest.gone} == {1, *range(20, 52)}
    assert {*watch.latest.joined} == {*range(20, 52)}
    assert watch.latest == watch._record.read()
    assert store.check(["beat/20"])
    assert not store.check(["beat/19"])
    assert {*known.gone} == {1, *range(2, 52)} == {1, *known.joined}
    assert watch.latest.eviction_of(2).startswith("rank 2 was taken for dead long ago: it is no")
    assert other.is_member()
    other._learn(watch.latest)
    assert not other.is_member()
