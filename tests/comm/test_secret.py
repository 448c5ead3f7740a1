"""The secret of a run: where it comes from, who shows it, and what happens with another."""

import os
import pickle
import sys
import threading
import time

import pytest
import torch
import zmq

from gossipgrad.comm import (
    Channel,
    Lost,
    Outcome,
    Part,
    ZeroMQTransport,
    _zeromq,
    _zeromq_link,
    given_secret,
    resolve_transport,
)
from gossipgrad.comm import _secret as secret_module
from gossipgrad.comm._interface import Interface
from gossipgrad.comm._secret import (
    SECRET_FILE,
    Secret,
    joining_secret,
    meet_secret,
    secret_in,
)
from gossipgrad.errors import AgreementError, GossipError
from support.links import RUN
from support.ranks import run_ranks
from support.waiting import until

D = Outcome.DELIVERED


@pytest.fixture
def secrets_of(monkeypatch):
    """Gives ranks that are threads what each would have in a file; a text is a mistake."""

    def give(*content):
        def given():
            said = content[int(threading.current_thread().name.removeprefix("rank "))]
            if isinstance(said, str):
                raise ValueError(said)
            return None if said is None else Secret(said)

        monkeypatch.setattr(secret_module, "given_secret", given)

    return give


def test_a_secret_shows_itself_to_nobody():
    hidden = b"0123456789abcdef0123456789abcdef"
    secret = Secret(hidden)
    assert f"{secret} {secret!r} {[secret]}" == "Secret(...) Secret(...) [Secret(...)]"
    with pytest.raises(TypeError, match="a secret stays in its process"):
        pickle.dumps(secret)
    assert not hasattr(secret, "__dict__")
    assert hidden not in secret._key
    assert secret.derive("one", b"a") != secret.derive("other", b"a") != secret.derive("one", b"b")
    assert secret.derive("one", b"a") == Secret(hidden).derive("one", b"a")
    with pytest.raises(ValueError, match=r"32 random bytes at least, got 31.*token_bytes\(32\)"):
        Secret(hidden[1:])


def test_a_file_is_read_where_the_environment_names_one(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET_FILE, raising=False)
    assert given_secret() is None
    path = tmp_path / "secret"
    monkeypatch.setenv(SECRET_FILE, str(path))
    with pytest.raises(
        ValueError, match=r"cannot read GOSSIPGRAD_SECRET_FILE=.*secret: No such file.*openssl rand"
    ):
        given_secret()
    path.write_text("too short\n")
    path.chmod(0o600)
    with pytest.raises(
        ValueError,
        match=r"holds 9 bytes, white space at its ends left out, but .* 32 at least: mak",
    ):
        given_secret()
    path.write_text(f"  {'k' * 32}\n")
    assert given_secret().derive("x") == Secret(b"k" * 32).derive("x")
    path.chmod(0o640)
    with pytest.warns(UserWarning, match=r"other users can read the secret in .*: chmod 600"):
        given_secret()


def test_what_is_no_file_with_a_secret_is_refused_at_once(tmp_path, monkeypatch):
    pipe, much = tmp_path / "pipe", tmp_path / "much"
    os.mkfifo(pipe)
    much.write_bytes(b"k" * 5000)
    much.chmod(0o600)
    for path, why in (
        (pipe, "it is no plain file; make one"),
        ("/dev/urandom", "it is no plain file"),
        (tmp_path, "Is a directory"),
        (much, "holds more than 4096 bytes: make one"),
    ):
        monkeypatch.setenv(SECRET_FILE, str(path))
        with pytest.raises(ValueError, match=why):
            given_secret()


def test_who_comes_later_finds_the_secret_in_its_file_or_the_store(secrets_of):
    def meet(rank, group):
        return meet_secret(group).derive("x"), secret_in(group.store)

    for met, held in run_ranks(2, meet):
        assert joining_secret(held).derive("x") == met
    with pytest.raises(
        ValueError, match=r"has its secret from a file, and .*_FILE is not set here"
    ):
        joining_secret(None)
    secrets_of(b"k" * 32)
    assert run_ranks(1, meet) == [(Secret(b"k" * 32).derive("x"), None)]


def test_without_a_file_each_run_has_its_own_from_the_store():
    def meet(rank, group):
        return [meet_secret(group).derive("x") for _ in range(2)]

    one, other = run_ranks(3, meet), run_ranks(3, meet)
    assert len({key for rank in one for key in rank}) == 1
    assert one[0][0] != other[0][0]


def test_a_secret_in_a_file_stays_out_of_the_store(secrets_of):
    secrets_of(*[b"k" * 32] * 2)

    def meet(rank, group):
        return meet_secret(group).derive("x"), group.store.check(["secret"])

    assert run_ranks(2, meet) == [(Secret(b"k" * 32).derive("x"), False)] * 2


def failing(world_size, kind=GossipError, **options):
    """What `ZeroMQTransport` raises on each rank."""

    def start(rank, group):
        with pytest.raises(kind) as caught:
            ZeroMQTransport(group, **(options if rank == 1 else {}))
        return str(caught.value)

    begun = time.monotonic()
    said = run_ranks(world_size, start)
    assert time.monotonic() - begun < 30
    return said


def test_another_secret_on_one_rank_fails_at_the_start_on_all(secrets_of):
    secrets_of(b"k" * 32, b"x" * 32, b"k" * 32)
    said = failing(3, AgreementError)
    what = (
        "have different secrets: see that GOSSIPGRAD_SECRET_FILE names a file with the same "
        "content on every rank, or is set on none"
    )
    assert said == [
        f"rank 0 and rank 1 {what}",
        f"rank 1 and rank 0, 2 {what}",
        f"rank 2 and rank 1 {what}",
    ]


def test_a_secret_on_some_ranks_alone_fails_at_the_start_on_all(secrets_of):
    secrets_of(None, b"x" * 32)
    assert (
        failing(2, AgreementError)
        == [
            "rank 1 has a secret from GOSSIPGRAD_SECRET_FILE and rank 0 has none: set it on every "
            "rank, or on none"
        ]
        * 2
    )


def test_a_file_that_is_no_good_fails_at_the_start_on_all(secrets_of):
    secrets_of(b"x" * 32, "cannot read it")
    told, own = failing(2, (GossipError, ValueError))
    assert (told, own) == ("rank 1 has no secret: cannot read it", "cannot read it")


def test_encryption_on_some_ranks_alone_fails_at_the_start_on_all():
    told, own = failing(2, AgreementError, encrypt=True)
    assert told == "rank 1 has encrypt=True, rank 0 has encrypt=False: give all ranks the same"
    assert own == "rank 0 has encrypt=False, rank 1 has encrypt=True: give all ranks the same"


def test_encryption_is_refused_where_it_cannot_be(monkeypatch):
    with pytest.raises(ValueError, match=r"lambda group: ZeroMQTransport\(group, encrypt=True\)"):
        resolve_transport(ZeroMQTransport, encrypt=True)
    with pytest.raises(ValueError, match="encrypt must be True or False, got 'yes'"):
        resolve_transport("zeromq", encrypt="yes")
    monkeypatch.setattr(zmq, "has", lambda what: False)
    said = "encrypt=True needs CURVE, and the ZeroMQ .* was built without it: install pyzmq from"
    with pytest.raises(ValueError, match=said):
        resolve_transport("zeromq", encrypt=True)
    assert all(said.startswith("encrypt=True needs CURVE") for said in failing_alone())


def failing_alone():
    def start(rank, group):
        with pytest.raises(ValueError, match="encrypt=True needs CURVE") as caught:
            ZeroMQTransport(group, encrypt=True)
        return str(caught.value)

    return run_ranks(2, start)


@pytest.mark.parametrize("encrypt", [False, True])
def test_links_that_know_the_secret_bring_what_is_sent(encrypt):
    size = 1 << 16
    ends = run_ranks(2, lambda rank, group: ZeroMQTransport(group, encrypt=encrypt))
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, size)]) for end in ends)
    for round in range(5):
        values = torch.full((2, size), float(round))
        mine = a.post(round, 0, values[0], send_to=1, recv_from=1)
        theirs = b.post(round, 0, values[1] + 1, send_to=0, recv_from=0)
        assert (a.take(mine, 30.0), b.take(theirs, 30.0)) == (D, D)
        assert mine.received.eq(round + 1).all()
        assert theirs.received.eq(round).all()
    until(lambda: all(not len(end._listener.door._waiting) for end in ends))  # they spoke
    assert (a.refused, b.refused) == (0, 0)
    a.close()
    b.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_rank_that_is_not_let_in_sees_its_peer_as_lost_and_does_not_wait(encrypt, monkeypatch):
    monkeypatch.setattr(_zeromq_link, "_GONE_AFTER_BROKEN_OFF", 3)
    ends = run_ranks(2, lambda rank, group: ZeroMQTransport(group, encrypt=encrypt))
    ends[0]._credentials._secret = Secret(bytes(32))
    payload, events = torch.zeros(1 << 16, dtype=torch.uint8), []

    def told():
        ends[0].send(1, b"header", payload)
        return events.extend(ends[0].receive(0.0)) or events

    until(told)
    assert events == [Lost(1)]
    told()  # nor does what is sent then
    until(lambda: ends[1].refused_connections > 0)
    assert {arrival.header for arrival in ends[1].receive(0.0)} == {b""}
    for end in ends:
        end.close()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 and lo are Linux's")
def test_the_interface_may_be_named_in_the_environment(monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_BIND", "127.0.0.2")
    end = run_ranks(1, lambda rank, group: ZeroMQTransport(group))[0]
    assert end._endpoints[0].startswith("tcp://127.0.0.2:")
    end.close()
    monkeypatch.setenv("GOSSIPGRAD_BIND", "lo")
    end = run_ranks(1, lambda rank, group: ZeroMQTransport(group))[0]
    assert end._endpoints[0].startswith("tcp://127.0.0.1:")
    end.close()
    monkeypatch.setenv("GOSSIPGRAD_BIND", "0.0.0.0")
    with pytest.raises(ValueError, match=r"every interface.*GOSSIPGRAD_BIND=10\.0\.0\.7 or"):
        run_ranks(1, lambda rank, group: ZeroMQTransport(group))


def test_a_warning_says_what_encryption_on_several_hosts_leaves_open(monkeypatch):
    monkeypatch.delenv(SECRET_FILE, raising=False)
    several = Interface("10.0.0.7", one_host=False)
    told = "the secret of the run went over the rendezvous store.*name a file"
    with pytest.warns(UserWarning, match=f"send whole models in the clear.*{told}"):
        _zeromq._warn_of_what_is_open(several)
    _zeromq._warn_of_what_is_open(Interface("10.0.0.7", one_host=True))
    monkeypatch.setenv(SECRET_FILE, "somewhere")
    with pytest.warns(UserWarning, match="send whole models in the clear.*WireGuard$"):
        _zeromq._warn_of_what_is_open(several)
