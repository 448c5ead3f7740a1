"""Whoever reaches a port and does not know the secret changes nothing, and is counted."""

import contextlib
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import zmq

import gossipgrad as gg
from gossipgrad.comm import Channel, Outcome, Part, ZeroMQTransport, _tcp, _waiting
from support.hostile import Tap, dial, few_may_wait, greeting, is_open, port_of, under_attack
from support.links import RUN
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd
from support.waiting import until

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no system tells what went over a connection"
)
D = Outcome.DELIVERED
STEPS = 30


@pytest.fixture
def tap():
    tap = Tap()
    yield tap
    tap.close()


@pytest.fixture
def ends():
    made = []

    def make(world_size=2, **options):
        made.extend(run_ranks(world_size, lambda rank, group: ZeroMQTransport(group, **options)))
        return made

    yield make
    for end in made:
        end.close()


def exchanges(a, b, rounds, first=0):
    for round in range(first, first + rounds):
        mine = a.post(round, 0, torch.full((4,), 1.0 + round), send_to=1, recv_from=1)
        theirs = b.post(round, 0, torch.full((4,), 2.0 + round), send_to=0, recv_from=0)
        assert (a.take(mine, 30.0), b.take(theirs, 30.0)) == (D, D)
        assert mine.received.tolist() == [2.0 + round] * 4
        assert theirs.received.tolist() == [1.0 + round] * 4


def train(mode, *, encrypt=False, tap=None):
    """The replicas of four ranks after some steps, and what each has counted.

    With a tap they are under attack before the first link is made, and until the last step.
    """
    ports, over = {}, threading.Barrier(4)
    ends = {}

    def transport(group):
        end = ends[group.rank] = ZeroMQTransport(group, max_payload_bytes=1 << 20, encrypt=encrypt)
        if tap is not None:
            ports[group.rank] = port_of(end)
            if group.rank == 0:
                for peer in (1, 2, 3):
                    tapped = tap.on(port_of(end, peer))
                    end._endpoints[peer] = f"tcp://127.0.0.1:{tapped}"
            until(lambda: end.refused_connections >= 4, 30.0)
        return end

    def rank_main(rank, group):
        model = network(rank)
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, mode=mode, transport=transport
        ) as session:
            for step in range(STEPS):
                set_gradients(model, rank, step)
                optimizer.step()
            over.wait(60)
            session._rounds.channel.poll()
            stats, living = session.stats(), session.membership.living
        return [p.detach().clone() for p in model.parameters()], stats, living

    if tap is None:
        return run_ranks(4, rank_main)

    results = []
    runs = threading.Thread(target=lambda: results.append(run_ranks(4, rank_main)))
    runs.start()
    until(lambda: len(ports) == 4, 30.0)
    with under_attack(list(ports.values()), tap):
        runs.join(110)
    return results[0]


@pytest.mark.parametrize(
    ("mode", "encrypt"), [("sync", False), ("overlap", False), ("overlap", True)]
)
def test_a_hostile_client_changes_no_bit_of_a_run(mode, encrypt, tap, monkeypatch):
    """More connections are held open in silence than may wait, as links are made."""
    few_may_wait(monkeypatch, 20)
    calm = train(mode)
    stormy = train(mode, encrypt=encrypt, tap=tap)
    for (expected, before, _), (found, after, living) in zip(calm, stormy, strict=True):
        assert all(map(torch.equal, expected, found))
        assert before.outcomes == after.outcomes
        assert after.outcomes["delivered"] > 0
        assert living == (0, 1, 2, 3)
        assert before.refused_messages == 0
        assert after.refused_messages >= 4


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_was_recorded_and_is_sent_again_is_refused(ends, tap, encrypt):
    one, other = ends(encrypt=encrypt)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    one._endpoints[1] = f"tcp://127.0.0.1:{tap.on(port_of(other))}"
    exchanges(a, b, 3)
    (said,) = tap.recorded
    plain = torch.full((4,), 1.0).numpy().tobytes()
    assert (plain in said) == (not encrypt)  # the payload of round 0
    assert RUN in said or encrypt
    for number in range(1, 4):
        with dial(port_of(other)) as again:
            again.sendall(bytes(said))
            until(lambda: not is_open(again))
        until(lambda: other.refused_connections == number)  # noqa: B023
    exchanges(a, b, 3, first=3)
    assert (a.refused, b.refused) == (0, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda sealed: [bytes([sealed[0] ^ 1]) + sealed[1:]],
        lambda sealed: [sealed, b"payload"],
        lambda sealed: [b""],
        lambda sealed: [sealed, b"", b"more"],
    ],
    ids=["changed", "payload", "empty", "more"],
)
def test_a_message_that_is_put_into_a_connection_ends_the_link(ends, change):
    """Of whoever sits on the way and does not know the secret; the two then meet again."""
    one, other = ends()
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    exchanges(a, b, 2)
    sealed = one._links[1].seals.seal(b"header", 0)
    one._links[1].socket.send_multipart(change(sealed))
    until(lambda: (a.poll(), b.poll()) and (a.gone, b.gone) == ({1: "was lost"}, {0: "was lost"}))
    # The message itself, and what the other end says when its link is ended at once.
    assert b.refused in (1, 2)
    for channel in (a, b):
        channel.enter(1, 2, [0, 1])
    until(lambda: a.poll() or b.poll() or min(a._ledgers[1].latest, b._ledgers[0].latest) > 0)
    exchanges(a, b, 2, first=2)
    assert a.gone == b.gone == {}


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_message_that_is_taken_out_of_a_connection_ends_the_link(ends, encrypt):
    one, other = ends(encrypt=encrypt)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    exchanges(a, b, 2)
    one._links[1].seals.seal(b"header", 0)  # it gets its number, and never arrives
    mine = a.post(2, 0, torch.zeros(4), send_to=1, recv_from=1)
    theirs = b.post(2, 0, torch.zeros(4), send_to=0, recv_from=0)
    assert b.take(theirs, 30.0) is Outcome.DEAD_PEER
    until(lambda: a.poll() or a.gone == {1: "was lost"})
    assert not mine.open
    assert b.gone == {0: "was lost"}


def test_silent_connections_are_sent_away_in_time(ends, monkeypatch):
    monkeypatch.setattr(_waiting, "HANDSHAKE_SECONDS", 1.0)
    one, other = ends()
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    exchanges(a, b, 1)
    before = one.refused_connections  # a link that took too long comes again
    with dial(port_of(one)) as silent, dial(port_of(one)) as half:
        half.sendall(greeting(b"PLAIN")[:30])
        exchanges(a, b, 1, first=1)
        until(lambda: not is_open(silent) and not is_open(half))
        until(lambda: one.refused_connections == before + 2)
    exchanges(a, b, 2, first=2)


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("system", ["told", "untold"])
def test_so_many_connections_may_wait_and_links_do_not_give_way(ends, monkeypatch, encrypt, system):
    if system == "untold":  # not Linux
        monkeypatch.setattr(_tcp, "_TCP_INFO", None)
    few_may_wait(monkeypatch, 8)
    one, other = ends(encrypt=encrypt)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    exchanges(a, b, 2)
    waiting = [dial(port_of(one)) for _ in range(30)]
    until(lambda: sum(map(is_open, waiting)) == 8)
    until(lambda: one.refused_connections == 22)
    exchanges(a, b, 2, first=2)
    other.forget(0)
    exchanges(a, b, 2, first=4)  # a new connection gets through, too
    for connection in waiting:
        connection.close()
    until(lambda: one.refused_connections >= 30)  # the new one may have had to come again
    assert a.gone == b.gone == {}


@pytest.mark.parametrize("encrypt", [False, True])
def test_who_has_to_give_way_does_so_before_it_is_let_in(ends, monkeypatch, encrypt):
    """Else a link would break: where the system does not tell, a link that is new looks silent."""
    monkeypatch.setattr(_tcp, "_TCP_INFO", None)
    few_may_wait(monkeypatch, 8)
    one, other = ends(encrypt=encrypt)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    door, chosen = one._listener.door, []

    def choose(order):  # first the newest, which comes again, and then the oldest
        if not chosen:
            order.reverse()
        chosen.append(order[0])

    def count(went):  # is held up until the one that came has asked
        counted(went)
        if len(door._waiting) > 8:
            assert door._questions.poll(30_000)

    counted = door._count
    monkeypatch.setattr(door._waiting, "_choice", SimpleNamespace(shuffle=choose))
    monkeypatch.setattr(door, "_count", count)
    with contextlib.ExitStack() as strangers:
        for _ in range(8):
            strangers.enter_context(dial(port_of(one)))
        until(lambda: len(door._waiting) == 8)
        exchanges(a, b, 2)
    assert len(chosen) == 2
    assert a.gone == b.gone == {}


@needs_linux
@pytest.mark.parametrize("mechanism", [b"PLAIN", b"CURVE"])
@pytest.mark.parametrize("size_bytes", [1 << 62, 1 << 31, 1 << 29])
def test_who_announces_much_is_sent_away_before_it_is_taken_in(
    ends, monkeypatch, mechanism, size_bytes
):
    """Above the plan's largest message at once, else soon after it has said too much.

    What one tick of the door brings is taken in, as fast as it can be said.
    """
    monkeypatch.setattr(_waiting, "HANDSHAKE_SECONDS", 60.0)
    one, _ = ends(max_payload_bytes=1 << 30, encrypt=mechanism == b"CURVE")
    with dial(port_of(one)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        connection.sendall(greeting(mechanism) + b"\x06" + size_bytes.to_bytes(8, "big"))
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < begun + 30
                connection.send(bytes(1 << 16))
    until(lambda: one.refused_connections == 1)


def test_a_socket_of_a_stranger_that_speaks_zeromq_gets_nothing_in(ends):
    one, other = ends()
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as bare,
        context.socket(zmq.PUSH) as guessing,
    ):
        guessing.plain_username, guessing.plain_password = b"1.00", b"guess"
        for stranger in (bare, guessing):
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(one._endpoints[0])
            stranger.send(b"hello", zmq.NOBLOCK)
        until(lambda: one.refused_connections >= 2)
        exchanges(a, b, 2)
    assert a.refused >= 2
    assert a.gone == b.gone == {}
