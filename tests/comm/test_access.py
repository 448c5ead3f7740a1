"""The secret of a run: who knows it, who does not, and what each of them is told."""

import os
from pathlib import Path

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Channel, Lost, Part, Received, TCPTransport
from gossipgrad.errors import AgreementError, GossipError
from support.links import RUN, both
from support.processes import run_processes
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd
from support.waiting import until

SECRET_FILE = "GOSSIPGRAD_SECRET_FILE"


def secret_in(folder, name, letter):
    path = Path(folder) / name
    path.write_text(64 * letter + "\n")
    path.chmod(0o600)
    return str(path)


def given(path):
    os.environ.pop(SECRET_FILE, None)
    if path is not None:
        os.environ[SECRET_FILE] = path


def start():
    """What becomes of a session of this rank."""
    model = network()
    optimizer = sgd(list(model.parameters()))
    try:
        with gg.gossip(model, optimizer) as session:
            for step in range(3):
                set_gradients(model, session.rank, step)
                optimizer.step()
            session.average_()
        return "trained", ""
    except (GossipError, ValueError) as error:
        return type(error).__name__, str(error)


def _with_secrets(rank, store, folder):
    mine, other, found = secret_in(folder, f"a{rank}", "a"), secret_in(folder, "b", "b"), {}
    for case, path in (
        ("same", mine),
        ("other", other if rank == 2 else mine),
        ("none", None if rank == 1 else mine),
        ("missing", str(Path(folder) / "missing") if rank == 0 else mine),
    ):
        given(path)
        found[case] = start()
    return found


@pytest.mark.process
def test_a_wrong_or_missing_secret_is_refused_by_name_on_all_ranks(tmp_path):
    ranks = run_processes(3, _with_secrets, str(tmp_path))
    for rank, found in enumerate(ranks):
        assert found["same"][0] == "trained"
        for case, odd, kind, said in (
            ("other", 2, "AgreementError", "rank 2 has another secret"),
            ("none", 1, "AgreementError", "rank 1 names no file"),
            ("missing", 0, "GossipError", "rank 0 has no secret: cannot read"),
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
        run_ranks(1, lambda rank, group: TCPTransport(group))
    assert said in str(caught.value)


def test_a_secret_that_others_can_read_warns(secret):
    secret.chmod(0o644)
    with pytest.warns(UserWarning, match="other users can read the secret"):
        TCPTransport.joining(0, 1, introductions={}, secret=None).close()


@pytest.mark.parametrize("is_in_file", [False, True])
def test_who_lacks_the_secret_gets_nothing_in(secret, monkeypatch, is_in_file):
    """Neither as the rank that connects, nor as the one that listens."""
    if not is_in_file:
        monkeypatch.delenv(SECRET_FILE)
    ends = run_ranks(2, lambda rank, group: TCPTransport(group))
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends)
    both(a, b)
    fingerprint = ends[0].introduction[1]  # all that it could have seen
    monkeypatch.delenv(SECRET_FILE, raising=False)
    stranger = TCPTransport.joining(2, 2, introductions={}, secret="ab" * 32)
    stranger.introductions[0] = ends[0].introduction
    for end in ends:
        end.add_peer(2, [stranger.introduction[0], fingerprint])
    stranger.send(0, b"hello")
    ends[1].send(2, b"weights", torch.ones(1 << 16, dtype=torch.uint8))
    events = []
    until(lambda: events.extend(stranger.receive(0.01)) or events)
    assert events == [Lost(0)]
    until(lambda: b.poll() or b.gone)
    assert [both(a, b, round, value=round) for round in (1, 2, 3)] == [[r] * 4 for r in (1, 2, 3)]
    assert a.refused == 0, "it never reached the channel"
    assert (a.gone, b.gone) == ({}, {2: "was lost"})
    assert stranger.receive(0.0) == []
    stranger.close()
    a.close()
    b.close()


@pytest.mark.parametrize("is_in_file", [False, True])
def test_one_that_joins_talks_with_those_who_are_there(secret, monkeypatch, is_in_file):
    """Also before they have heard of it."""
    if not is_in_file:
        monkeypatch.delenv(SECRET_FILE)
    ends = run_ranks(2, lambda rank, group: TCPTransport(group))
    known = {"introductions": ends[0].introductions, "secret": ends[0].published_secret}
    newcomer = TCPTransport.joining(2, 2, **known)
    newcomer.send(0, b"early")
    events = []
    until(lambda: events.extend(ends[0].receive(0.01)) or events)
    assert [event.header for event in events if isinstance(event, Received)] == [b"early"]
    for end in ends:
        end.add_peer(2, newcomer.introduction)
        end.world_size = 3
    newcomer.world_size = 3
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (ends[1], newcomer))
    assert both(a, b, value=2) == [2.0] * 4
    if is_in_file:
        secret.write_text(64 * "z")
        with pytest.raises(AgreementError, match="another secret"):
            TCPTransport.joining(3, 2, **known)
        monkeypatch.delenv(SECRET_FILE)
        with pytest.raises(ValueError, match="names none here"):
            TCPTransport.joining(3, 2, **known)
    for end in (*ends, newcomer):
        end.close()


@pytest.mark.parametrize(
    "introduction",
    [[], ["tcp://127.0.0.1:5000"], ["ipc:///there", None], ["tcp://127.0.0.1:5000", 0]],
)
def test_what_is_no_introduction_is_refused(introduction):
    end = run_ranks(1, lambda rank, group: TCPTransport(group))[0]
    with pytest.raises(AgreementError, match="same version"):
        end.add_peer(1, introduction)
    end.add_peer(1, ["tcp://127.0.0.1:5000", None])
    with pytest.raises(AgreementError, match="listens elsewhere"):
        end.add_peer(1, ["tcp://127.0.0.1:5001", None])
    end.close()
