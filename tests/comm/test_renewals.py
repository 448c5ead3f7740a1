"""Links that break between ranks that both live: a new generation of the same ranks."""

from itertools import pairwise

import pytest

from gossipgrad.comm import Membership
from support.watches import pass_seconds

ALL = (0, 1, 2, 3)


def generations(watches):
    return [watch.latest.generation for watch in watches]


def test_both_ends_see_their_link_break_and_one_generation_follows(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    all_watches[0].gone(2, left=False)
    all_watches[2].gone(0, left=False)
    pass_seconds(clock, all_watches, 40)
    assert [watch.latest for watch in all_watches] == [Membership(generation=1, living=ALL)] * 4


def test_a_link_that_breaks_again_and_again_makes_ever_fewer_generations(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    taken = []
    for second in range(200):
        known = all_watches[0].latest.generation
        if known == 0 or all_watches[0]._suspects == set():
            all_watches[0].gone(2, left=False)
        pass_seconds(clock, all_watches, 1)
        if all_watches[0].latest.generation > known:
            taken.append(second)
    pauses = [later - sooner for sooner, later in pairwise(taken)]
    assert len(taken) == 4
    assert all(pause >= 10 * 2**n for n, pause in enumerate(pauses, 1))


def test_a_rank_that_leaves_is_linked_to_no_more(watches, clock):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    all_watches[0].gone(2, left=True)
    pass_seconds(clock, all_watches, 20)
    assert generations(all_watches) == [0] * 4


@pytest.mark.parametrize("dies", [2, 3])
def test_a_death_comes_first_and_makes_the_links_anew_as_well(watches, clock, dies):
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    all_watches[0].gone(1, left=False)
    all_watches[0].gone(dies, left=False)
    living = [watch for rank, watch in enumerate(all_watches) if rank != dies]
    pass_seconds(clock, living, 40)
    newest = living[0].latest
    assert newest.living == tuple(rank for rank in ALL if rank != dies)
    assert newest.generation <= 2


def test_what_broke_before_the_newest_generation_asks_for_none_after_it(watches, clock):
    """All see a collective break, and some of them only behind the generation that follows."""
    all_watches = watches(4)
    pass_seconds(clock, all_watches, 3)
    all_watches[0].renew(0)
    pass_seconds(clock, all_watches, 3)
    assert generations(all_watches) == [1] * 4
    all_watches[1].renew(0)
    pass_seconds(clock, all_watches, 60)
    assert generations(all_watches) == [1] * 4
    all_watches[1].renew(1)
    pass_seconds(clock, all_watches, 60)
    assert generations(all_watches) == [2] * 4
