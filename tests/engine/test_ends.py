"""Ranks that stop early, fail, hang, are killed or interrupted: the others go on."""

import gc
import threading
import time
import weakref

import pytest
import torch

import gossipgrad as gg
from gossipgrad import topology
from gossipgrad.comm import Faults, FaultyTransport, Hub, ScriptedDeathError
from gossipgrad.engine._waits import Deadlines
from support.dams import Dam
from support.ranks import run_ranks
from support.replicas import (
    backward,
    flat,
    network,
    set_gradients,
    sgd,
    transport_by_name,
)
from support.waiting import until


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("transport", ["in-process", "zeromq"])
@pytest.mark.parametrize("average_every", [None, 2])
def test_unequal_step_counts_end_without_a_hang(mode, transport, average_every):
    """Ranks 0 and 2 take three steps more; all come to a consensus, train on, and leave."""
    link = transport_by_name(transport, 4)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        longest = 0.0
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            mode=mode,
            transport=link,
            average_every=average_every,
        ) as session:
            for step in range(6 if rank % 2 else 9):
                start = time.perf_counter()
                backward(model, rank, step)
                optimizer.step()
                longest = max(longest, time.perf_counter() - start)
            with session.consensus():
                seen = flat(model)
            for step in range(4 if rank % 2 else 7):
                backward(model, rank, 100 + step)
                optimizer.step()
        return seen, longest

    results = run_ranks(4, rank_main)
    for seen, longest in results:
        assert torch.equal(seen, results[0][0])
        assert longest < 10


@pytest.mark.parametrize("transport", ["in-process", "zeromq"])
def test_break_and_exception_end_without_a_hang(transport):
    link = transport_by_name(transport, 4)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        steps = 0
        try:
            with gg.gossip(
                model, optimizer, process_group=group, transport=link, heartbeats=None
            ) as session:
                for step in range(12):
                    if rank == 1 and step == 4:
                        break
                    if rank == 2 and step == 6:
                        raise ZeroDivisionError
                    backward(model, rank, step)
                    optimizer.step()
                    steps += 1
                stats = session.stats()
        except ZeroDivisionError:
            return steps, None
        return steps, stats

    results = run_ranks(4, rank_main)
    assert [steps for steps, _ in results] == [12, 4, 6, 12]
    outcomes = results[0][1].outcomes
    assert outcomes["dead_peer"] + outcomes["void"] > 0
    assert torch.isfinite(torch.tensor(results[0][1].exposed_seconds))


def test_consensus_names_who_has_left():
    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(model, optimizer, process_group=group, transport=link, heartbeats=None)
        before = flat(model)
        if rank == 1:
            session.close()
            return
        with (
            pytest.raises(gg.GossipError, match=r"has died|died, left"),
            session.consensus(),
        ):
            pass
        assert torch.equal(flat(model), before)
        backward(model, rank, 0)
        optimizer.step()  # training goes on
        session.close()

    link = transport_by_name("in-process", 3)
    run_ranks(3, rank_main)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_consensus_that_fails_holds_up_no_round(mode):
    """Those who are left mix on as before, though each had told the others to expect nothing."""

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=link,
            mode=mode,
            topology="matching",
            heartbeats=None,
        )
        if rank == 3:
            session.close()
            return
        with pytest.raises(gg.GossipError), session.consensus():
            pass
        together.wait(60)  # with one that is still in it nobody mixes
        for step in range(20):
            backward(model, rank, step)
            optimizer.step()
        assert session.stats().outcomes["delivered"] >= 5
        session.close()

    link, together = transport_by_name("in-process", 4), threading.Barrier(3)
    run_ranks(4, rank_main)


def test_different_collectives_are_named():
    def rank_main(rank, group):
        model = network()
        with gg.gossip(
            model, sgd(list(model.parameters())), process_group=group, transport=link
        ) as session:
            with pytest.raises(gg.GossipError, match="different collectives"):
                session.consensus_distance() if rank == 0 else session.average_()
            group.barrier()

    link = transport_by_name("in-process", 2)
    run_ranks(2, rank_main)


def test_a_killed_rank_does_not_stop_the_others():
    hub = Hub(4)
    faults = Faults().kill(rank=3, round=5)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        try:
            with gg.gossip(
                model,
                optimizer,
                process_group=group,
                topology="matching",
                transport=lambda g: FaultyTransport(hub.transport(g.rank), faults),
                heartbeats=None,  # or nobody may meet it, once that is known
            ) as session:
                for step in range(20):
                    backward(model, rank, step)
                    optimizer.step()
                return session.stats().outcomes["dead_peer"]
        except ScriptedDeathError:
            return "killed"

    outcomes = run_ranks(4, rank_main)
    assert outcomes[3] == "killed"
    assert all(count > 0 for count in outcomes[:3])


def test_stuck_partners_do_not_stop_the_others(monkeypatch):
    """Two of six ranks are alive and silent; each link waits for its own, nobody for all."""
    monkeypatch.setattr(Deadlines, "of", lambda self, peer: 0.02 if peer in (4, 5) else 60.0)
    hub = Hub(6)
    faults = Faults()
    for rank in (4, 5):
        for number in range(200):
            faults.drop(rank=rank, round=number)
    healthy = topology.matching(6)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            topology=healthy,
            transport=lambda g: FaultyTransport(hub.transport(g.rank), faults),
        ) as session:
            if rank < 4:
                for step in range(40):
                    set_gradients(model, rank, step)
                    optimizer.step()
            outcomes = session.stats().outcomes
            group.barrier()
        return outcomes["delivered"]

    delivered = run_ranks(6, rank_main)
    for rank in range(4):
        met = [healthy.peers(number, rank).send_to for number in range(40)]
        assert delivered[rank] >= 0.6 * sum(partner < 4 for partner in met)


def test_a_late_partner_is_mixed_when_it_comes():
    """Past its deadline a step goes on; what came late is mixed after all, so the mean is kept."""
    hub = Hub(2)
    dam = Dam(hub.transport(0), round=2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            mode=gg.Overlap(deadline_seconds=0.2),
            transport=lambda g: hub.transport(1) if g.rank else dam,
        ) as session:
            for step in range(4):
                set_gradients(model, rank, step)
                optimizer.step()
            if rank == 1:
                dam.let_go()
            group.barrier()
            for step in range(4, 8):
                set_gradients(model, rank, step)
                optimizer.step()
            with session.consensus():
                mean = flat(model)
            group.barrier()
            return mean, session.stats().outcomes

    results = run_ranks(2, rank_main)
    assert results[1][1]["late"] >= 1
    plain = [network() for _ in range(2)]
    for rank, model in enumerate(plain):
        optimizer = sgd(list(model.parameters()))
        for step in range(8):
            set_gradients(model, rank, step)
            optimizer.step()
    mean = (flat(plain[0]) + flat(plain[1])) / 2
    torch.testing.assert_close(results[0][0], mean, rtol=1e-5, atol=1e-5)


def test_a_round_without_a_snapshot_is_void_on_both_ends():
    """Weights and state travel together: when one cannot, neither does, and the mean is kept."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            payload="weights+state",
            mode="sync",
            transport=link,
        ) as session:
            state = next(flow for flow in session.flows if flow.name == "state")
            for step in range(6):
                if rank == 0 and step == 3:
                    acquire, state.pool.acquire = state.pool.acquire, lambda *_: None
                set_gradients(model, rank, step)
                optimizer.step()
                if rank == 0 and step == 3:
                    state.pool.acquire = acquire
            total = group.all_reduce_(flat(model))
            return total, session.stats().outcomes

    results = run_ranks(2, rank_main)
    plain = torch.zeros_like(results[0][0])
    for rank in range(2):
        model = network()
        optimizer = sgd(list(model.parameters()))
        for step in range(6):
            set_gradients(model, rank, step)
            optimizer.step()
        plain += flat(model)
    assert results[0][1]["void"] == 1
    assert results[1][1]["void"] == 2  # its two buckets, of weights and of state
    torch.testing.assert_close(results[0][0], plain, rtol=1e-5, atol=1e-5)


def test_a_session_nobody_closed_says_leave_when_it_is_collected():
    hub = Hub(2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda g: hub.transport(g.rank),
            # Its links end before it says that it leaves; nobody is to take it for dead so soon.
            heartbeats=gg.Heartbeats(lease_seconds=20.0, silent_seconds=20.0),
        )
        if rank == 0:
            alive = weakref.ref(session)
            del session, optimizer
            # A collection that another thread has under way makes this one do nothing.
            until(lambda: gc.collect() >= 0 and alive() is None, 60.0)
            return None
        # Its word may end exchanges that wait, or come before any: then there is none with it.

        def is_alone():
            backward(model, rank, 0)
            optimizer.step()
            return 0 not in session.membership.living

        until(is_alone, 60.0)
        membership = session.membership
        session.close()
        return membership

    membership = run_ranks(2, rank_main)[1]
    assert membership.living == (1,)
    assert membership.gone[0].left


def test_what_is_late_is_awaited_by_an_average_and_a_close():
    """Rank 1's part of round 2 comes 0.5 s late, which no step waits for; no sum is lost by it."""
    faults = Faults().delay(rank=1, round=2, seconds=0.5)
    hub = Hub(2)

    def rank_main(rank, group, average):
        model = network(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before, moved = flat(model), 0.0
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: FaultyTransport(hub.transport(group.rank), faults),
            topology="matching",
            mode=gg.Overlap(deadline_seconds=0.02),
        ) as session:
            for step in range(3):
                set_gradients(model, rank, step)
                moved -= 0.1 * torch.cat([p.grad.flatten() for p in model.parameters()])
                optimizer.step()
            if average:
                session.average_()
        return flat(model), before + moved

    for average in (False, True):
        hub = Hub(2)
        ended = run_ranks(2, lambda rank, group, average=average: rank_main(rank, group, average))
        total, expected = (sum(each) for each in zip(*ended, strict=True))
        assert (total - expected).abs().max() < 1e-12
        if average:
            assert torch.equal(ended[0][0], ended[1][0])
