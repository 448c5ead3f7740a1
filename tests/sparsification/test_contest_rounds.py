"""Which plan has which round of a contest, and which one wins."""

import pytest
import torch

from gossipgrad.sparsification._contest import Contest
from support.sparse import blocks


def held(times, *, gain=0.05, lossy=(), ranks=1, pause=lambda at, rank: (0.0, 0.0)):
    """A contest to its end, and the plan of each round; `times(plan, round, rank)` are periods.

    The rest of a step takes a second; a pause makes a round longer, and its period.
    """
    plans = sum(times(plan, 0, 0) is not None for plan in range(9))
    contests = [Contest(plans, gain=gain, lossy=lossy) for _ in range(ranks)]
    ran = []
    while contests[0].winner is None:
        plan, at = contests[0].running, len(ran)
        assert {contest.running for contest in contests} == {plan}
        ran.append(plan)
        due = []
        for rank, contest in enumerate(contests):
            period = times(plan, at, rank)
            in_round, in_period = pause(at, rank)
            due.append(contest.round_over(period - 1 + in_round, period + in_period))
        assert len({*due}) == 1
        if due[0]:
            told = [contest.told() for contest in contests]
            for contest in contests:
                contest.agree(told)
    assert len({contest.winner for contest in contests}) == 1
    return contests[0], ran


def of(*seconds):
    """The same in each round."""
    return lambda plan, at, rank: seconds[plan] if plan < len(seconds) else None


def test_two_that_are_close_go_there_and_back_and_the_faster_wins():
    contest, ran = held(of(2.0, 1.8))
    assert blocks(ran) == [(0, 3), (1, 5), (0, 5), (1, 5), (0, 3)]
    assert len(ran) == Contest.most_rounds(2) == 21
    assert contest.winner == contest.running == 1
    assert contest.seconds == [2.0, 1.8]


def test_the_first_is_left_for_enough_of_a_gain_alone():
    assert held(of(2.0, 1.92))[0].winner == 0
    assert held(of(2.0, 1.92), gain=0.03)[0].winner == 1
    assert held(of(2.0, 1.1), gain=0.5)[0].winner == 0
    assert held(of(2.0, 0.9 + 1e-9, 1.5), gain=0.5)[0].winner == 1


def test_what_loses_something_has_to_beat_what_does_not():
    assert held(of(2.0, 2.05), lossy={0})[0].winner == 1
    assert held(of(2.0, 2.2), lossy={0})[0].winner == 0
    assert held(of(2.0, 1.92), gain=0.03, lossy={1})[0].winner == 1
    assert held(of(2.0, 1.8, 1.85), lossy={0, 1})[0].winner == 2
    assert held(of(2.0, 1.8, 1.85), lossy={0, 2})[0].winner == 1
    contest, ran = held(of(2.0, 1.7, 1.71, 1.75), lossy={0, 1, 2})
    assert {*ran[-7:]} == {0, 1, 3}
    assert contest.winner == 3


def test_of_three_the_close_ones_go_on():
    contest, ran = held(of(2.0, 1.9, 1.0))
    assert blocks(ran) == [(0, 3), (1, 3), (2, 5), (1, 3), (0, 3)]
    assert contest.winner == 2
    contest, ran = held(of(2.0, 1.8, 1.9))
    there_and_back = [(1, 3), (2, 5), (1, 3)]
    assert blocks(ran) == [(0, 3), *there_and_back, (0, 5), *there_and_back, (0, 3)]
    assert contest.winner == 1
    assert len(ran) == Contest.most_rounds(3) == 33
    contest, ran = held(of(2.0, 1.9, 1.8, 1.7, 1.6))
    assert blocks(ran)[-5:] == [(0, 5), (3, 3), (4, 5), (3, 3), (0, 3)]
    assert contest.winner == 4
    assert len(ran) == Contest.most_rounds(5) == 45
    contest, ran = held(of(2.0, 1.8, 2.4))
    assert blocks(ran) == [(0, 3), (1, 3), (2, 5), (1, 3), (0, 5), (1, 5), (0, 3)]


def test_a_rival_that_is_far_slower_has_one_round():
    contest, ran = held(of(2.0, 3.1, 1.8))
    assert blocks(ran) == [(0, 3), (1, 1), (2, 5), (0, 5), (2, 5), (0, 3)]
    assert contest.winner == 2
    assert contest.seconds == [2.0, pytest.approx(3.1), 1.8]
    contest, ran = held(of(2.0, 9.0, 9.0))
    assert blocks(ran) == [(0, 3), (1, 1), (2, 1)]
    assert contest.winner == 0


def test_what_rivals_cost_is_bounded():
    """However slow they are after a first round that tells nothing: five rounds."""
    contest, ran = held(lambda plan, at, rank: of(2.0, 2.0 if at == 3 else 99.0)(plan, at, rank))
    assert blocks(ran) == [(0, 3), (1, 5), (0, 3)]
    assert contest.winner == 0


@pytest.mark.parametrize("paused", range(21))
def test_a_pause_decides_nothing(paused):
    """On all ranks, as for an evaluation, or on one, for which the other waits in the round."""

    def of_all(at, rank):
        return (0.0, 99.0) if at == paused else (0.0, 0.0)

    def of_one(at, rank):
        return (0.0 if rank else 99.0, 99.0) if at == paused else (0.0, 0.0)

    for pause in (of_all, of_one):
        contest, ran = held(of(2.0, 1.8), ranks=2, pause=pause)
        assert contest.winner == 1
        assert len(ran) == 21


def test_what_becomes_slower_all_the_time_is_nobody_s_fault():
    def times(plan, at, rank):
        seconds = of(2.0, 2.0)(plan, at, rank)
        return seconds and seconds * 1.015**at

    contest, ran = held(times)
    assert len(ran) == 21
    assert contest.seconds[1] == pytest.approx(contest.seconds[0], rel=0.02)


def test_ranks_that_measure_other_times_come_to_the_same():
    generator = torch.Generator().manual_seed(1)

    def times(plan, at, rank):
        seconds = of(2.0, 1.8, 1.9)(plan, at, rank)
        return seconds and seconds * (1 + 0.4 * float(torch.rand((), generator=generator)))

    for _ in range(20):
        held(times, ranks=3)
