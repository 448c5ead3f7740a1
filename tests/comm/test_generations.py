"""Exchanges while the membership changes: those of unlike generations are void on both ends."""

import pytest
import torch

from gossipgrad.comm import Outcome
from support.waiting import until

D, L, V, X = Outcome.DELIVERED, Outcome.LATE, Outcome.VOID, Outcome.DEAD_PEER


def post(channel, peer, round=0, value=0.0):
    payload = torch.full((4,), float(value))
    return channel.post(round, 0, payload, send_to=peer, recv_from=peer)


def test_a_round_of_an_older_generation_is_void_on_both_ends(channels):
    a, b = channels()
    mine = post(a, 1, round=3)
    b.enter(1, 3, [0, 1])
    assert a.take(mine, 30.0) is V
    until(lambda: b.poll() or b.bytes_received)
    theirs = post(b, 0, round=3)
    assert theirs.outcome is V, "a lives in generation 0 still: nobody waits for it"
    assert post(a, 1, round=4).outcome is V


def test_what_both_sent_in_the_same_generation_counts_however_late(channels):
    a, b = channels()
    mine, theirs = post(a, 1, value=1), post(b, 0, value=2)
    a.enter(1, 1, [0, 1])
    b.enter(1, 1, [0, 1])
    assert (a.take(mine, 30.0), b.take(theirs, 30.0)) == (D, D)
    assert mine.received.tolist() == [2.0] * 4


def test_rounds_before_a_peer_came_in_are_void(channels):
    a, b = channels()
    a.enter(1, 5, [0, 1])
    b.enter(1, 6, [0, 1])
    until(lambda: a.poll() or b.poll() or min(a._ledgers[1].latest, b._ledgers[0].latest) > 0)
    first, second = post(a, 1, round=5), post(a, 1, round=6, value=4)
    assert first.outcome is V, "b came in with round 6"
    theirs = post(b, 0, round=6, value=5)
    assert (a.take(second, 30.0), b.take(theirs, 30.0)) == (D, D)
    assert theirs.received.tolist() == [4.0] * 4
    assert b.early_bytes == 0


def test_the_living_go_on_with_each_other_when_two_die(channels):
    ends = channels(4)
    a, b = ends[0], ends[2]
    dead = post(a, 1)
    late = post(b, 3)
    for end in (a, b):
        end._news = Expelled({1, 3})
        end.poll()
        end.enter(1, 1, [0, 2])
    assert (dead.outcome, late.outcome) == (X, X)
    until(lambda: a.poll() or b.poll() or min(a._ledgers[2].latest, b._ledgers[0].latest) > 0)
    mine, theirs = post(a, 2, round=1), post(b, 0, round=1)
    assert (a.take(mine, 30.0), b.take(theirs, 30.0)) == (D, D)


class Expelled:
    def __init__(self, ranks):
        self.ranks, self.heard = ranks, []

    def ahead(self, generation):
        self.heard.append(generation)

    def gone(self, peer, *, left):
        pass

    def is_member(self):
        return True

    def expelled(self):
        return self.ranks


def test_a_later_generation_is_told(channels):
    a, b = channels()
    a._news = Expelled(set())
    b.enter(3, 0, [0, 1])
    until(lambda: a.poll() or a._news.heard)
    assert a._news.heard == [3]


@pytest.mark.parametrize("kind", ["in-process"])
def test_who_was_given_up_drives_nobodys_rounds(channels):
    """It may train on, alone and fast, in a generation long past."""
    a, b = channels()
    a._news = Expelled(set())
    a.enter(1, 5, [0, 1])
    b.post(5000, 0, torch.zeros(4), send_to=0, recv_from=None)
    until(lambda: a.poll() or a._ledgers[1].latest == 5000)
    assert a.heard == -1
    b.enter(1, 7, [0, 1])
    until(lambda: a.poll() or a.heard == 7)
    a._news.ranks = {1}
    until(lambda: a.poll() or a.gone)
    b.post(9000, 0, torch.zeros(4), send_to=0, recv_from=None)
    until(lambda: a.poll() or a.refused)
    assert a.heard == 7


@pytest.mark.parametrize("generation", [1, 2**31])
def test_generations_travel_with_rounds(channels, generation):
    a, b = channels()
    for end in (a, b):
        end.enter(generation, 7, [0, 1])
    until(lambda: a.poll() or b.poll() or min(a._ledgers[1].latest, b._ledgers[0].latest) > 0)
    mine, theirs = post(a, 1, round=7, value=1), post(b, 0, round=7, value=2)
    assert (a.take(mine, 30.0), b.take(theirs, 30.0)) == (D, D)
    assert (mine.round, theirs.received.tolist()) == (7, [1.0] * 4)
