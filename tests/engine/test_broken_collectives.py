"""Collectives that break on one rank only: the others are told, and no two unlike ones meet."""

import contextlib

import pytest

import gossipgrad as gg
from gossipgrad.engine import Bucket
from support.deaths import QUICK
from support.ranks import run_ranks
from support.replicas import backward, flat, network, sgd, transport_by_name
from support.waiting import until


def is_of(bucket, session):
    return any(bucket is each for flow in session.flows for each in flow.buckets)


def run_sessions(world_size, use, **settings):
    link = transport_by_name("in-process", world_size)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, topology="matching", **settings
        ) as session:
            result = use(rank, session, model)
            for step in range(3):
                backward(model, rank, step)
                optimizer.step()
            group.close()  # nobody waits for one that is broken
            return result

    return run_ranks(world_size, rank_main)


@pytest.mark.parametrize("place", ["consensus", "average_", "broadcast_"])
def test_who_is_interrupted_between_two_steps_of_a_collective_breaks_it_for_all(monkeypatch, place):
    interrupted = []
    total = Bucket.total

    def use(rank, session, model):
        before = flat(model)
        call = getattr(session, place)
        if rank == 0:
            interrupted.append(session)
            with pytest.raises(KeyboardInterrupt):
                call().__enter__() if place == "consensus" else call()
        else:
            with pytest.raises(gg.GossipError, match="did not come about"):
                call().__enter__() if place == "consensus" else call()
        assert flat(model).equal(before)
        with pytest.raises(gg.GossipError, match="collectives are over"):
            session.consensus_distance()
        return True

    def total_of(bucket):
        if interrupted and is_of(bucket, interrupted[0]):
            raise KeyboardInterrupt
        return total(bucket)

    if place != "broadcast_":
        monkeypatch.setattr(Bucket, "total", total_of)
    else:
        make = gg.GossipSession._make_flows

        def make_of(session):
            if session in interrupted:
                raise KeyboardInterrupt
            return make(session)

        monkeypatch.setattr(gg.GossipSession, "_make_flows", make_of)
    assert run_sessions(2, use, heartbeats=None) == [True, True]


def test_collectives_that_are_not_the_same_are_told_apart_and_the_next_one_works():
    """One of them broke on rank 0 alone, which is at the next one already."""

    def use(rank, session, model):
        if rank == 0:
            session._averaging._number += 1
            return session.consensus_distance()
        with pytest.raises(gg.GossipError, match=rf"rank 0 .* and rank {rank} at 1"):
            session.consensus_distance()
        return session.consensus_distance()

    distances = run_sessions(3, use)
    assert distances == [distances[0]] * 3


def test_collectives_work_again_after_one_broke_though_all_live(monkeypatch):
    """A generation of the same ranks follows, in which none has broken."""
    broken = []
    total = Bucket.total

    def total_of(bucket):
        if broken and is_of(bucket, broken[0]):
            broken.clear()
            raise MemoryError
        return total(bucket)

    monkeypatch.setattr(Bucket, "total", total_of)

    def use(rank, session, model):
        if rank == 0:
            broken.append(session)
        with pytest.raises(MemoryError if rank == 0 else gg.GossipError):
            session.consensus_distance()
        had = []

        def try_again():
            with contextlib.suppress(gg.GossipError):
                had.append(session.consensus_distance())
            return had

        until(try_again, 60.0)
        return had, session.membership.living

    found = run_sessions(3, use, heartbeats=QUICK)
    assert found[0][1] == (0, 1, 2)
    assert found == [found[0]] * 3


def test_ranks_that_agree_wait_for_one_that_does_its_last_collective_again():
    """And take nothing of that for what they have come for."""

    def use(rank, session, model):
        if rank == 0:
            for _ in range(2):
                with pytest.raises(gg.GossipError, match="different collectives"):
                    session.consensus().__enter__()
        return session.agree({"step": rank})

    assert run_sessions(2, use) == [[{"step": 0}, {"step": 1}]] * 2


def test_ranks_that_never_agree_are_told():
    def use(rank, session, model):
        for _ in range(4 if rank == 0 else 1):
            with pytest.raises(gg.GossipError, match="different collectives"):
                session.consensus().__enter__() if rank == 0 else session.agree(1)
        with pytest.raises(TypeError, match="not JSON serializable"):
            session.agree(model)

    run_sessions(2, use)
