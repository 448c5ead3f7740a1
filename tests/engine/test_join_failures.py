"""Joining when something goes wrong: a donor or joiner dies or fails, the run is over."""

import threading
import time
from types import SimpleNamespace

import networkx
import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group, Hub, Record, ScriptedDeathError
from gossipgrad.engine import _joiner
from support.deaths import QUICK
from support.joining import run_open
from support.ranks import run_ranks
from support.replicas import network, sgd
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until

SETTINGS = {"topology": "matching", "heartbeats": QUICK}


def failing_join(monkeypatch, error, match, *, before=lambda: None):
    """Whoever joins fails like this, and gives up; an event that is set then."""
    over, join = threading.Event(), gg.join

    def joining(*arguments, **more):
        before()
        try:
            with pytest.raises(error, match=match):
                join(*arguments, **more)
        finally:
            over.set()
        raise ScriptedDeathError("it gives up")

    monkeypatch.setattr(gg, "join", joining)
    return over


@pytest.fixture(scope="module")
def past_run():
    """The address of a run that all ranks have left, and its store."""
    left = []

    def member(me, run):
        if me.rank == 0:
            left.append((run, me.session.join_address()))
        me.session.group.barrier()
        me.train_until(lambda: _has_said_what_it_is(left[0][0]))

    def _has_said_what_it_is(run):
        return run.connect().check(["run/members/1/run"])

    run_open(2, member, lambda me, run: None, newcomers=0)
    run, address = left[0]
    store = dist.PrefixStore("run/members/1", run.connect())
    until(lambda: not Record(store).read().living)
    return address, run


def test_a_joiner_whose_donor_dies_in_the_middle_may_try_again(monkeypatch):
    begun, dead, save, join = threading.Event(), threading.Event(), torch.save, gg.join

    def hanging(copy, buffer):
        if threading.current_thread().name == "gossipgrad-donor" and not begun.is_set():
            begun.set()
            assert dead.wait(HANG_SECONDS)
        save(copy, buffer)

    def join_again(*arguments, **more):
        failed = 0
        while True:  # until the others have found out
            try:
                session = join(*arguments, **more)
            except gg.GossipError:
                failed += 1
                continue
            assert failed
            return session

    monkeypatch.setattr(torch, "save", hanging)
    monkeypatch.setattr(gg, "join", join_again)

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
            me.train_until(begun.is_set)
            try:
                me.die()
            finally:
                dead.set()
        return train_on(me)

    def has_joined(membership):
        donors = {rank: one.donor for rank, one in membership.joined.items()}
        return any(donors.get(rank) == 1 for rank in membership.living)

    def train_on(me):
        me.train_until(lambda: 0 in me.session.membership.gone)
        me.train_until(lambda: has_joined(me.session.membership))
        mean = me.mean()
        me.session.group.barrier()
        return mean

    gone, *means = run_open(3, member, lambda me, run: train_on(me))
    assert gone is None
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_a_joiner_that_gives_up_in_the_middle_changes_nothing(monkeypatch):
    begun, gave_up = threading.Event(), threading.Event()
    save = torch.save

    def hanging(copy, buffer):
        if threading.current_thread().name == "gossipgrad-donor":
            begun.set()
            until(gave_up.is_set)
        save({**copy, "large": torch.zeros(1 << 20)}, buffer)

    monkeypatch.setattr(torch, "save", hanging)
    # Its time is over as soon as the donor has begun.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + NEVER_SECONDS * begun.is_set())
    monkeypatch.setattr(_joiner, "time", clock)
    over = failing_join(monkeypatch, gg.GossipError, "rank 0 sent no replica: nothing came within")

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(over.is_set)
        gave_up.set()
        assert me.session.membership.living == (0, 1)
        mean = me.mean()
        me.session.group.barrier()
        return mean

    first, second, nobody = run_open(2, member, lambda me, run: None)
    assert begun.is_set()
    assert torch.equal(first, second)
    assert nobody is None


def test_a_run_that_is_over_is_told(past_run):
    address, run = past_run
    model = network()

    def join(address, timeout_seconds=HANG_SECONDS):
        optimizer = sgd(list(model.parameters()))
        return gg.join(model, optimizer, address, timeout_seconds=timeout_seconds, **SETTINGS)

    with pytest.raises(gg.GossipError, match="the run is over"):
        join(address)
    with pytest.raises(gg.GossipError, match="no such run"):
        join(address.replace("/run/", "/another/"))
    with pytest.raises(gg.GossipError, match="cannot be reached"):
        join(address.replace(str(run.store.port), "1"), 2.0)
    with pytest.raises(ValueError, match="no address of a run"):
        join('{"host": "127.0.0.1"}')


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"model": torch.nn.Linear(6, 8)}, "parameter"),
        ({"optimizer": torch.optim.Adam}, "optimizer 0 is Adam"),
        ({"mode": "sync"}, "setting 'mode' is Sync"),
        ({"topology": "dissemination"}, "setting 'topology'"),
        ({"every": 2}, "setting 'every' is 2 here, but 1 there"),
        ({"heartbeats": gg.Heartbeats()}, "setting 'heartbeats'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_loaded(past_run, changed, what):
    settings = SETTINGS | changed
    model = settings.pop("model", None) or network()
    optimizer = settings.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"this is not what the run trains: {what}"):
        gg.join(model, optimizer, past_run[0], **settings)
    assert all(map(torch.equal, before, model.parameters()))


def test_another_secret_is_refused_before_it_is_a_member(monkeypatch, tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "there"))

    def forget():
        monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "here"))

    asked = failing_join(monkeypatch, gg.AgreementError, "secret", before=forget)

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(asked.is_set)
        return me.session.membership.generation

    # Nobody is lost on a machine that gives a rank no processor for a while.
    patient = gg.Heartbeats(lease_seconds=HANG_SECONDS, silent_seconds=HANG_SECONDS)
    first, second, _ = run_open(2, member, lambda me, run: None, heartbeats=patient)
    assert first == second == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"heartbeats": None}, "heartbeats=None"),
        ({"topology": gg.topology.from_graph(networkx.complete_graph(2))}, "topology by its name"),
        ({"payload": "gradients+weights"}, "gradients"),
        ({"transport": "hub"}, "transport='tcp'"),
        ({"store": "HashStore"}, "TCPStore"),
    ],
)
def test_where_nobody_can_join_there_is_no_address(settings, why):
    hub = Hub(2)
    settings = {"heartbeats": QUICK} | settings
    root = (
        dist.HashStore()
        if settings.pop("store", None)
        else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )
    if settings.get("transport") == "hub":
        settings["transport"] = lambda group: hub.transport(group.rank)

    def main(rank, _):
        model = network()
        group = Group(dist.PrefixStore("run", root.clone()), rank, 2, timeout_seconds=HANG_SECONDS)
        with (
            gg.gossip(
                model, sgd(list(model.parameters())), process_group=group, **settings
            ) as session,
            pytest.raises(ValueError, match=f"none can join this run: .*{why}"),
        ):
            session.join_address()
        with pytest.raises(gg.GossipError, match="the session is closed"):
            session.join_address()

    run_ranks(2, main)


def test_a_run_of_one_rank_is_joined_by_nobody():
    model = network()
    with (
        gg.gossip(model, sgd(list(model.parameters()))) as session,
        pytest.raises(ValueError, match="begin with two"),
    ):
        session.join_address()
