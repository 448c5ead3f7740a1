"""Ctrl-C at any place of a round, caught as in a notebook: what one end counts, the other does."""

import threading

import pytest
import torch

from gossipgrad.engine import Bucket, _flow
from gossipgrad.engine._transfer import Transfer
from support.replicas import network, plain_sgd
from support.sessions import run_sessions

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


def part_ways(model, rank):
    other = network(seed=10 + rank, dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)


def opposite_gradients(model, rank, step):
    """Updates that move no mean, as ranks are even in number, and keep replicas apart."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, (step + 1) * (-1) ** rank)


def doubles(rank=0):
    return network(dtype=torch.float64)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("mode", "world_size"), [("sync", 2), ("overlap", 4)])
def test_an_interrupt_moves_no_mean(alarm, place, mode, world_size):
    armed, rang = alarm(place), []

    def use(me):
        part_ways(me.model, me.rank)
        before = me.weights()
        for step in range(STEPS):
            if me.rank == 0 and step in (2, 5, 6):
                armed.append(step)
            try:
                me.train()
            except KeyboardInterrupt:
                rang.append(step)
        me.session.consensus_distance()  # rank 0 may have had fewer rounds
        me.group.barrier()
        return before, me

    ended = run_sessions(
        world_size,
        use,
        make=doubles,
        optimizer=plain_sgd,
        gradients=opposite_gradients,
        mode=mode,
        topology="hypercube",
        bucket_bytes=64,
        heartbeats=None,
    )
    assert rang
    assert all(me.outcomes["delivered"] > 0 for _, me in ended)
    assert sum(me.weights() - before for before, me in ended).abs().max() < 1e-12
