"""How ranks introduce themselves: for one occasion alone, and later ones to those who are there."""

import itertools

import pytest
import torch

from gossipgrad.comm import Channel, Outcome, Part, ZeroMQTransport, joining_secret, secret_in
from gossipgrad.comm._credentials import Credentials
from gossipgrad.comm._interface import Interface, check_bound
from gossipgrad.comm._secret import Secret
from gossipgrad.errors import AgreementError
from support.links import RUN
from support.ranks import run_ranks
from support.waiting import until

SECRET = Secret(bytes(range(32)))
D = Outcome.DELIVERED
ports = itertools.count(5000)


def introduced(count, secret=SECRET):
    """Credentials of a few ranks, and what each has told."""
    ranks = [Credentials(secret, rank, range(count)) for rank in range(count)]
    told = {c._rank: c.introduce(f"tcp://127.0.0.1:{next(ports)}") for c in ranks}
    return ranks, told


def met(count, secret=SECRET):
    ranks, told = introduced(count, secret)
    proofs = {c._rank: c.meet(told) for c in ranks}
    for one in ranks:
        one.check(proofs)
    return ranks


def test_an_introduction_of_another_occasion_is_refused():
    """Recorded from a run with the same secret, and put in place of what a rank tells."""
    old = met(2)
    (mine, other), told = introduced(2)
    changed = {**told, 1: old[1].introductions[1][:3]}
    for recorded in (old[1].introductions[1][3], other.meet(told)):
        mine.meet(changed)
        with pytest.raises(AgreementError, match="rank 0 and rank 1 have different secrets"):
            mine.check({0: mine.meet(changed), 1: recorded})
    with pytest.raises(AgreementError, match="what rank 1 told of itself comes back as something"):
        other.meet(changed)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        ["tcp://127.0.0.1:5000", "00" * 16],
        ["tcp://127.0.0.1:5000", "00" * 15, False],
        ["tcp://127.0.0.1:5000", "\u00e4" * 32, False],
        ["ipc:///somewhere", "00" * 16, False],
        ["tcp://127.0.0.1:5000", "00" * 16, 0],
        {"endpoint": "tcp://127.0.0.1:5000"},
    ],
)
def test_what_is_no_introduction_is_told_as_such(told):
    (mine, _), others = introduced(2)
    with pytest.raises(AgreementError, match=r"rank 1 introduces itself with .*same version"):
        mine.meet({**others, 1: told})


@pytest.mark.parametrize("proof", [None, 5, "", "\u00e4\u00f6", "00" * 32])
def test_what_is_no_proof_is_told_as_another_secret(proof):
    (mine, _), told = introduced(2)
    with pytest.raises(AgreementError, match="rank 0 and rank 1 have different secrets"):
        mine.check({0: mine.meet(told), 1: proof})


def test_one_that_comes_later_is_believed_for_its_occasion_alone():
    mine, _ = met(2)
    later, elsewhere = (Credentials(SECRET, 2, [0, 1, 2]) for _ in range(2))
    for one, occasion in ((later, mine.occasion), (elsewhere, met(2)[0].occasion)):
        one.introduce(f"tcp://10.0.0.7:{next(ports)}")
        one.join(occasion)
    assert mine.take_in(2, later.introductions[2]).host == "10.0.0.7"
    mine.take_in(2, later.introductions[2])
    again = Credentials(SECRET, 2, [0, 1, 2])
    again.introduce(f"tcp://10.0.0.7:{next(ports)}")
    again.join(mine.occasion)
    for rank, introduction, why in (
        (2, again.introductions[2], "rank 2 is known already, and listens elsewhere"),
        (3, later.introductions[2], "rank 3 has not proven to rank 0 that it knows the secret"),
        (2, elsewhere.introductions[2], "rank 2 has not proven to rank 0"),
        (3, ["tcp://10.0.0.7:5000", "00" * 16, True, "00"], "rank 3 has encrypt=True, rank 0 has"),
        (3, None, "rank 3 introduces itself with"),
    ):
        with pytest.raises(AgreementError, match=why):
            mine.take_in(rank, introduction)


@pytest.mark.parametrize("encrypt", [False, True])
def test_one_that_joins_talks_with_those_who_are_there(encrypt):
    """Also before they have heard of it."""
    ends, stores = [], []

    def start(rank, group):
        ends.append(ZeroMQTransport(group, encrypt=encrypt))
        stores.append(group.store)

    run_ranks(2, start)
    ends.sort(key=lambda end: end.rank)
    newcomer = ZeroMQTransport.joining(
        joining_secret(secret_in(stores[0])),
        2,
        2,
        occasion=ends[0].occasion,
        introductions=ends[0].introductions,
        encrypt=encrypt,
    )
    newcomer.send(0, b"early")
    events = []
    until(lambda: events.extend(ends[0].receive(0.01)) or events)
    assert [(event.header, event.sender) for event in events] == [(b"early", 2)]
    for end in ends:
        end.take_in(2, newcomer.introduction)
        end.world_size = 3
    newcomer.world_size = 3
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in (ends[1], newcomer))
    mine = a.post(0, 0, torch.full((4,), 1.0), send_to=2, recv_from=2)
    theirs = b.post(0, 0, torch.full((4,), 2.0), send_to=1, recv_from=1)
    assert (a.take(mine, 30.0), b.take(theirs, 30.0)) == (D, D)
    assert mine.received.tolist() == [2.0] * 4
    with pytest.raises(AgreementError, match="rank 0 has not proven to rank 3"):
        ZeroMQTransport.joining(
            Secret(bytes(32)),
            3,
            2,
            occasion=ends[0].occasion,
            introductions=ends[0].introductions,
            encrypt=encrypt,
        )
    for end in (*ends, newcomer):
        end.close()


@pytest.mark.parametrize(
    "bind", ["0.0.0.0", "*", "0", "0.0", "::", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]
)
def test_every_interface_is_refused_in_all_spellings(bind):
    with pytest.raises(ValueError, match=r"is every interface.*GOSSIPGRAD_BIND=10\.0\.0\.7 or"):
        run_ranks(1, lambda rank, group: ZeroMQTransport(group, bind=bind))


@pytest.mark.parametrize(("asked", "host"), [("lo", "127.0.0.1"), ("::1", "::1")])
def test_loopback_is_refused_where_ranks_are_on_several_hosts(asked, host):
    check_bound(Interface(asked, one_host=True), host)
    check_bound(Interface("eth1", one_host=False), "10.0.0.7")
    with pytest.raises(ValueError, match=f"bind='{asked}' is a loopback address, {host}, and rank"):
        check_bound(Interface(asked, one_host=False), host)
