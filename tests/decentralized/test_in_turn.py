"""What is sent leaves one round after the other."""

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

import gossipgrad as gg
from gossipgrad.comm import Header, Hub, Kind
from gossipgrad.decentralized import _in_turn
from gossipgrad.decentralized._in_turn import RoundBefore
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd


class Ticket:
    def __init__(self, done=False):
        self.done = done


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass in sleep alone, for what is tested here alone."""
    now = SimpleNamespace(seconds=0.0, slept=[], perf_counter=lambda: now.seconds)

    def sleep(seconds):
        now.seconds += seconds
        now.slept.append(seconds)

    now.sleep = sleep
    monkeypatch.setattr(_in_turn, "time", now)
    return now


@pytest.fixture
def patient(monkeypatch):
    """However busy the machine, what holds a round up is over before its patience is."""
    monkeypatch.setattr(_in_turn, "_PATIENCE_SECONDS", 30.0)


def test_nothing_to_wait_for():
    filled = print
    assert RoundBefore().then(None) is None
    assert RoundBefore([Ticket(done=True)]).then(filled) is filled


@pytest.mark.usefixtures("patient")
def test_waits_for_what_was_sent_before_and_for_its_own_buffer():
    first, events = Ticket(), []
    ready = RoundBefore([first, Ticket(done=True)]).then(lambda: events.append("filled"))
    assert ready is not None

    def leave():
        time.sleep(0.05)
        events.append("left")
        first.done = True

    thread = threading.Thread(target=leave)
    thread.start()
    ready()
    thread.join()
    assert events == ["left", "filled"]


def test_a_partner_that_takes_nothing_holds_up_the_next_for_a_while_only(clock):
    before = RoundBefore([Ticket()])
    buckets = [before.then(None) for _ in range(3)]
    buckets[0]()
    assert clock.seconds == pytest.approx(2.0, abs=0.01)
    clock.slept.clear()
    for ready in buckets[1:]:
        ready()
    assert not clock.slept, "all of a round share one wait"


class Turn:
    """Counts the asking."""

    def __init__(self):
        self.asked = []

    def __call__(self, seconds):
        self.asked.append(seconds)


@pytest.mark.usefixtures("clock")
def test_who_was_held_up_asks_for_some_rounds_and_nobody_else_does():
    turn, before = Turn(), RoundBefore()
    before.over(0.0)
    assert before.then(None, turn) is None
    before.over(0.02)
    asked = 0
    for _ in range(40):
        before = RoundBefore(before=before)
        before.over(0.0)
        ready = before.then(None, turn)
        if ready is None:
            break
        ready()
        asked += 1
    assert asked == 15
    assert turn.asked == [2.0] * 15
    assert before.then(None, None) is None


def test_patience_grows_with_what_a_round_takes_up_to_half_a_minute(clock):
    for took, patience in [(0.5, 2.0), (5.0, 10.0), (500.0, 30.0)]:
        turn, before = Turn(), RoundBefore()
        clock.seconds += took
        before.over(1.0)
        before.then(None, turn)()
        assert turn.asked == [pytest.approx(patience)]


class SlowTransport:
    """Its messages leave when `depart` is called, and it says in which order they were given."""

    def __init__(self, inner):
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner = inner
        self.sent = []

    def send(self, peer, header, payload=None):
        self._inner.send(peer, header, payload)
        ticket = Ticket(done=payload is None)
        if payload is not None:
            self.sent.append(ticket)
            threading.Timer(0.05, setattr, (ticket, "done", True)).start()
            self.overlaps = [t for t in self.sent[:-1] if not t.done]
            assert not self.overlaps, "two rounds leave at once"
        return ticket

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.usefixtures("patient")
def test_a_round_leaves_after_the_one_before():
    hub = Hub(3)

    def main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        transport = SlowTransport(hub.transport(rank))
        with gg.gossip(
            model, optimizer, process_group=group, transport=lambda _: transport
        ) as session:
            for step in range(6):
                set_gradients(model, rank, step)
                optimizer.step()
            assert session.stats().outcomes["delivered"] >= 5
            group.barrier()  # whoever has left is sent nothing
        return len(transport.sent)

    assert run_ranks(3, main) == [7, 7, 7]


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
            ticket.done = True

        threading.Timer(0.03, arrive).start()
        return ticket

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_only_ranks_that_listen_while_they_compute_ask(mode):
    hub, asked = Hub(3), []

    class Told(SlowTransport):
        def send(self, peer, header, payload=None):
            asked.append(Header.unpack(header).kind is Kind.ASK)
            return self._inner.send(peer, header, payload)

    def main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        link = Told(hub.transport(rank))
        with gg.gossip(model, optimizer, mode=mode, process_group=group, transport=lambda _: link):
            for step in range(8):
                time.sleep(0.03 * (rank == 0))  # the others wait for it
                set_gradients(model, rank, step)
                optimizer.step()

    run_ranks(3, main)
    assert any(asked) == (mode == "overlap")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("asks", [True, False])
def test_rounds_of_ranks_out_of_step_do_not_meet_at_a_receiver(asks, monkeypatch):
    if not asks:
        monkeypatch.setattr(RoundBefore, "over", lambda self, waited: None)
    hub, arriving, meetings = Hub(4), Counter(), Counter()

    def main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        link = SharedLink(hub.transport(rank), arriving, meetings)
        with gg.gossip(
            model, optimizer, topology="hypercube", process_group=group, transport=lambda _: link
        ) as session:
            session._rounds._sent.over(1.0)  # each has been held up, and asks from now on
            for step in range(12):
                time.sleep(0.02 * ((rank + step) % 3))
                set_gradients(model, rank, step)
                optimizer.step()

    run_ranks(4, main)
    later = sum(count for round, count in meetings.items() if round > 2)
    assert later == 0 if asks else later > 0
