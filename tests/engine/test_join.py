"""One that joins a run: with a member's replica, at the others' round, held up by nobody."""

import threading

import pytest
import torch

from gossipgrad.engine import _donor
from support.joining import run_open
from support.replicas import adam, flat
from support.waiting import until


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "overlap", "encrypt": False},
        {"mode": "sync", "encrypt": True},
        {"mode": "stale", "every": 2},
        {"mode": "overlap", "payload": "weights+state", "average_every": 4},
        {"mode": "overlap", "compress": "shared-mask:0.25", "seed": 1},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_joiner_takes_a_members_replica_and_trains_with_the_others(settings, secret):
    def member(me, run):
        me.train(6)
        me.session.carry = {"epoch": 2 + me.rank}
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(lambda: 3 in me.session.membership.living)
        return go_on(me)

    def joiner(me, run):
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
    answers = run_open(3, member, joiner, **settings)
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


def test_what_the_donor_has_is_what_the_joiner_gets():
    """Weights, moments, step counters and hyper-parameters, as between two of its steps.

    And what the loop carries: bytes, and numbers that are not quite plain.
    """

    def member(me, run):
        me.train(3)
        optimizer = me.session.replica.optimizers[0]
        optimizer.param_groups[0]["lr"] = 0.125
        before = {}

        def carry():
            before["weights"] = flat(me.session.replica.model)
            before["moments"] = [s["exp_avg"].clone() for s in optimizer.state.values()]
            random = torch.get_rng_state().numpy().tobytes()
            return {"steps": me.session.position, "random": random, "shape": torch.Size([2])}

        me.session.carry = carry
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(taken.is_set)
        return before or None

    def joiner(me, run):
        optimizer = me.session.replica.optimizers[0]
        carried = me.session.joined_with
        assert me.session.position >= carried["steps"]
        assert isinstance(carried["random"], bytes)
        assert carried["shape"] == (2,)
        state = list(optimizer.state.values())
        taken.set()
        return (
            flat(me.session.replica.model),
            [s["exp_avg"].clone() for s in state],
            optimizer.param_groups[0]["lr"],
            {float(s["step"]) for s in state},
            carried["steps"],
        )

    taken = threading.Event()
    *members, (weights, moments, lr, counters, steps) = run_open(2, member, joiner, optimizer=adam)
    (given,) = filter(None, members)
    assert torch.equal(weights, given["weights"])
    assert all(map(torch.equal, moments, given["moments"]))
    assert lr == 0.125
    assert counters == {float(steps)}


@pytest.mark.parametrize("mode", ["overlap", "stale"])
def test_nobody_is_held_up_by_a_transfer_that_takes_long(mode, monkeypatch):
    """It waits for the script; the others, the donor too, make steps meanwhile."""
    flowing, begun = threading.Event(), threading.Event()
    save = torch.save

    def slow(copy, buffer):
        if threading.current_thread().name == "gossipgrad-donor":
            begun.set()
            assert flowing.wait(60.0)
        save(copy, buffer)

    monkeypatch.setattr(_donor.torch, "save", slow)

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

    def joiner(me, run):
        until(lambda: made == {0, 1}, 60.0)
        me.train_until(lambda: me.session.stats().outcomes["delivered"] > 0)
        stepped.set()
        return me.session.position - max(began.values())

    made, began, stepped = set(), {}, threading.Event()
    first, second, leap = run_open(2, member, joiner, mode=mode)
    for late, exposed in (first, second):
        assert late == 0
        assert exposed < 5.0
    assert leap >= 30, "its position is that of the others again"


@pytest.mark.parametrize("collective", ["consensus", "average_"])
def test_collectives_before_during_and_after_entering(collective):
    """Rank 1 waits in one already as somebody joins: all meet again, with the joiner."""

    def call(me):
        if collective == "consensus":
            return me.mean()
        me.session.average_()
        return flat(me.session.replica.model)

    def member(me, run):
        me.train(3)
        answers = [call(me)]
        if me.rank == 1:  # it makes no step, and gives nothing
            answers.append(call(me))
        else:
            me.train(3)
            if me.rank == 0:
                run.invite(me.session)
            me.train_until(lambda: 3 in me.session.membership.living)
            answers.append(call(me))
        return finish(me, answers)

    def joiner(me, run):
        return finish(me, [call(me)])

    def finish(me, answers):
        me.train(2)
        answers.append(call(me))
        me.session.group.barrier()
        return answers

    answers = run_open(3, member, joiner)
    assert [len(each) for each in answers] == [3, 3, 3, 2]
    for each in answers:
        for mine, other in zip(reversed(each), reversed(answers[0]), strict=False):
            assert torch.equal(mine, other)
