"""How long a step waits for a partner: slow links are awaited, silent ones are not."""

import threading

import pytest
import torch

import gossipgrad as gg
from gossipgrad import topology
from gossipgrad.comm import Faults, FaultyTransport

# Private: through a session, a wait of known length would take as long.
from gossipgrad.engine._waits import Deadlines
from support.sessions import run_sessions
from support.waiting import HANG_SECONDS


def test_a_few_stragglers_do_not_move_it_and_a_lasting_change_does():
    deadlines = Deadlines(floor_seconds=0.01, ceiling_seconds=9.0, deviations=4.0)
    for number in range(40):
        deadlines.note(1, 8.0 if number % 10 == 9 else 0.1)
    assert deadlines.of(1) == pytest.approx(0.1)
    assert deadlines.of(2) == pytest.approx(0.1)  # another link, of which nothing is known
    assert Deadlines(floor_seconds=0.01, ceiling_seconds=9.0, deviations=4.0).of(2) == 9.0
    for _ in range(40):
        deadlines.note(1, 2.0)
    assert deadlines.of(1) == pytest.approx(2.0)


def test_stuck_partners_do_not_stop_the_others(monkeypatch):
    """Two of six ranks are alive and silent; each link waits for its own, nobody for all."""
    monkeypatch.setattr(
        Deadlines, "of", lambda self, peer: 0.02 if peer in (4, 5) else HANG_SECONDS
    )
    faults, pairs = Faults(), topology.matching(6)
    for number in range(200):
        faults.drop(rank=4, round=number).drop(rank=5, round=number)

    def use(me):
        me.train(20 if me.rank < 4 else 0)
        return me.outcomes["delivered"]

    wrap = lambda link: FaultyTransport(link, faults)  # noqa: E731
    delivered = run_sessions(6, use, topology=pairs, wrap=wrap)
    for rank in range(4):
        met = [pairs.peers(number, rank).send_to for number in range(20)]
        assert delivered[rank] >= 0.6 * sum(partner < 4 for partner in met)


@pytest.mark.parametrize("then", ["steps", "average", "close"])
def test_what_is_late_is_mixed_when_it_comes(then):
    """Rank 1's parts come 0.5 s late, which no step waits for; no sum is lost by it."""
    faults, is_late = Faults(), threading.Event()
    for round in range(2, 100 if then == "steps" else 3):
        faults.delay(rank=1, round=round, seconds=0.5)

    def use(me):
        before = me.weights()
        me.train(3)
        if then == "steps":
            me.train_until(lambda: is_late.is_set() or (me.rank == 0 and me.outcomes["late"]))
            is_late.set()
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
        wrap=lambda link: FaultyTransport(link, faults),
        topology="matching",
        mode=gg.Overlap(deadline_seconds=0.02),
    )
    moved = sum(me.weights() - before for me, before in ended)
    for me, _ in ended:
        alone = doubles()
        for step in range(me.steps):
            me._gradients(alone, me.rank, step)
            moved += 0.1 * torch.cat([p.grad.flatten() for p in alone.parameters()])
    assert moved.abs().max() < 1e-12
    if then == "average":
        assert torch.equal(*(me.weights() for me, _ in ended))


def doubles():
    return torch.nn.Linear(3, 2, dtype=torch.float64)


class LeavesLater:
    """The ticket of a message that has left when an event is set."""

    def __init__(self, left):
        self._left, self.wait = left, left.wait

    @property
    def done(self):
        return self._left.is_set()


class Holding:
    """A transport that delivers, but keeps the memory of what it has sent until the end."""

    def __init__(self, inner, ended):
        self._inner, self._ended = inner, ended

    def send(self, peer, header, payload=None):
        self._inner.send(peer, header, payload)
        return LeavesLater(self._ended)

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
