"""A part that asks before it is sent does not come upon those of rounds before."""

import threading
import time

import pytest
import torch

from gossipgrad.comm import Channel, Hub, Outcome, Part, _grants
from gossipgrad.comm._wire import Header, Kind
from support.waiting import until

RUN = b"0123456789abcdef"
LONG = 30.0


class Wire:
    """A transport that notes which messages leave."""

    def __init__(self, inner):
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner = inner
        self.said = []

    def send(self, peer, header, payload=None):
        read = Header.unpack(header)
        self.said.append((read.kind, peer, read.round))
        return self._inner.send(peer, header, payload)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def ranks():
    """Channels of three ranks in one process, and their wires; three rounds may be open a link."""
    hub = Hub(3)
    wires = [Wire(hub.transport(rank)) for rank in range(3)]
    plan = [Part(torch.float32, 2)]
    channels = [Channel(wire, run=RUN, plan=plan, credits=3) for wire in wires]
    yield channels, wires
    for channel in channels:
        channel.close(0.0)


def post(channel, peer, round, *, asks=False):
    turn = channel.turn(round, peer)
    ready = (lambda: turn(LONG)) if asks else None
    values = torch.full((2,), float(channel.rank))
    return channel.post(round, 0, values, send_to=peer, recv_from=peer, ready=ready)


def came(channel, exchange):
    until(lambda: channel.take(exchange, 0.0) is Outcome.DELIVERED)


def test_it_waits_until_what_the_receiver_awaits_has_come(ranks):
    (a, b, c), (wire, _, answers) = ranks
    awaited = post(c, 1, round=0)
    exchange = post(a, 2, round=1, asks=True)
    until(lambda: c.poll() or c._grants._asked)
    assert wire.said == [(Kind.ASK, 2, 1)]
    assert (Kind.GO, 0, 1) not in answers.said
    post(b, 2, round=0)
    came(c, awaited)
    assert answers.said[-1] == (Kind.GO, 0, 1)
    until(lambda: a.poll() or (Kind.DATA, 2, 1) in wire.said)
    came(c, post(c, 0, round=1))
    came(a, exchange)


def test_who_awaits_nothing_grants_its_next_round_at_once_and_none_after_it(ranks):
    (a, b, c), (wire, other, _) = ranks
    post(a, 2, round=0, asks=True)
    post(b, 2, round=1, asks=True)
    until(lambda: c.poll() or a.poll() or (Kind.DATA, 2, 0) in wire.said)
    until(lambda: c.poll() or c._grants._asked)
    assert other.said == [(Kind.ASK, 2, 1)]
    came(c, post(c, 0, round=0))
    c.poll()
    until(lambda: b.poll() or (Kind.DATA, 2, 1) in other.said)


def test_who_has_come_to_the_round_grants_it_whatever_it_still_awaits(ranks):
    (a, _, c), (wire, _, _) = ranks
    post(c, 1, round=0)  # whose part does not come
    post(a, 2, round=1, asks=True)
    until(lambda: c.poll() or c._grants._asked)
    post(c, 0, round=1)
    until(lambda: a.poll() or (Kind.DATA, 2, 1) in wire.said)


@pytest.mark.parametrize(
    "end",
    ["leaves", "voids", "sends", "closes", "enters", "goes on", "gives up", "fences", "meets"],
)
def test_it_ends_when_there_is_nothing_to_wait_for_any_more(ranks, end, monkeypatch):
    if end != "closes":  # it is woken, and does not find out by looking again
        monkeypatch.setattr(_grants, "_LOOK_SECONDS", LONG)
    (a, _, c), _ = ranks
    post(c, 1, round=0)
    post(a, 2, round=1, asks=True)
    until(lambda: c.poll() or c._grants._asked)
    start = time.perf_counter()
    match end:
        case "leaves":
            c.close(0.0)
        case "voids":
            c.void(1, 0)
        case "sends":
            c.transport.send(0, c._header(Kind.DATA, round=1).pack(), torch.zeros(8).byte())
        case "closes":
            a.close(LONG)
        case "enters":
            a.enter(1, 2, {0, 1, 2})
        case "goes on":
            post(a, 1, round=2)
        case "gives up":
            a.void(2, 1)
        case "fences":  # here: what is told of it stands behind the part
            a.fence()
        case "meets":  # and there, where this round is no more
            c.fence()
    until(lambda: a.closed or a.poll() or a._outbox.empty)
    assert time.perf_counter() - start < LONG / 2


def test_a_part_for_one_that_has_come_to_a_collective_does_not_wait(ranks):
    (a, _, c), (wire, _, _) = ranks
    post(c, 1, round=0)
    c.fence()
    until(lambda: a.poll() or a._ledgers[2].era)
    a.turn(1, 2)(LONG)  # nothing is awaited of it in return
    assert wire.said == []


def test_what_is_not_granted_is_sent_after_so_many_seconds(ranks):
    (a, _, c), (wire, _, _) = ranks
    post(c, 1, round=0)
    turn = a.turn(1, 2)
    start = time.perf_counter()
    turn(0.05)
    assert 0.05 <= time.perf_counter() - start < LONG / 2
    turn(0.0)
    turn(-1.0)
    assert wire.said == [(Kind.ASK, 2, 1)]


def test_what_was_asked_in_another_generation_is_granted_when_both_live_in_it(ranks):
    (a, b, c), (_, _, answers) = ranks
    a.enter(1, 5, {0, 1, 2})
    threads = [threading.Thread(target=a.turn(5, 2), args=(LONG,))]
    threads[0].start()
    until(lambda: c.poll() or c._grants._asked)
    post(c, 1, round=4)
    assert (Kind.GO, 0, 5) not in answers.said
    c.enter(1, 5, {0, 1, 2})
    post(c, 0, round=5)
    until(lambda: a.poll() or not threads[0].is_alive())
    threads[0].join()
    b._say(Kind.ASK, 2, 3)  # of a generation that is over
    until(lambda: c.poll() or c.heard >= 3)
    c.poll()
    assert not c._grants._asked
    assert [kind for kind, peer, _ in answers.said if peer == 1 and kind is Kind.GO] == []
