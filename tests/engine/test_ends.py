"""Ranks that stop early, leave, fail, or are forgotten: the others go on, and nothing is left."""

import contextlib
import gc
import weakref

import pytest
import torch

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import backward, network, sgd, transport_by_name
from support.sessions import run_sessions
from support.waiting import NEVER_SECONDS, until


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        ("in-process", {}),
        ("in-process", {"mode": "sync"}),
        ("tcp", {"average_every": 2}),
    ],
)
def test_unequal_step_counts_end_without_a_hang(transport, settings):
    """Ranks 0 and 2 take three steps more; all come to a consensus, train on, and leave."""

    def use(me):
        me.train(6 if me.rank % 2 else 9)
        seen = me.mean()
        me.train(4 if me.rank % 2 else 7)
        return seen, me.outcomes

    results = run_sessions(4, use, transport=transport, leaves_together=False, **settings)
    for seen, outcomes in results:
        assert torch.equal(seen, results[0][0])
        assert outcomes["late"] == 0, "nobody has waited in vain"


def test_break_and_exception_end_without_a_hang():
    done = {}

    def use(me):
        done[me.rank] = me
        me.train({1: 4, 2: 6}.get(me.rank, 12))
        if me.rank == 2:
            raise ZeroDivisionError

    def leave(me):
        with contextlib.suppress(ZeroDivisionError), me.session:
            use(me)

    run_sessions(4, leave, transport="tcp", heartbeats=None, leaves_together=False)
    assert [done[rank].steps for rank in range(4)] == [12, 4, 6, 12]
    outcomes = done[0].outcomes
    assert outcomes["dead_peer"] + outcomes["void"] > 0


@pytest.mark.parametrize("payload", ["weights", "gradients+weights"])
def test_a_session_nobody_closed_says_leave_when_it_is_collected(payload):
    """And leaves no hook behind."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=link,
            payload=payload,
            # Its links end before it says that it leaves; nobody is to take it for dead so soon.
            heartbeats=gg.Heartbeats(lease_seconds=NEVER_SECONDS, silent_seconds=NEVER_SECONDS),
        )
        if rank == 0:
            alive = weakref.ref(session)
            del session, optimizer
            # A collection that another thread has under way makes this one do nothing.
            until(lambda: gc.collect() >= 0 and alive() is None)
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            return None

        def is_alone():
            backward(model, rank, 0)
            optimizer.step()
            return 0 not in session.membership.living

        until(is_alone)
        membership = session.membership
        session.close()
        return membership

    membership = run_ranks(2, rank_main)[1]
    assert membership.living == (1,)
    assert membership.gone[0].left
