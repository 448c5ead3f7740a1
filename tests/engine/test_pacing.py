"""What is sent leaves one round after the other."""

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from gossipgrad.comm import Header

# Private: no public door says when a message leaves.
from gossipgrad.engine import _pacing
from gossipgrad.engine._pacing import RoundBefore
from support.sessions import run_sessions


class Ticket:
    """Of a message that leaves when `leave` is called."""

    def __init__(self):
        self._left = threading.Event()
        self.leave = self._left.set

    @property
    def done(self):
        return self._left.is_set()

    def wait(self, timeout_seconds):
        return self._left.wait(timeout_seconds)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass in waits for tickets alone."""
    now = SimpleNamespace(seconds=0.0, perf_counter=lambda: now.seconds)

    def wait(ticket, timeout_seconds):
        now.seconds += timeout_seconds
        return False

    monkeypatch.setattr(Ticket, "wait", wait)
    monkeypatch.setattr(_pacing, "time", now)
    return now


@pytest.fixture
def patient(monkeypatch):
    """However busy the machine, what holds a round up is over before its patience is."""
    monkeypatch.setattr(_pacing, "_PATIENCE_SECONDS", 30.0)


def test_a_partner_that_takes_nothing_holds_up_the_next_round_once(clock):
    before = RoundBefore([Ticket()])
    buckets = [before.then(None) for _ in range(3)]
    buckets[0]()
    waited = clock.seconds
    assert 0 < waited < 30
    for ready in buckets[1:]:
        ready()
    assert clock.seconds == waited, "all of a round share one wait"


def test_who_was_held_up_asks_for_some_rounds_and_nobody_else_does(clock):
    asked, before = [], RoundBefore()
    before.end(0.0)
    assert before.then(None, asked.append) is None
    before.end(0.02)
    for _ in range(40):
        ready = before.then(None, asked.append)
        if ready is not None:
            ready()
        before = RoundBefore(before=before)
        before.end(0.0)
    assert 4 < len(asked) < 40


class SlowTransport:
    """Its messages take a while to leave, and no two do so at once."""

    def __init__(self, inner):
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner = inner
        self.sent = []

    def send(self, peer, header, payload=None):
        sent = self._inner.send(peer, header, payload)
        if payload is None:
            return sent
        assert all(ticket.done for ticket in self.sent), "two rounds leave at once"
        self.sent.append(Ticket())
        threading.Timer(0.05, self.sent[-1].leave).start()
        return self.sent[-1]

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.usefixtures("patient")
def test_a_round_leaves_after_the_one_before():
    links = []

    def wrap(inner):
        links.append(SlowTransport(inner))
        return links[-1]

    def use(me):
        me.train(6)
        assert me.outcomes["delivered"] >= 5

    run_sessions(3, use, wrap=wrap)
    assert [len(link.sent) for link in links] == [7, 7, 7]


class SharedLink:
    """A part is on its way for a while; notes with which others it meets at its receiver."""

    counting = threading.Lock()

    def __init__(self, inner, arriving, meetings):
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner, self._arriving, self._meetings = inner, arriving, meetings

    def send(self, peer, header, payload=None):
        if payload is None:
            return self._inner.send(peer, header)
        ticket, round = Ticket(), Header.unpack(header).round
        with self.counting:
            self._meetings[round] += self._arriving[peer]
            self._arriving[peer] += 1

        def arrive():
            with self.counting:
                self._arriving[peer] -= 1
            self._inner.send(peer, header, payload)
            ticket.leave()

        threading.Timer(0.03, arrive).start()
        return ticket

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("asks", [True, False])
def test_rounds_of_ranks_out_of_step_do_not_meet_at_a_receiver(asks, monkeypatch):
    if not asks:
        monkeypatch.setattr(RoundBefore, "end", lambda self, waited: None)
    arriving, meetings = Counter(), Counter()

    def use(me):
        me.session._rounds._sent.end(1.0)  # each has been held up, and asks from now on
        for step in range(12):
            time.sleep(0.02 * ((me.rank + step) % 3))
            me.train()

    wrap = lambda inner: SharedLink(inner, arriving, meetings)  # noqa: E731
    run_sessions(4, use, wrap=wrap, topology="hypercube", leaves_together=False)
    later = sum(count for round, count in meetings.items() if round > 2)
    assert later == 0 if asks else later > 0
