"""Mode stale: what is kept, bounded and stable, whatever is late; what it refuses."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossipgrad as gg
from support.replicas import flat, network, plain_sgd
from support.sessions import no_gradients, run_sessions
from support.stale import Scripted
from support.waiting import HANG_SECONDS

RATE = 0.1


def doubles():
    return network(dtype=torch.float64)


def one_number():
    return torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)


def spread(ranks):
    """Root mean square over ranks of the distance to the mean."""
    weights = torch.stack([flat(model) for model in ranks.models])
    return (weights - weights.mean(0)).square().sum(1).mean().sqrt().item()


def leave(ranks, rank):
    """An exception ends a rank, with exchanges open that its partners are not ready for."""
    under_way, rounds = ranks.wires.under_way, ranks.sessions[rank]._rounds
    while any(queue for link, queue in under_way.items() if rank in link):
        for peer, session in enumerate(ranks.sessions):
            ranks.deliver(peer, rank)
            ranks.deliver(rank, peer)
            session._rounds.channel.poll()
        rounds.channel.poll()
    rounds.drain(0.0)
    ranks.sessions[rank].__exit__(RuntimeError, None, None)
    for peer, session in enumerate(ranks.sessions):
        ranks.deliver(rank, peer)
        session._rounds.channel.poll()


@pytest.mark.parametrize("leaves", [False, True])
@settings(max_examples=3)
@given(st.data())
def test_the_mean_is_kept_and_memory_bounded_whatever_arrives_when(leaves, data):
    """Ranks step as often as they like, links carry on or stall; then all that is sent arrives.

    One of them may leave on the way.
    """
    world_size = data.draw(st.integers(2, 6), "ranks")
    d = data.draw(st.integers(0, 4), "max_staleness")
    who = st.integers(0, world_size - 1)
    ranks = Scripted(
        world_size,
        optimizer=plain_sgd,
        make=doubles,
        mode=gg.Stale(max_staleness=d),
        bucket_bytes=data.draw(st.sampled_from([100, 1 << 20]), "bucket_bytes"),
    )
    leaver = data.draw(who, "leaver") if leaves else None
    leaves_at = data.draw(st.integers(10, 50), "leaves_at")
    moved = world_size * flat(ranks.models[0])
    payload = moved.nbytes
    try:
        for action in range(60):
            if leaves and action == leaves_at:
                leave(ranks, leaver)
                who = who.filter(lambda rank: rank != leaver)
            if data.draw(st.booleans()):
                rank = data.draw(who)
                ranks.step(rank)
                moved -= RATE * torch.cat(
                    [p.grad.flatten() for p in ranks.models[rank].parameters()]
                )
            else:
                sender, receiver = data.draw(who), data.draw(who)
                ranks.wires.deliver(sender, receiver, data.draw(st.integers(1, 4)))
            for session in ranks.sessions if action % 4 == 0 else ():
                stats = session.stats()
                held = sum(flow.pool.size_bytes for flow in session.flows)
                assert held <= stats.snapshot_limit_bytes == (d + 1) * payload
                assert stats.refused_messages == 0
        ranks.drain()
        total = sum(flat(model) for model in ranks.models)
        assert (total - moved).abs().max() < 1e-12
    finally:
        ranks.close()


@pytest.mark.parametrize(("world_size", "d"), [(2, 2), (2, 4), (4, 3)])
def test_the_weight_is_stable_where_one_half_diverges(world_size, d, monkeypatch):
    found = []
    for weight in (None, 0.5):
        if weight is not None:
            monkeypatch.setattr(gg.Stale, "weight", weight)
        ranks = Scripted(
            world_size,
            optimizer=plain_sgd,
            make=one_number,
            topology="hypercube",
            mode=gg.Stale(max_staleness=d),
        )
        try:
            ranks.late_by(d, 4)
            before = spread(ranks)
            ranks.late_by(d, 60, no_gradients)
            assert ranks.sessions[0].stats().void_rounds == 0
            found.append(spread(ranks) / before)
        finally:
            ranks.close()
    stable, constant = found
    assert stable < 0.05
    assert constant > 5


def test_a_rank_that_stalls_holds_nobody_up():
    """The others come to the end of the run while it stands still; it takes no step of those."""
    stalls, over = threading.Event(), threading.Barrier(4)

    def use(me):
        while me.session.position < 20:
            me.train()
        at = me.session.position
        if me.rank == 2:
            stalls.set()
            over.wait(HANG_SECONDS)
        assert stalls.wait(HANG_SECONDS)
        while me.session.position < 60:
            me.train()
        if me.rank != 2:
            over.wait(HANG_SECONDS)
        return at, me.steps, me.session.stats(), me.mean()

    found = run_sessions(4, use, mode="stale", transport="tcp")
    assert all(torch.equal(seen, found[0][-1]) for *_, seen in found)
    at, steps, stats, _ = found[2]
    assert at < 25
    assert steps < 30
    assert stats.void_rounds >= 30  # those it slept through


def test_a_rank_at_half_speed_takes_half_the_steps_and_ends_with_the_others():
    ranks = Scripted(4, mode="stale")
    try:
        for step in range(60):
            for rank in range(4) if step % 2 else (0, 2, 3):
                ranks.step(rank)
            ranks.wires.deliver_all()
        assert ranks.steps == [60, 30, 60, 60]
        positions = [session.position for session in ranks.sessions]
        assert max(positions) - min(positions) <= 1
        assert ranks.sessions[1].stats().outcomes["delivered"] > 10  # its samples count
    finally:
        ranks.close()


def test_collectives_count_what_is_in_flight():
    """Ranks come after unequal steps; all see one mean, go on, and end equal."""

    def use(me):
        me.train(5 + 4 * me.rank)
        seen, position = me.mean(), me.session.position
        assert me.session.consensus_distance() > 0
        me.session.average_()
        assert me.session.position >= position
        averaged = me.weights()
        me.train(3)
        me.session.broadcast_()
        restarted = me.weights()
        me.train(4 - me.rank)
        return seen, averaged, restarted

    results = run_sessions(
        3,
        use,
        transport="tcp",
        mode=gg.Stale(max_staleness=3),
        payload=gg.WeightsAndState(every=2),
        wire_dtype=torch.bfloat16,
        every=2,
        leaves_together=False,
    )
    for found in zip(*results, strict=True):
        assert all(torch.equal(each, found[0]) for each in found)
    seen, averaged, _ = results[0]
    torch.testing.assert_close(seen, averaged, rtol=1e-5, atol=1e-6)
