"""The door of a listening socket: honest links get through it, whatever stands before it."""

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from gossipgrad.comm import Lost, ZeroMQTransport, _door, _tcp, _waiting, _zeromq
from gossipgrad.comm._credentials import Credentials
from gossipgrad.comm._interface import Interface
from gossipgrad.comm._introduction import Introduction
from gossipgrad.comm._secret import Secret
from gossipgrad.comm._waiting import most_waiting
from gossipgrad.comm._zeromq_listener import Listener
from support.hostile import command, dial, few_may_wait, greeting, is_open, port_of
from support.ranks import run_ranks
from support.relays import Relay
from support.waiting import until

SECRET = Secret(bytes(range(32)))
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2, and TCP_INFO")


@pytest.fixture
def ends():
    made = run_ranks(2, lambda rank, group: ZeroMQTransport(group))
    yield made
    for end in made:
        end.close()


@pytest.fixture
def relays():
    made = []

    def make(port, **options):
        made.append(Relay(port, **options))
        return made[-1]

    yield make
    for relay in made:
        relay.close()


def led_through(end, relay, peer=1):
    end._endpoints[peer] = f"tcp://127.0.0.1:{relay.port}"


def arrivals(end, count=1):
    """The headers of the next few messages; nothing else comes before them."""
    events = []
    until(lambda: events.extend(end.receive(0.02)) or len(events) >= count)
    return [event.header for event in events]


def handles_open():
    return len([*Path("/proc/self/fd").iterdir()]) if sys.platform == "linux" else 0


class Crowd:
    """Many honest links to one listener, through a relay."""

    def __init__(self, count, relays, *, delay_seconds, expected=1):
        self.context = zmq.Context()
        mine = Credentials(SECRET, 0, [0, 1])
        self.listener = Listener(
            self.context, mine, max_payload_bytes=1 << 10, expected=expected, whose="rank 0"
        )
        endpoint = self.listener.bind(Interface("127.0.0.1", one_host=True))
        self.relay = relays(int(endpoint.rpartition(":")[2]), delay_seconds=delay_seconds)
        self.links = []
        for rank in range(1, count + 1):
            theirs = Credentials(SECRET, rank, [0, rank])
            theirs._met[0] = Introduction(endpoint, mine._nonce, encrypt=False)
            link = self.context.socket(zmq.PUSH)
            link.setsockopt(zmq.RECONNECT_IVL, 50)
            seals = theirs.dress(link, 0)
            self.links.append((link, seals))

    def come(self):
        for number, (link, seals) in enumerate(self.links):
            link.connect(f"tcp://127.0.0.1:{self.relay.port}")
            link.send(seals.seal(str(number).encode(), 0))

    def close(self):
        for link, _ in self.links:
            link.close(linger=0)
        self.listener.close()
        self.context.term()


@pytest.mark.parametrize(("count", "expected"), [(40, 20), (16, 1)])
def test_links_that_are_made_at_once_all_come(monkeypatch, relays, count, expected):
    """As many may wait as members may come. If too few may, who gives way comes again."""
    few_may_wait(monkeypatch, 8)
    crowd = Crowd(count, relays, delay_seconds=0.02, expected=expected)
    try:
        crowd.relay.hold()  # until all have come: those of the first moment would be through
        crowd.come()
        fits = 2 * expected >= count
        until(lambda: crowd.relay.connections == count if fits else crowd.relay.connections > count)
        crowd.relay.go_on()
        heard = set()

        def all_are_here():
            heard.update(arrival.header for arrival in crowd.listener.receive())
            return len(heard) == count

        until(all_are_here)
        assert (crowd.relay.connections > count) == (not fits)
    finally:
        crowd.close()


@on_linux
def test_a_link_is_made_while_silent_connections_pour_in(monkeypatch, relays):
    """Those go first that come from where no member listens."""
    few_may_wait(monkeypatch, 16)
    crowd = Crowd(1, relays, delay_seconds=0.03)
    crowd.listener.door.expect("127.0.0.1")
    over, come = threading.Event(), [0]
    port = crowd.relay.to

    def pour():
        held = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 30.0, ("127.0.0.2", 0)))
                come[0] += 1
            if len(held) > 100:
                held.pop(0).close()
            time.sleep(0.0005)
        for connection in held:
            connection.close()

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        until(lambda: crowd.listener.door.refused > 20)
        crowd.relay.hold()
        crowd.come()
        until(lambda: crowd.relay.connections)
        before = come[0]
        until(lambda: come[0] - before > 16)  # else nobody would have to give way
        crowd.relay.go_on()
        heard = []
        until(lambda: heard.extend(crowd.listener.receive()) or heard)
        assert [arrival.header for arrival in heard] == [b"0"]
        assert crowd.relay.connections == 1
    finally:
        over.set()
        thread.join()
        crowd.close()


@pytest.mark.parametrize("said", [b"WELCOME", b"READY"])
def test_a_handshake_that_breaks_off_is_tried_again(ends, relays, said):
    """In the first case its word has been shown, and in the second it was let in."""
    relay = relays(port_of(ends[1]))
    relay.cut_at = said
    led_through(ends[0], relay)
    ends[0].send(1, b"hello")
    heard = []
    until(lambda: heard.extend(ends[1].receive(0.01)) or any(e.header == b"hello" for e in heard))
    assert ends[0].receive(0.0) == []
    assert relay.connections == 2


@pytest.mark.parametrize("polls", [True, False])
def test_a_link_that_broke_is_not_made_again_by_itself_and_is_no_attack(
    ends, relays, caplog, polls, monkeypatch
):
    """Who does not look shows its word once more; who looks gives its address up."""
    if polls:  # in time, also on a busy machine
        monkeypatch.setattr(_zeromq, "_RECONNECT_MILLISECONDS", 60_000)
    relay = relays(port_of(ends[1]))
    led_through(ends[0], relay)
    ends[0].send(1, b"hello")
    assert arrivals(ends[1]) == [b"hello"]
    until(lambda: ends[0].receive(0.0) or ends[0]._links[1].was_up)
    dialled = 0
    while not ends[1]._listener.door._speakers:  # a new connection makes the door look
        dial(port_of(ends[1])).close()
        dialled += 1
        until(lambda count=dialled: ends[1].refused_connections == count)
    before = ends[1].refused_connections
    relay.cut()
    if polls:
        until(lambda: ends[0].receive(0.01) == [Lost(1)])
        assert ends[0]._links[1].socket.closed
        assert relay.connections == 1
    else:
        until(lambda: relay.connections == 2 and ends[1]._listener.door._excused == 1)
    assert ends[1].refused_connections == before
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_who_shows_no_good_credentials_is_told_with_its_address_and_sent_away_soon(ends, caplog):
    name, word = b"1." + bytes(16).hex().encode(), bytes(32).hex().encode()
    hello = b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(word)]) + word
    for _ in range(2):
        with dial(port_of(ends[0])) as connection:
            connection.sendall(greeting(b"PLAIN") + command(hello))
            until(lambda: not is_open(connection))
    until(lambda: ends[0].refused_connections == 2)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("_door")]
    assert told == [
        "rank 0 let a connection from 127.0.0.1 not in, which showed no good credentials; further "
        "ones from there are counted alone"
    ]


def test_a_door_goes_on_behind_an_error_and_closes_soon(ends, monkeypatch, caplog):
    door, admit = ends[1]._listener.door, ends[1]._listener.door._admit
    raised = []

    def fails_once(mechanism, shown):
        if not raised:
            raised.append(True)
            raise IndexError("as in a look at a descriptor")
        return admit(mechanism, shown)

    monkeypatch.setattr(door, "_admit", fails_once)
    with dial(port_of(ends[1])) as connection:
        hello = b"\x05HELLO\x01a\x01b"
        connection.sendall(greeting(b"PLAIN") + command(hello))
        until(lambda: raised)
    until(lambda: "goes on behind an error" in caplog.text)
    ends[0].send(1, b"hello")
    assert b"hello" in arrivals(ends[1], 2)
    monkeypatch.setattr(_door, "_END_SECONDS", 60.0)
    start = time.monotonic()
    ends[1].close()
    assert time.monotonic() - start < 30.0


def test_a_door_whose_thread_has_ended_closes(ends, monkeypatch):
    """Whatever ended it: its sockets are closed, or the context would wait for them for ever."""
    door = ends[1]._listener.door
    monkeypatch.setattr(door, "_answer_all", lambda: None)
    door._spoke = True  # so that what runs raises
    with dial(port_of(ends[1])):
        until(lambda: not door._thread.is_alive())
    closing = threading.Thread(target=ends[1].close, daemon=True)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()


def test_a_door_that_is_held_up_holds_up_nobody_who_closes(ends, monkeypatch):
    monkeypatch.setattr(_door, "_END_SECONDS", 0.05)
    door, held, free = ends[1]._listener.door, threading.Event(), threading.Event()

    def waits(mechanism, shown):
        held.set()
        assert free.wait(60.0)
        raise ValueError("too late")

    monkeypatch.setattr(door, "_admit", waits)
    ends[0].open(1)
    assert held.wait(30.0)
    ends[1].close()
    assert door._thread.is_alive()
    free.set()
    until(lambda: ends[1]._context.closed)


def test_a_door_that_gets_no_thread_leaves_nothing_open(monkeypatch):
    contexts, make = [], zmq.Context
    monkeypatch.setattr(zmq, "Context", lambda: contexts.append(make()) or contexts[-1])
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "gossipgrad-door":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_ranks(1, lambda rank, group: ZeroMQTransport(group))
    assert [context.closed for context in contexts] == [True]


def test_a_look_at_a_descriptor_of_something_else_finds_nothing_and_leaks_nothing(tmp_path):
    (tmp_path / "file").touch()
    pair, pipe = socket.socketpair(), os.pipe()
    with (
        open(tmp_path / "file", "rb") as file,  # noqa: PTH123
        socket.create_server(("127.0.0.1", 0)) as server,
        contextlib.closing(dial(server.getsockname()[1])) as near,
        server.accept()[0] as far,
    ):
        port = server.getsockname()[1]
        kinds = [pair[0].fileno(), *pipe, file.fileno(), near.fileno(), server.fileno(), 10_000]
        handles = handles_open()
        for descriptor in kinds:
            assert _tcp.peer_of(descriptor, port) is None
            assert _tcp.traffic(descriptor, port if descriptor != server.fileno() else 1) is None
            assert not _tcp.close_connection(descriptor, port, "127.0.0.1")
        gc.collect()
        assert handles_open() == handles
        peer = _tcp.peer_of(far.fileno(), port)
        assert str(peer) == f"127.0.0.1:{near.getsockname()[1]}"
        for other in (("127.0.0.2", None), ("127.0.0.1", peer.port + 1)):
            assert not _tcp.close_connection(far.fileno(), port, *other)
        assert is_open(near)
        assert _tcp.close_connection(far.fileno(), port, "127.0.0.1", peer.port)
        assert not is_open(near)
    for end in pair:
        end.close()
    for handle in pipe:
        os.close(handle)


@pytest.mark.parametrize(
    ("handles", "expected", "most"),
    [(256, 4, 128), (1024, 4, 256), (1024, 1000, 512), (1 << 20, 4, 1024), (1 << 20, 900, 1800)],
)
def test_as_many_may_wait_as_handles_and_members_allow(monkeypatch, handles, expected, most):
    limits = (handles, handles)
    monkeypatch.setattr(_waiting.resource, "getrlimit", lambda what: limits)
    assert most_waiting(expected) == most


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_that_lets_go_of_a_transport_leaves_its_parents_door_alone(ends):
    ends[0].send(1, b"before")
    assert arrivals(ends[1]) == [b"before"]
    child = os.fork()
    if child == 0:
        try:
            ends[0].close()
            ends.clear()
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ends[0].send(1, b"on the old link")
    assert arrivals(ends[1]) == [b"on the old link"]
    ends[1].send(0, b"on a new one")
    assert arrivals(ends[0]) == [b"on a new one"]
