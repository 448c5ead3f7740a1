"""Encrypted links: who knows the secret, who does not, and what each of them is told."""

import os
import time
from pathlib import Path

import pytest
import torch
import zmq
from zmq.utils import z85

import gossipgrad as gg
from gossipgrad.comm import (
    Channel,
    Lost,
    Outcome,
    Part,
    Received,
    ZeroMQTransport,
    resolve_transport,
)
from gossipgrad.errors import AgreementError, GossipError
from support.links import RUN
from support.processes import run_processes
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd
from support.waiting import HANG_SECONDS, until

SECRET_FILE = "GOSSIPGRAD_SECRET_FILE"
D = Outcome.DELIVERED


def secret_in(folder, name, letter):
    path = Path(folder) / name
    path.write_text(64 * letter + "\n")
    path.chmod(0o600)
    return str(path)


def given(path):
    os.environ.pop(SECRET_FILE, None)
    if path is not None:
        os.environ[SECRET_FILE] = path


def start(encrypt):
    """What becomes of a session of this rank."""
    model = network()
    optimizer = sgd(list(model.parameters()))
    try:
        with gg.gossip(model, optimizer, encrypt=encrypt) as session:
            for step in range(3):
                set_gradients(model, session.rank, step)
                optimizer.step()
            session.average_()
        return "trained", ""
    except (GossipError, ValueError) as error:
        return type(error).__name__, str(error)


def _with_secrets(rank, store, folder):
    mine, other, found = secret_in(folder, f"a{rank}", "a"), secret_in(folder, "b", "b"), {}
    for case, path, encrypt in (
        ("same", mine, None),
        ("other", other if rank == 2 else mine, True),
        ("none", None if rank == 1 else mine, None),
        ("plain", mine, rank != 1),
        ("missing", str(Path(folder) / "missing") if rank == 0 else mine, True),
        ("unset", None if rank == 0 else mine, True),
    ):
        given(path)
        found[case] = start(encrypt)
    return found


@pytest.mark.process
def test_a_wrong_or_missing_secret_is_refused_by_name_on_all_ranks(tmp_path):
    ranks = run_processes(3, _with_secrets, str(tmp_path))
    for rank, found in enumerate(ranks):
        assert found["same"][0] == "trained"
        for case, odd, kind, said in (
            ("other", 2, "AgreementError", "rank 2 has another secret"),
            ("none", 1, "AgreementError", "rank 1 does not encrypt its links"),
            ("plain", 1, "AgreementError", "rank 1 does not encrypt its links"),
            ("missing", 0, "GossipError", "rank 0 cannot encrypt: cannot read"),
            ("unset", 0, "GossipError", "rank 0 cannot encrypt: encrypt=True needs a file"),
        ):
            name, text = found[case]
            if rank == odd and kind == "GossipError":
                kind, said = "ValueError", "openssl rand -hex 32"
            assert name == kind
            assert said in text


@pytest.mark.parametrize(
    ("content", "said"),
    [("short", "holds 5 bytes"), (5000 * "x", "5000 bytes"), (None, "plain file")],
)
def test_what_is_no_file_with_a_secret_is_refused(tmp_path, monkeypatch, content, said):
    path = tmp_path / "secret"
    path.mkdir() if content is None else path.write_text(content)
    path.chmod(0o700)
    monkeypatch.setenv(SECRET_FILE, str(path))
    with pytest.raises(ValueError, match=r"openssl rand") as caught:
        run_ranks(1, lambda rank, group: ZeroMQTransport(group))
    assert said in str(caught.value)


def test_a_secret_that_others_can_read_warns(secret):
    secret.chmod(0o644)
    with pytest.warns(UserWarning, match="other users can read the secret"):
        ZeroMQTransport.joining(0, 1, introductions={}).close()


def test_encryption_is_refused_where_it_cannot_be(monkeypatch, secret):
    with pytest.raises(ValueError, match=r"lambda group: ZeroMQTransport\(group, encrypt=True\)"):
        resolve_transport(ZeroMQTransport, encrypt=True)
    with pytest.raises(ValueError, match="encrypt must be True, False or None, got 'yes'"):
        resolve_transport("zeromq", encrypt="yes")
    monkeypatch.setattr(zmq, "has", lambda what: False)
    with pytest.raises(ValueError, match="CURVE"):
        resolve_transport("zeromq", encrypt=True)
    with pytest.raises(ValueError, match="CURVE"):
        run_ranks(1, lambda rank, group: ZeroMQTransport(group))


def exchange(a, b, rounds, first=0):
    size = a.plan[0].size_bytes // 4
    for round in range(first, first + rounds):
        values = torch.full((2, size), float(round))
        mine = a.post(round, 0, values[0], send_to=1, recv_from=1)
        theirs = b.post(round, 0, values[1] + 1, send_to=0, recv_from=0)
        assert (a.take(mine, HANG_SECONDS), b.take(theirs, HANG_SECONDS)) == (D, D)
        assert mine.received.eq(round + 1).all()
        assert theirs.received.eq(round).all()


@pytest.mark.parametrize("keys", ["none", "own", "server's guessed", "server's known"])
def test_who_lacks_the_secret_gets_nothing_in_and_the_run_goes_on(secret, keys):
    ends = run_ranks(2, lambda rank, group: ZeroMQTransport(group))
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends)
    exchange(a, b, 2)
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.linger = 0
    if keys != "none":
        public, private = zmq.curve_keypair()
        stranger.curve_publickey, stranger.curve_secretkey = public, private
        stranger.curve_serverkey = {
            "own": public,
            "server's guessed": zmq.curve_public(z85.encode(bytes(32))),
            "server's known": ends[0]._access._keys[0],  # all that it could have seen
        }[keys]
    stranger.connect(ends[0].introduction[0])
    for _ in range(100):
        stranger.send(b"hello")
    for attempt in range(20):
        exchange(a, b, 1, first=2 + attempt)
        time.sleep(0.02)
    assert a.refused == 0, "it never reached the channel"
    assert (a.gone, b.gone) == ({}, {})
    stranger.close()
    context.term()
    a.close()
    b.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_one_that_joins_talks_with_those_who_are_there(secret, encrypt):
    """Also before they have heard of it."""
    ends = run_ranks(2, lambda rank, group: ZeroMQTransport(group, encrypt=encrypt))
    newcomer = ZeroMQTransport.joining(2, 2, introductions=ends[0].introductions, encrypt=encrypt)
    newcomer.send(0, b"early")
    events = []
    until(lambda: events.extend(ends[0].receive(0.01)) or events)
    assert [event.header for event in events if isinstance(event, Received)] == [b"early"]
    for end in ends:
        end.add_peer(2, newcomer.introduction)
        end.world_size = 3
    newcomer.world_size = 3
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (ends[1], newcomer))
    mine = a.post(0, 0, torch.full((4,), 1.0), send_to=2, recv_from=2)
    theirs = b.post(0, 0, torch.full((4,), 2.0), send_to=1, recv_from=1)
    assert (a.take(mine, HANG_SECONDS), b.take(theirs, HANG_SECONDS)) == (D, D)
    assert mine.received.tolist() == [2.0] * 4
    with pytest.raises(AgreementError, match="encrypt"):
        ZeroMQTransport.joining(3, 2, introductions=ends[0].introductions, encrypt=not encrypt)
    if encrypt:
        secret.write_text(64 * "z")
        with pytest.raises(AgreementError, match="another secret"):
            ZeroMQTransport.joining(3, 2, introductions=ends[0].introductions)
    for end in (*ends, newcomer):
        end.close()


@pytest.mark.parametrize(
    "introduction",
    [[], ["tcp://127.0.0.1:5000"], ["ipc:///there", None], ["tcp://127.0.0.1:5000", 0]],
)
def test_what_is_no_introduction_is_refused(introduction):
    end = run_ranks(1, lambda rank, group: ZeroMQTransport(group, encrypt=False))[0]
    with pytest.raises(AgreementError, match="same version"):
        end.add_peer(1, introduction)
    end.add_peer(1, ["tcp://127.0.0.1:5000", None])
    with pytest.raises(AgreementError, match="listens elsewhere"):
        end.add_peer(1, ["tcp://127.0.0.1:5001", None])
    end.close()


def test_encryption_without_a_secret_says_how_to_make_one(monkeypatch):
    monkeypatch.delenv(SECRET_FILE, raising=False)
    with pytest.raises(ValueError, match=r"needs a file .*openssl rand -hex 32.*run\.secret"):
        run_ranks(1, lambda rank, group: ZeroMQTransport(group, encrypt=True))


def test_a_rank_that_is_not_let_in_sees_its_peer_as_lost_and_does_not_wait(secret):
    ends = run_ranks(2, lambda rank, group: ZeroMQTransport(group))
    ends[0]._access._keys = zmq.curve_keypair()
    ends[0].forget(1)  # its link has been used
    payload, events = torch.zeros(1 << 16, dtype=torch.uint8), []

    def told():
        ends[0].send(1, b"header", payload)
        return events.extend(ends[0].receive(0.01)) or events

    until(told)
    assert events == [Lost(1)]
    assert ends[1].receive(0.0) == []
    for end in ends:
        end.close()
