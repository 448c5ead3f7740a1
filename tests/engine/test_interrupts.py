"""Ctrl-C at any place of a round, caught as in a notebook: what one end counts, the other does."""

import contextlib
import threading

import pytest
import torch

import gossipgrad as gg
from gossipgrad.engine import Bucket, _flow
from gossipgrad.engine._listener import Listener
from gossipgrad.engine._transfer import Transfer
from support.ranks import run_ranks
from support.replicas import flat, network, transport_by_name
from support.stale import Scripted

PLACES = {
    "nothing is sent": (Transfer, "post_all", False),
    "all is sent": (Transfer, "post_all", True),
    "one bucket is sent": (Transfer, "post", True),
    "the delta is to be taken": (Transfer, "delta", False),
    "the delta is taken in place": (_flow, "delta_of", True),
    "the delta is mixed": (Bucket, "add", True),
}
STEPS = 9


@pytest.fixture
def alarm(monkeypatch):
    """Sets an interrupt to go off once, before or after the next call, in a thread that trains."""
    armed = []

    def patch(place):
        owner, name, after = PLACES[place]
        if owner is _flow:  # or the listener has taken all deltas before
            monkeypatch.setattr(Listener, "expect", lambda self, transfers: None)
        usual = getattr(owner, name)

        def patched(*args, **options):
            rings = bool(armed) and threading.current_thread().name in ("rank 0", "MainThread")
            if rings:
                armed.clear()
                if not after:
                    raise KeyboardInterrupt
            result = usual(*args, **options)
            if rings:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner, name, patched)
        return armed

    return patch


def part_ways(session, model, rank):
    other = network(seed=10 + rank, dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    session.accept_changes()


def opposite_gradients(model, rank, step):
    """Updates that move no mean, as ranks are even in number, and keep replicas apart."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, (step + 1) * (-1) ** rank)


def no_gradients(model, rank, step):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def doubles():
    return network(dtype=torch.float64)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("mode", "world_size"), [("sync", 2), ("overlap", 2), ("overlap", 4)])
def test_an_interrupt_moves_no_mean(alarm, place, mode, world_size):
    armed = alarm(place)
    link = transport_by_name("in-process", world_size)
    rang = []

    def rank_main(rank, group):
        model = doubles()
        optimizer = plain(model.parameters())
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=link,
            mode=mode,
            topology="hypercube",
            bucket_bytes=64,
            heartbeats=None,
        ) as session:
            part_ways(session, model, rank)
            before = flat(model)
            for step in range(STEPS):
                opposite_gradients(model, rank, step)
                if rank == 0 and step in (2, 5, 6):
                    armed.append(step)
                try:
                    optimizer.step()
                except KeyboardInterrupt:
                    rang.append(step)
            session.consensus_distance()  # rank 0 may have had fewer rounds
            group.barrier()
        return before, flat(model), session.stats().outcomes["delivered"]

    ended = run_ranks(world_size, rank_main)
    assert rang
    assert all(delivered > 0 for *_, delivered in ended)
    moved = sum(after - before for before, after, _ in ended)
    assert moved.abs().max() < 1e-12


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_mode_stale_moves_no_mean_and_holds_no_snapshot(alarm, place):
    ranks = Scripted(2, make=doubles, optimizer=plain, mode="stale", bucket_bytes=64)
    for rank, session in enumerate(ranks.sessions):
        part_ways(session, ranks.models[rank], rank)
    before = sum(flat(model) for model in ranks.models)
    armed = alarm(place)
    rang = 0
    for step in range(STEPS):
        ranks.step(1, no_gradients)
        ranks.deliver(1, 0)
        if step in (2, 5, 6):
            armed.append(step)
        try:
            ranks.step(0, no_gradients)
        except KeyboardInterrupt:
            rang += 1
        armed.clear()
        ranks.deliver(0, 1)
    ranks.drain()
    moved = sum(flat(model) for model in ranks.models) - before
    used = [len(flow.pool._used) for s in ranks.sessions for flow in s.flows]
    in_flight = [len(session._rounds.in_flight) for session in ranks.sessions]
    ranks.close()
    assert rang
    assert moved.abs().max() < 1e-12
    assert used == in_flight


def test_an_interrupt_as_a_round_of_mode_stale_is_taken_on_breaks_no_later_step():
    ranks = Scripted(2, mode="stale")
    rounds = ranks.sessions[0]._rounds
    take_on = rounds._take_on

    def interrupted(transfers, **how):
        take_on(transfers, **how)
        raise KeyboardInterrupt

    rounds._take_on = interrupted
    with contextlib.suppress(KeyboardInterrupt):
        ranks.step(0)
    rounds._take_on = take_on
    for _ in range(3):
        ranks.step(0)
        ranks.step(1)
    ranks.drain()
    ranks.close()
