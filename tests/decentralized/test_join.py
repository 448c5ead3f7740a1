"""One that joins a run: with a member's replica, at the others' round, held up by nobody."""

import threading

import pytest
import torch

from gossipgrad.comm import ParcelEnd
from gossipgrad.decentralized import _taking
from support.joining import run_open
from support.replicas import adam, flat
from support.waiting import until


@pytest.fixture(autouse=True)
def patient_newcomers(monkeypatch):
    """Who joins asks nobody else, however long a busy donor takes."""
    monkeypatch.setattr(_taking, "_COPY_SECONDS", 60.0)
    monkeypatch.setattr(_taking, "_LEAST_ANSWER_SECONDS", 60.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "overlap"},
        {"mode": "sync", "encrypt": True},
        {"mode": "stale", "every": 2},
        {"mode": "overlap", "topology": "dissemination"},
        {"mode": "overlap", "payload": "weights+state", "average_every": 4},
        {"mode": "overlap", "compress": "shared-mask:0.25", "seed": 1},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_newcomer_takes_a_members_replica_and_trains_with_the_others(settings):
    def member(me, run):
        me.train(6)
        me.session.carry = {"epoch": 2 + me.rank}
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(lambda: 3 in me.session.membership.living)
        return go_on(me)

    def newcomer(me, run):
        assert me.session.rank == 3
        assert me.session.world_size == 3
        donor = me.session.membership.joined[3].donor
        assert me.session.joined_from == donor
        assert me.session.joined_with == {"epoch": 2 + donor}
        assert me.session.position >= 5
        return go_on(me)

    def go_on(me):
        mixed = me.session.stats().outcomes["delivered"]
        me.train_until(lambda: me.session.stats().outcomes["delivered"] > mixed + 10)
        met.add(me.session.rank)
        me.train_until(lambda: met == {0, 1, 2, 3})
        mean = me.mean()
        if me.session.rank == me.session.membership.joined[3].donor:  # a thread of its own counts
            until(lambda: me.session.stats().replicas_given, 60.0)
        stats, position = me.session.stats(), me.session.position
        me.session.group.barrier()
        return mean, me.session.membership, position, stats

    met = set()
    answers = run_open(3, member, newcomer, **settings)
    for mean, membership, position, _ in answers:
        assert torch.equal(mean, answers[0][0])
        assert membership.joined.keys() == {3}
        assert membership.joined[3].generation == membership.generation == 1
        assert membership.lost == {}
        assert abs(position - answers[0][2]) <= 4 * settings.get("every", 1)
    given = [stats.replicas_given for *_, stats in answers]
    assert sum(given) == 1
    assert given[answers[0][1].joined[3].donor] == 1
    assert all(
        (stats.giving_seconds > 0) == bool(n) for n, (*_, stats) in zip(given, answers, strict=True)
    )


def test_what_the_donor_has_is_what_the_newcomer_gets():
    """Weights, moments, step counters and hyper-parameters, as between two of its steps."""

    def member(me, run):
        me.train(3)
        optimizer = me.session._optimizers[0]
        optimizer.param_groups[0]["lr"] = 0.125
        before = {}

        def carry():
            before["weights"] = flat(me.session._model)
            before["moments"] = [s["exp_avg"].clone() for s in optimizer.state.values()]
            return {"steps": me.session.position}

        me.session.carry = carry
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(taken.is_set)
        return before or None

    def newcomer(me, run):
        optimizer = me.session._optimizers[0]
        assert me.session._steps >= me.session.joined_with["steps"]
        state = list(optimizer.state.values())
        taken.set()
        return (
            flat(me.session._model),
            [s["exp_avg"].clone() for s in state],
            optimizer.param_groups[0]["lr"],
            {float(s["step"]) for s in state},
            me.session.joined_with["steps"],
        )

    taken = threading.Event()
    *members, (weights, moments, lr, counters, steps) = run_open(
        2, member, newcomer, optimizer=adam
    )
    (given,) = filter(None, members)
    assert torch.equal(weights, given["weights"])
    assert all(map(torch.equal, moments, given["moments"]))
    assert lr == 0.125
    assert counters == {float(steps)}


@pytest.mark.parametrize("mode", ["overlap", "stale"])
def test_nobody_is_held_up_by_a_transfer_that_takes_long(mode, monkeypatch):
    """Its pieces wait for the script; the others, the donor too, make steps meanwhile."""
    flowing, begun = threading.Event(), threading.Event()
    send = ParcelEnd.send

    def slowly(self, tree):
        begun.set()
        while not flowing.wait(0.05):
            self.send_sign()
        send(self, tree)

    monkeypatch.setattr(ParcelEnd, "send", slowly)

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(begun.is_set)
        before = me.session.stats()
        me.train(30)
        after = me.session.stats()
        assert me.session.membership.generation == 0
        if mode != "stale":
            assert after.late_rounds == before.late_rounds
        assert after.giving_seconds == before.giving_seconds, "one copy, made before"

        def delivered():
            return me.session.stats().outcomes["delivered"] - before.outcomes["delivered"]

        if mode == "stale":  # steps wait for nobody: some make all 30 before others begin
            me.train_until(lambda: delivered() > 5)
        assert delivered() > 5
        made.add(me.rank)
        me.train_until(lambda: made == {0, 1, 2})
        flowing.set()
        me.train_until(lambda: 3 in me.session.membership.joined)

    made = set()
    run_open(3, member, lambda me, run: None, mode=mode)


@pytest.mark.parametrize("mode", ["overlap", "sync", "stale"])
def test_nobody_waits_for_one_that_has_joined_and_makes_no_step_yet(mode):
    """Deadlines are half a minute: a single wait would be seen."""

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(lambda: 2 in me.session.membership.living)
        before, began[me.rank] = me.session.stats(), me.session.position
        me.train(40)
        after = me.session.stats()
        exposed = after.exposed_seconds - before.exposed_seconds
        made.add(me.rank)
        me.train_until(stepped.is_set)
        me.train(3)
        return after.late_rounds - before.late_rounds if mode != "stale" else 0, exposed

    def newcomer(me, run):
        until(lambda: made == {0, 1}, 60.0)
        me.train_until(lambda: me.session.stats().outcomes["delivered"] > 0)
        stepped.set()
        return me.session.position - max(began.values())

    made, began, stepped = set(), {}, threading.Event()
    first, second, leap = run_open(2, member, newcomer, mode=mode)
    for late, exposed in (first, second):
        assert late == 0
        assert exposed < 5.0
    assert leap >= 30, "its position is that of the others again"


@pytest.mark.parametrize("collective", ["consensus", "average_", "consensus_distance"])
def test_collectives_before_during_and_after_entering(collective, monkeypatch):
    """Rank 1 waits in one already, twice, as somebody joins: all meet again, with the newcomer."""
    monkeypatch.setattr(_taking, "_COPY_SECONDS", 0.2)  # rank 1 makes no step, and gives nothing

    def call(me):
        if collective == "consensus":
            return me.mean()
        if collective == "average_":
            me.session.average_()
            return flat(me.session._model)
        return torch.tensor(me.session.consensus_distance())

    def settled(me):
        return me.session._rounds.channel._ledgers[1].known

    def member(me, run):
        me.train(3)
        answers = [call(me)]
        for newcomer in range(2):
            if me.rank == 1:
                answers.append(call(me))
                continue
            before = 1 - newcomer  # collectives of the generation that were had
            me.train_until(lambda n=before: settled(me) > n)
            if me.rank == 0:
                run.invite(me.session, newcomer)
            me.train_until(lambda n=newcomer: 3 + n in me.session.membership.living)
            answers.append(call(me))
        me.train(2)
        answers.append(call(me))
        me.session.group.barrier()
        return answers

    def newcomer(me, run):
        answers = []
        if me.session.rank == 3:
            answers.append(call(me))
            me.train_until(lambda: settled(me) > 0)
            me.train_until(lambda: 4 in me.session.membership.living)
        answers.append(call(me))
        me.train(2)
        answers.append(call(me))
        me.session.group.barrier()
        return answers

    answers = run_open(3, member, newcomer, newcomers=2)
    assert [len(each) for each in answers] == [4, 4, 4, 3, 2]
    for each in answers:
        for mine, other in zip(reversed(each), reversed(answers[0]), strict=False):
            assert torch.equal(mine, other)
