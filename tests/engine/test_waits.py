"""How long a step waits for a partner: one that is ready is awaited, a silent one is not."""

import threading

import pytest
import torch

import gossipgrad as gg
from support.replicas import flat
from support.sessions import run_sessions
from support.waiting import HANG_SECONDS, until

IMPATIENT = gg.Overlap(patience_seconds=0.05)


def doubles():
    return torch.nn.Linear(3, 2, dtype=torch.float64)


@pytest.mark.parametrize("then", ["steps", "average", "close"])
def test_what_is_late_is_mixed_when_it_comes(then):
    """Rank 1 sleeps, and rank 0 trains on; no sum is lost by it."""
    is_late = threading.Event()

    def use(me):
        before = me.weights()
        me.train(3)
        if me.rank == 0:
            me.train_until(lambda: me.outcomes["late"])
            is_late.set()
        else:
            assert is_late.wait(HANG_SECONDS)
        if then == "steps":
            me.train(3)
            me.session.consensus_distance()
        if then == "average":
            me.session.average_()
        ended.append((me, before))

    ended = []
    run_sessions(
        2,
        use,
        make=lambda rank: doubles(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        mode=IMPATIENT,
    )
    moved = sum(flat(me.model) - before for me, before in ended)
    for me, _ in ended:
        alone = doubles()
        for step in range(me.steps):
            me._gradients(alone, me.rank, step)
            moved += 0.1 * torch.cat([p.grad.flatten() for p in alone.parameters()])
    assert moved.abs().max() < 1e-12
    if then == "average":
        assert torch.equal(*(flat(me.model) for me, _ in ended))


@pytest.mark.parametrize("world_size", [2, 6])
def test_a_sleeping_rank_stops_nobody_and_meets_the_others_where_they_are(world_size):
    """The others are not late for it; it wakes many rounds behind, and exchanges soon."""
    enough, awake = threading.Event(), threading.Event()

    def use(me):
        me.train(4)
        if me.rank:
            me.train_until(lambda: me.steps > 60)
            if me.rank == 1:
                enough.set()
            me.train_until(awake.is_set)
            return None
        assert enough.wait(HANG_SECONDS)
        delivered, behind = me.outcomes["delivered"], me.session.round_number
        me.train_until(lambda: me.outcomes["delivered"] >= delivered + 20)
        caught_up = me.session.round_number - behind, me.steps
        awake.set()
        return caught_up

    rounds, steps = run_sessions(world_size, use, mode=IMPATIENT)[0]
    assert rounds > steps, "it has jumped over rounds that the others had made"


def test_with_endless_patience_all_make_the_same_rounds():
    asleep = threading.Event()

    def use(me):
        me.train(3)
        if me.rank == 0:
            until(asleep.is_set)
        else:
            threading.Timer(0.3, asleep.set).start()
        me.train(10)
        return me.outcomes, me.session.round_number

    for outcomes, rounds in run_sessions(4, use, mode=gg.Overlap(patience_seconds=float("inf"))):
        assert rounds == 13
        assert outcomes["delivered"] == sum(outcomes.values())


class Holding:
    """A transport that delivers, but keeps the memory of what it has sent until the end."""

    def __init__(self, inner, ended):
        self._inner, self._ended = inner, ended

    def send(self, peer, header, payload=None, ticket=None):
        self._inner.send(peer, header, payload)
        if ticket is not None:
            threading.Thread(target=self._release, args=[ticket], daemon=True).start()

    def _release(self, ticket):
        self._ended.wait()
        ticket.done = True

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_partner_that_takes_nothing_holds_up_no_round_for_good():
    ended = threading.Event()

    def use(me):
        me.train(2)
        me.session.wait()
        me.group.barrier()
        ended.set()
        return me.outcomes

    for outcomes in run_sessions(
        2,
        use,
        wrap=lambda link: Holding(link, ended),
        mode="sync",
        bucket_bytes=40,
        heartbeats=None,
    ):
        assert outcomes["delivered"] == sum(outcomes.values()) > 2
