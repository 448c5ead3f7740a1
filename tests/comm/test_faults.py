"""Faults that happen by script to what a rank sends."""

import time

import pytest

from gossipgrad.comm import Faults, Outcome, ScriptedDeathError
from support.links import both, post
from support.waiting import HANG_SECONDS, until

D, V, X = Outcome.DELIVERED, Outcome.VOID, Outcome.DEAD_PEER


def test_what_is_dropped_never_arrives_and_the_link_goes_on(channels):
    a, b = channels(faults=Faults().drop(rank=1, round=0))
    lost, sent = post(a, 1, 0), post(b, 0, 0)
    assert (b.take(sent, HANG_SECONDS), a.take(lost, HANG_SECONDS)) == (D, V)
    assert both(a, b, 1, value=4) == [4.0] * 4


def test_what_is_delayed_arrives_later_in_order_and_the_sender_goes_on(channels, leave):
    a, b = channels(faults=Faults().delay(rank=1, round=0, seconds=0.5), window=3)
    start = time.perf_counter()
    theirs = [post(b, 0, round, value=round) for round in range(3)]
    mine = [post(a, 1, round) for round in range(3)]
    assert [b.take(x, HANG_SECONDS) for x in theirs] == [D, D, D]
    leave(b)  # which waits for what is delayed
    assert [a.take(x, HANG_SECONDS) for x in mine] == [D, D, D]
    assert time.perf_counter() - start >= 0.5
    assert [x.received[0].item() for x in mine] == [0.0, 1.0, 2.0]
    until(lambda: a.poll() or a.gone == {1: "left"})


def test_a_killed_rank_dies_without_a_word(channels):
    a, b = channels(faults=Faults().kill(rank=1, round=1))
    both(a, b)
    mine = post(a, 1, 1)
    with pytest.raises(ScriptedDeathError, match="rank 1 was killed by script in round 1"):
        post(b, 0, 1)
    assert a.take(mine, HANG_SECONDS) is X
    assert a.gone == {1: "was lost"}
    b.poll(0.0)
    b.close()


def test_a_script_in_words():
    faults = Faults.parse(
        "delay rank=1 rounds=20-22 seconds=0.05;  drop rank=2 round=7\nkill rank=3  round=9;"
    )
    assert faults == Faults(
        drops={(2, 7)}, delays={(1, 20): 0.05, (1, 21): 0.05, (1, 22): 0.05}, kills={3: 9}
    )
    assert faults.ranks == {1, 2, 3}
    assert Faults.parse("") == Faults()


@pytest.mark.parametrize(
    "script",
    [
        "delay rank=1 round=2",
        "delay rank=1 round=2 seconds=-1",
        "drop rank=1 round=2 seconds=1",
        "slow rank=1 round=2",
        "drop rank=a round=2",
        "drop rank=0 rounds=9-3",
        "drop rank=0 rounds=0-1000000",
    ],
)
def test_what_is_no_fault_is_refused(script):
    with pytest.raises(ValueError, match=r"is no fault; write `delay|must count upwards"):
        Faults.parse(f"drop rank=0 round=1; {script}")
