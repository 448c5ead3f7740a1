"""What is sent leaves one round after the other."""

import threading
import time

import gossipgrad as gg
from gossipgrad.comm import Hub
from gossipgrad.decentralized import _in_turn
from gossipgrad.decentralized._in_turn import RoundBefore
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd


class Ticket:
    def __init__(self, done=False):
        self.done = done


def test_nothing_to_wait_for():
    filled = print
    assert RoundBefore().then(None) is None
    assert RoundBefore([Ticket(done=True)]).then(filled) is filled


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


def test_a_partner_that_takes_nothing_holds_up_the_next_for_a_while_only(monkeypatch):
    monkeypatch.setattr(_in_turn, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds))
    slept = []
    before = RoundBefore([Ticket()])
    buckets = [before.then(None) for _ in range(3)]
    start = time.perf_counter()
    buckets[0]()
    assert 0.1 <= time.perf_counter() - start < 2.0
    slept.clear()
    for ready in buckets[1:]:
        ready()
    assert not slept, "all of a round share one wait"


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
        return len(transport.sent)

    assert run_ranks(3, main) == [7, 7, 7]
