"""How exchanges end, whatever transport moves them."""

import pytest
import torch

from gossipgrad.comm import Liveness, Outcome
from support.links import both, post
from support.waiting import HANG_SECONDS, until

D, V, X = Outcome.DELIVERED, Outcome.VOID, Outcome.DEAD_PEER


def part(value, size=4):
    return torch.full((size,), float(value))


@pytest.mark.parametrize("they_met", [True, False])
def test_a_peer_that_vanished_is_dead_and_disturbs_no_other_link(channels, they_met):
    size = 1 << 18
    a, b, c = channels(3, sizes=(4, size), window=4)
    if they_met:
        both(a, b)
    mine = post(a, 1, round=2, bucket=1, size=size)
    b.transport.close()
    both(a, c, round=4)
    assert a.take(mine, HANG_SECONDS) is X
    assert a.gone == {1: "was lost"}
    until(lambda: mine.ticket.done)


def test_directed_and_one_sided_rounds(channels):
    ends = channels(3)
    mine = [
        c.post(0, 0, part(r), send_to=(r - 1) % 3, recv_from=(r + 1) % 3)
        for r, c in enumerate(ends)
    ]
    for r, channel in enumerate(ends):
        assert channel.take(mine[r], HANG_SECONDS) is D
        assert mine[r].received.tolist() == [float((r + 1) % 3)] * 4
    a, b, c = ends
    gives = a.post(1, 0, part(6), send_to=1, recv_from=None)
    assert (gives.outcome, gives.received) == (D, None)
    takes = b.post(1, 0, part(0), send_to=None, recv_from=0)
    assert b.take(takes, HANG_SECONDS) is D
    b.transport.close()  # a rank still gives when its source is dead
    assert a.take(a.post(2, 0, part(1), send_to=2, recv_from=1), HANG_SECONDS) is X
    takes = c.post(2, 0, part(0), send_to=None, recv_from=0)
    assert c.take(takes, HANG_SECONDS) is D
    assert takes.received.tolist() == [1.0] * 4


class Watching(Liveness):
    """What a channel hears of others, and who they are said to have expelled."""

    def __init__(self):
        super().__init__()
        self.ranks, self.heard, self.member = set(), [], True

    def report_generation(self, generation):
        self.heard.append(generation)

    def expelled(self):
        return self.ranks

    def is_member(self):
        return self.member


def test_a_rank_that_may_not_send_voids_its_round_and_nobody_waits_for_it(channels):
    liveness = Watching()
    a, b = channels(liveness=liveness)
    theirs = post(b, 0)
    liveness.member = False
    assert post(a, 1).outcome is V
    assert b.take(theirs, HANG_SECONDS) is V
    liveness.member = True
    both(a, b, round=1)


def test_a_round_of_an_older_generation_is_void_on_both_ends(channels):
    liveness = Watching()
    a, b = channels(liveness=liveness)
    mine = post(a, 1, round=3)
    b.enter(1, 3, [0, 1])
    assert a.take(mine, HANG_SECONDS) is V
    assert liveness.heard == [1]
    assert post(b, 0, round=3).outcome is V, "a lives in generation 0 still: nobody waits for it"
    assert post(a, 1, round=4).outcome is V


@pytest.mark.parametrize("kind", ["in-process"])
def test_wrong_arguments_are_refused(channels):
    a, _ = channels()
    for payload in (part(0, 5), part(0).double()):
        with pytest.raises(ValueError, match="bucket 0 is planned as 4 x"):
            a.post(0, 0, payload, send_to=1, recv_from=1)


def test_a_round_of_which_one_bucket_was_cancelled_is_void_for_the_peer_in_the_others(channels):
    """As of gradients that came too late, and weights that are void for it."""
    a, b = channels(sizes=(4, 4), window=4)
    gradients = post(a, 1, round=3, bucket=0)
    a.cancel(gradients)
    a.void(3, 1)
    theirs = post(b, 0, round=3, bucket=1)
    assert b.take(theirs, HANG_SECONDS) is V
    both(a, b, round=4)
