"""Joining when something goes wrong: a donor or newcomer dies, the store is lost, it may not."""

import json
import logging
import threading

import networkx
import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import AskedStore, Group, Hub, ParcelEnd, Record, ScriptedDeathError
from gossipgrad.decentralized import _giving, _taking
from support.deaths import QUICK
from support.joining import run_open
from support.ranks import run_ranks
from support.replicas import network, sgd
from support.waiting import until


@pytest.fixture
def first_transfer(monkeypatch):
    """Stands still in its middle, until something is done about it; later ones go through."""
    monkeypatch.setattr(_taking, "_COPY_SECONDS", 60.0)  # nobody else is asked meanwhile
    begun, go_on = threading.Event(), threading.Event()
    send = ParcelEnd.send

    def standing(self, tree):
        if not begun.is_set():
            begun.set()
            until(go_on.is_set, 60.0)
            self.look(0.0)  # where it sees that its end is closed, if that is so
        send(self, tree)

    monkeypatch.setattr(ParcelEnd, "send", standing)
    return begun, go_on


def failing_join(monkeypatch, error, match, *, first=lambda: None):
    """Whoever joins fails like this, and gives up; an event that is set then."""
    over, join = threading.Event(), gg.join

    def joining(*arguments, **more):
        first()
        try:
            with pytest.raises(error, match=match):
                join(*arguments, **more)
        finally:
            over.set()
        raise ScriptedDeathError("it gives up")

    monkeypatch.setattr(gg, "join", joining)
    return over


def test_a_donor_that_dies_in_the_middle_is_replaced_by_another(first_transfer):
    begun, go_on = first_transfer
    givers = []

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(lambda: begun.is_set() or me.session.membership.joined)
        asked = me.session._members.giving
        if asked.seconds > 0 and not givers:
            givers.append(me.rank)
            asked._closed = True  # the process is gone, and its thread with it
            go_on.set()
            me.die()
        me.train_until(lambda: 3 in me.session.membership.living)
        me.train_until(lambda: givers[0] in me.session.membership.lost)
        mean = me.mean()
        me.session.group.barrier()
        return mean

    def newcomer(me, run):
        assert me.session.joined_from not in givers
        me.train_until(lambda: givers[0] in me.session.membership.lost)
        mean = me.mean()
        me.session.group.barrier()
        return mean

    *members, joined = run_open(3, member, newcomer)
    assert sum(answer is None for answer in members) == 1
    for mean in filter(lambda answer: answer is not None, members):
        assert torch.equal(mean, joined)


def test_a_newcomer_that_dies_in_the_middle_ends_its_donors_thread_and_nothing_else(
    first_transfer, monkeypatch
):
    begun, go_on = first_transfer
    closed = threading.Event()

    def dying(self):
        until(begun.is_set, 60.0)
        self._transport.close()
        closed.set()
        raise ScriptedDeathError("the newcomer dies by script")

    monkeypatch.setattr(ParcelEnd, "receive", dying)
    monkeypatch.setattr(ParcelEnd, "await_word", lambda self, what: None)

    def giving():
        return [t for t in threading.enumerate() if t.name == "gossipgrad-giving"]

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(closed.is_set)
        go_on.set()
        me.train_until(lambda: not giving())
        assert me.session.membership.generation == 0
        assert me.session.membership.joined == {}
        assert me.session.stats().replicas_given == 0
        mean = me.mean()
        me.session.group.barrier()
        return mean

    def newcomer(me, run):
        raise AssertionError("it never joins")

    first, second, nobody = run_open(2, member, newcomer)
    assert torch.equal(first, second)
    assert nobody is None


@pytest.mark.parametrize("when", ["before a donor is asked", "before it enters"])
def test_a_store_that_is_lost_ends_a_join_and_nothing_else(when, monkeypatch):
    ask = AskedStore.ask

    def failing(self, question, **more):
        ours = threading.current_thread().name == "rank 2"
        if ours and (when == "before a donor is asked" or replica_is_there.is_set()):
            raise RuntimeError("Connection reset by peer")
        return ask(self, question, **more)

    receive, replica_is_there = ParcelEnd.receive, threading.Event()

    def received(self):
        tree = receive(self)
        replica_is_there.set()
        return tree

    monkeypatch.setattr(ParcelEnd, "receive", received)
    done = failing_join(
        monkeypatch,
        gg.GossipError,
        r"the store of the run at 127\.0\.0\.1:\d+ cannot be reached",
        first=lambda: monkeypatch.setattr(AskedStore, "ask", failing),
    )

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(done.is_set)
        me.train(3)
        assert me.session.membership.generation == 0

    run_open(2, member, lambda me, run: None)


def test_a_run_that_is_over_is_told(monkeypatch):
    monkeypatch.setattr(_taking, "_LEAST_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(_taking, "_ANSWER_BEATS", 1.0)
    left = []

    def member(me, run):
        if me.rank == 0:
            left.append((run, me.session.invitation()))
        me.session.group.barrier()

    run_open(2, member, lambda me, run: None, newcomers=0)
    run, invitation = left[0]
    model = network()
    store = dist.PrefixStore("run/members/1", run.connect())
    until(lambda: not Record(store).read().living, 60.0)
    with pytest.raises(gg.GossipError, match="the run is over: all of its ranks have left"):
        gg.join(model, sgd(list(model.parameters())), invitation)
    told = json.loads(invitation) | {"prefix": "another"}
    with pytest.raises(gg.GossipError, match="holds no such run: it is over, and another has"):
        gg.join(model, sgd(list(model.parameters())), json.dumps(told))
    told["where"] = "elsewhere"
    with pytest.raises(ValueError, match=r"the run listens on 127\.0\.0\.1, which only its own"):
        gg.join(model, sgd(list(model.parameters())), json.dumps(told))


def test_what_does_not_fit_is_refused_before_anybody_is_asked():
    texts = []

    def member(me, run):
        if me.rank == 0:
            texts.append(me.session.invitation())
        me.session.group.barrier()

    run_open(2, member, lambda me, run: None, newcomers=0)
    model, other = network(), torch.nn.Linear(6, 8)

    def join(model, optimizer, **changed):
        text = json.dumps(json.loads(texts[0]) | changed)
        return gg.join(model, optimizer, text)

    with pytest.raises(ValueError, match=r"this is not what the run trains: parameter '\w+' is"):
        join(other, sgd(list(other.parameters())))
    with pytest.raises(ValueError, match=r"optimizer 0 is Adam of 4 parameters .*SGD of 4"):
        join(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match=r"of another version .*install the run's version"):
        join(model, sgd(list(model.parameters())), format="gossipgrad invitation 9")
    with pytest.raises(ValueError, match="the invitation is damaged"):
        join(model, sgd(list(model.parameters())), settings={})
    trained = sgd(list(model.parameters()))
    with (
        gg.sparsify(model, trained),
        pytest.raises(ValueError, match=r"is in a session of sparsify\(\)"),
    ):
        join(model, sgd(list(model.parameters())))


def test_another_secret_is_refused_by_the_donor(monkeypatch, caplog):
    """A stranger who reaches the store gets no replica."""
    from gossipgrad.comm import Secret

    monkeypatch.setattr(_taking, "joining_secret", lambda held: Secret(bytes(32)))
    asked = failing_join(monkeypatch, gg.AgreementError, "refused this one: it has another secret")

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(asked.is_set)
        me.train_until(lambda: "refused one that would join: it has another secret" in caplog.text)
        return me.session.stats().giving_seconds

    with caplog.at_level(logging.WARNING, _giving.__name__):
        first, second, _ = run_open(2, member, lambda me, run: None)
    assert first == second == 0, "nothing was copied"


def test_a_loop_that_carries_what_cannot_be_sent_is_told_on_both_sides(monkeypatch, caplog):
    asked = failing_join(
        monkeypatch, gg.GossipError, "no member can give its replica.*carry gives is a Module"
    )

    def member(me, run):
        me.session.carry = {"model": torch.nn.Module()}
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(asked.is_set)

    run_open(2, member, lambda me, run: None)
    assert "cannot give its replica: what session.carry gives is a Module" in caplog.text


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"heartbeats": None}, "its membership never changes: leave heartbeats=None out"),
        (
            {"topology": gg.topology.from_graph(networkx.complete_graph(2))},
            r"given for 2 ranks, and says nothing of more: use a topology by its name",
        ),
        ({"payload": "gradients+weights"}, "sends gradients during backward"),
        ({"transport": "hub"}, "its links are no ZeroMQ ones: use transport='zeromq'"),
        ({"store": "HashStore"}, "its store is a HashStore, which cannot be reached from another"),
    ],
)
def test_where_nobody_can_join_there_is_no_invitation(settings, why):
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
        group = Group(dist.PrefixStore("run", root.clone()), rank, 2, timeout_seconds=20.0)
        with (
            gg.gossip(
                model, sgd(list(model.parameters())), process_group=group, **settings
            ) as session,
            pytest.raises(ValueError, match=f"nobody can join this run: .*{why}"),
        ):
            session.invitation()
        with pytest.raises(gg.GossipError, match="the session is closed"):
            session.invitation()

    run_ranks(2, main)


def test_a_run_of_one_rank_is_joined_by_nobody():
    model = network()
    with (
        gg.gossip(model, sgd(list(model.parameters()))) as session,
        pytest.raises(ValueError, match="it began with one rank, which has no links: begin with"),
    ):
        session.invitation()
