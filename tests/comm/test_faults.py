import threading
import time
from types import SimpleNamespace

import pytest
import torch

from gossipgrad.comm import Faults, Outcome, ScriptedDeathError, _faults
from support.waiting import until
from support.watches import Clock

D, L, V, X = Outcome.DELIVERED, Outcome.LATE, Outcome.VOID, Outcome.DEAD_PEER


def post(channel, peer, round, value=0.0):
    payload = torch.full((4,), float(value))
    return channel.post(round, 0, payload, send_to=peer, recv_from=peer)


def test_what_is_dropped_never_arrives_and_the_link_goes_on(channels):
    a, b = channels(faults=Faults().drop(rank=1, round=0))
    lost, given = post(a, 1, 0), post(b, 0, 0)
    assert b.take(given, 30.0) is D
    assert a.take(lost, 0.1) is L
    again = post(b, 0, 1, value=4)
    assert a.take(lost, 30.0) is V
    mine = post(a, 1, 1)
    assert (a.take(mine, 30.0), b.take(again, 30.0)) == (D, D)
    assert mine.received.tolist() == [4.0] * 4


def test_what_is_delayed_arrives_later_in_order_and_the_sender_goes_on(channels, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_faults, "time", SimpleNamespace(monotonic=clock))
    a, b = channels(faults=Faults().delay(rank=1, round=0, seconds=1000.0), credits=2)
    theirs = post(b, 0, 0, value=1), post(b, 0, 1, value=2)
    mine = post(a, 1, 0), post(a, 1, 1)
    for _ in range(2):
        assert [a.take(x, 0.05) for x in mine] == [L, L]
        assert not theirs[0].ticket.done
        with b.transport._changed:
            clock.seconds += 500.0
            b.transport._changed.notify_all()
    assert [a.take(x, 30.0) for x in mine] == [D, D]
    assert [x.received[0].item() for x in mine] == [1.0, 2.0]
    assert [b.take(x, 30.0) for x in theirs] == [D, D]
    until(lambda: theirs[0].ticket.done)


def test_close_waits_for_what_is_delayed(channels, leave):
    a, b = channels(faults=Faults().delay(rank=1, round=0, seconds=0.3))
    mine = post(a, 1, 0)
    theirs = post(b, 0, 0, value=3)
    assert b.take(theirs, 30.0) is D
    leave(b)
    assert a.take(mine, 30.0) is D
    assert mine.received.tolist() == [3.0] * 4
    until(lambda: a.poll() or a.gone == {1: "left"})


def test_a_death_while_a_part_waits_to_be_sent_ends_the_wait_for_the_partners(channels):
    _, b = channels(faults=Faults().kill(rank=1, round=0))
    go = threading.Event()
    payload = torch.zeros(4)
    mine = b.post(0, 0, payload, send_to=0, recv_from=0, ready=lambda: go.wait(60) and None)
    assert b.take(mine, 0.05) is L
    go.set()
    start = time.perf_counter()
    with pytest.raises(ScriptedDeathError, match="rank 1 was killed by script in round 0"):
        b.take(mine, 60.0)
    assert time.perf_counter() - start < 30
    b.close()


def test_a_killed_rank_dies_without_a_word(channels):
    a, b = channels(faults=Faults().kill(rank=1, round=2))
    for round in (0, 1):
        pair = post(a, 1, round), post(b, 0, round)
        assert (a.take(pair[0], 30.0), b.take(pair[1], 30.0)) == (D, D)
    mine = post(a, 1, 2)
    with pytest.raises(ScriptedDeathError, match="rank 1 was killed by script in round 2"):
        post(b, 0, 2)
    assert a.take(mine, 30.0) is X
    assert a.gone == {1: "was lost"}
    assert post(a, 1, 3).outcome is X
    b.poll(0.0)
    b.close()


def test_a_delay_is_not_negative():
    with pytest.raises(ValueError, match=r"seconds must not be negative, got -1\.0"):
        Faults().delay(rank=0, round=0, seconds=-1.0)


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
        "kill rank=1 rounds=2-3",
        "slow rank=1 round=2",
        "drop rank=a round=2",
    ],
)
def test_what_is_no_fault_is_quoted_beside_what_is(script):
    with pytest.raises(ValueError, match=r"is no fault; write `delay rank=1 rounds=20-29") as found:
        Faults.parse(f"drop rank=0 round=1; {script}")
    assert str(found.value).startswith(repr(script))


@pytest.mark.parametrize("rounds", ["9-3", "0-1000000"])
def test_rounds_of_a_script_count_upwards_and_are_bounded(rounds):
    with pytest.raises(ValueError, match=f"rounds={rounds} must count upwards, and 1,000,000"):
        Faults.parse(f"drop rank=0 rounds={rounds}")


def test_a_rank_of_a_script_dies_once():
    with pytest.raises(
        ValueError, match=r"'kill rank=1 round=7' .* rank 1 is killed in round 3 already; leave"
    ):
        Faults.parse("kill rank=1 round=3; kill rank=2 round=7; kill rank=1 round=7")
