"""Collectives that break on one rank only: the others get an error, and no two unlike ones meet."""

import contextlib
import threading

import pytest

import gossipgrad as gg
from gossipgrad.engine import Bucket
from support.deaths import QUICK
from support.sessions import run_sessions
from support.waiting import HANG_SECONDS, until


def run(world_size, use, **settings):
    are_back = threading.Barrier(world_size)

    def then_train(me):
        result = use(me)
        before = me.outcomes["delivered"]
        are_back.wait(HANG_SECONDS)  # rounds with one that is still in the collective would be void
        me.train(20)
        assert me.outcomes["delivered"] - before >= 10, "what broke holds up no round"
        me.group.close()  # nobody waits for one that is broken
        return result

    settings = {
        "topology": "matching",
        "mode": gg.Overlap(patience_seconds=HANG_SECONDS),
        "leaves_together": False,
        **settings,
    }
    return run_sessions(world_size, then_train, **settings)


@pytest.fixture
def breaks(monkeypatch):
    """Has the next collective of a session, and no other's, fail in its middle."""
    broken, total = {}, Bucket.total

    def total_of(bucket, *out):
        for session, error in [*broken.items()]:
            if any(bucket is each for flow in session.flows for each in flow.buckets):
                del broken[session]
                raise error
        return total(bucket, *out)

    monkeypatch.setattr(Bucket, "total", total_of)
    return broken


@pytest.mark.parametrize("call", ["consensus", "average_"])
def test_who_is_interrupted_in_a_collective_breaks_it_for_all(breaks, call):
    def use(me):
        before = me.weights()
        if me.rank == 0:
            breaks[me.session] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt if me.rank == 0 else gg.GossipError):
            me.session.consensus().__enter__() if call == "consensus" else me.session.average_()
        assert me.weights().equal(before)
        with pytest.raises(gg.GossipError, match="collectives are over"):
            me.session.consensus_distance()

    run(2, use, heartbeats=None)


def test_collectives_work_again_after_one_broke_though_all_live(breaks):
    """A generation of the same ranks follows, in which none has broken."""

    def use(me):
        if me.rank == 0:
            breaks[me.session] = MemoryError()
        with pytest.raises(MemoryError if me.rank == 0 else gg.GossipError):
            me.session.consensus_distance()
        had = []

        def try_again():
            with contextlib.suppress(gg.GossipError):
                had.append(me.session.consensus_distance())
            return had

        until(try_again)
        return had, me.session.membership.living

    found = run(3, use, heartbeats=QUICK)
    assert found[0][1] == (0, 1, 2)
    assert found == [found[0]] * 3


def test_unlike_collectives_are_told_apart_and_the_next_one_works():
    def use(me):
        with pytest.raises(gg.GossipError, match="different collectives"):
            me.session.consensus_distance() if me.rank == 0 else me.session.average_()
        return me.session.consensus_distance()

    distances = run(3, use)
    assert distances == [distances[0]] * 3


def test_ranks_that_never_agree_get_an_error():
    def use(me):
        with pytest.raises(gg.GossipError, match="different collectives"):
            me.mean() if me.rank == 0 else me.session.agree(1)
        with pytest.raises(TypeError, match="not JSON serializable"):
            me.session.agree(me.model)

    run(2, use)
