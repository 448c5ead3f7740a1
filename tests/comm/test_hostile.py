"""Whoever reaches a port and does not know the secret changes nothing, and is counted."""

import contextlib
import socket
import threading
import time

import pytest
import torch
import zmq

import gossipgrad as gg
from gossipgrad.comm import Channel, Outcome, Part, ZeroMQTransport, _door
from support.hostile import Tap, dial, greeting, is_open, under_attack
from support.links import RUN
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd
from support.waiting import until

D = Outcome.DELIVERED
STEPS = 30


def port_of(end):
    return int(end._endpoints[end.rank].rpartition(":")[2])


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
        assert (a.take(mine, 5.0), b.take(theirs, 5.0)) == (D, D)
        assert mine.received.tolist() == [2.0 + round] * 4
        assert theirs.received.tolist() == [1.0 + round] * 4


def train(mode, *, encrypt=False, tap=None):
    """The replicas of four ranks after some steps, and what each has counted."""
    ports, listening, over = {}, threading.Barrier(4), threading.Barrier(4)
    ends = {}

    def transport(group):
        end = ends[group.rank] = ZeroMQTransport(group, max_payload_bytes=1 << 20, encrypt=encrypt)
        if tap is not None:
            ports[group.rank] = port_of(end)
            if group.rank == 0:
                for peer in (1, 2, 3):
                    tapped = tap.on(int(end._endpoints[peer].rpartition(":")[2]))
                    end._endpoints[peer] = f"tcp://127.0.0.1:{tapped}"
        return end

    def rank_main(rank, group):
        model = network(rank)
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, mode=mode, transport=transport
        ) as session:

            def steps(count, first=0):
                for step in range(first, first + count):
                    set_gradients(model, rank, step)
                    optimizer.step()

            steps(STEPS // 3)
            listening.wait(30)
            if tap is not None:
                until(lambda: ends[rank].refused_connections >= 4, 30.0)
            steps(STEPS - STEPS // 3, STEPS // 3)
            over.wait(30)
            session._rounds.channel.poll()
            stats, living = session.stats(), session.membership.living
        return [p.detach().clone() for p in model.parameters()], stats, living

    if tap is None:
        return run_ranks(4, rank_main)

    results = []
    runs = threading.Thread(target=lambda: results.append(run_ranks(4, rank_main)))
    runs.start()
    until(lambda: len(ports) == 4 and tap.recorded, 30.0)
    with under_attack(list(ports.values()), tap):
        runs.join(60)
    return results[0]


@pytest.mark.parametrize(
    ("mode", "encrypt"), [("sync", False), ("overlap", False), ("overlap", True)]
)
def test_a_hostile_client_changes_no_bit_of_a_run(mode, encrypt, tap):
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


def test_a_message_that_is_put_into_a_connection_is_refused(ends):
    """Of whoever sits on the way and does not know the secret."""
    one, other = ends()
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    exchanges(a, b, 2)
    link = one._links[1]
    sealed = link.sealer.seal(b"header", 0)
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    for frames in ([changed], [sealed, b"payload"], [sealed], [sealed], [sealed]):
        link.socket.send_multipart(frames)
    # Of these one is genuine, and says nothing that a channel takes.
    until(lambda: b.poll() or b.refused == 5)
    exchanges(a, b, 2, first=2)


def test_silent_connections_are_sent_away_in_time(ends, monkeypatch):
    monkeypatch.setattr(_door, "_HANDSHAKE_SECONDS", 0.2)
    one, other = ends()
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    with dial(port_of(one)) as silent, dial(port_of(one)) as half:
        half.sendall(greeting(b"PLAIN")[:30])
        exchanges(a, b, 2)
        until(lambda: not is_open(silent) and not is_open(half))
        until(lambda: one.refused_connections == 2)
    exchanges(a, b, 2, first=2)


@pytest.mark.parametrize("encrypt", [False, True])
def test_so_many_connections_may_wait_and_links_do_not_give_way_to_them(ends, monkeypatch, encrypt):
    monkeypatch.setattr(_door, "_MOST_WAITING", 8)
    one, other = ends(encrypt=encrypt)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (one, other))
    exchanges(a, b, 2)
    waiting = [dial(port_of(one)) for _ in range(30)]
    until(lambda: sum(map(is_open, waiting)) == 8)
    assert all(map(is_open, waiting[-8:]))  # the first went
    until(lambda: one.refused_connections == 22)
    exchanges(a, b, 2, first=2)
    other.forget(0)
    exchanges(a, b, 2, first=4)  # a new connection gets through, too
    for connection in waiting:
        connection.close()
    until(lambda: one.refused_connections == 30)
    assert a.gone == b.gone == {}


@pytest.mark.parametrize("mechanism", [b"PLAIN", b"CURVE"])
@pytest.mark.parametrize("size_bytes", [1 << 62, 1 << 25, 1 << 23])
def test_who_announces_much_is_sent_away_before_it_is_taken_in(ends, mechanism, size_bytes):
    """Above the plan's largest message at once, else soon after it has said too much."""
    one, _ = ends(max_payload_bytes=1 << 24, encrypt=mechanism == b"CURVE")
    with dial(port_of(one)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        connection.sendall(greeting(mechanism) + b"\x06" + size_bytes.to_bytes(8, "big"))
        sent, begun = 0, time.monotonic()
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < begun + 5
                sent += connection.send(bytes(1 << 12))
                time.sleep(0.001)
    assert sent < 1 << 23
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
