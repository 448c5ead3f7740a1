"""One that joins a run: with a member's replica, at the others' round, held up by nobody."""

import threading

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import replica_state
from support.joining import run_open
from support.replicas import adam, flat
from support.waiting import HANG_SECONDS, until


def delivered(me):
    return me.session.stats().outcomes["delivered"]


def mix(me, mixed, number):
    """Trains until so many ranks have mixed with others a few times."""
    before = delivered(me)
    me.train_until(lambda: delivered(me) > before + 5)
    mixed.add(me.session.rank)
    me.train_until(lambda: len(mixed) == number)


def all_equal(means):
    return all(torch.equal(mean, means[0]) for mean in means)


@pytest.fixture
def sending(monkeypatch):
    """When donors have begun to send, and whether they may."""
    begun, flowing, save = threading.Event(), threading.Event(), torch.save

    def slow(copy, buffer):
        if threading.current_thread().name == "gossipgrad-donor":
            begun.set()
            assert flowing.wait(HANG_SECONDS)
        save(copy, buffer)

    monkeypatch.setattr(torch, "save", slow)
    return begun, flowing


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "overlap"},
        {"mode": "sync"},
        {"mode": gg.Sync(momentum=0.9), "exchanges": 2},
        {"mode": gg.Sync(momentum=0.9, overlap=True), "exchanges": 2},
        {"mode": "stale", "every": 2},
        {"mode": "overlap", "payload": "weights+state", "average_every": 4},
        {"mode": "overlap", "local_steps": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_joiner_takes_a_members_replica_and_trains_with_the_others(settings, secret):
    def member(me, run):
        me.train(6)
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(lambda: 3 in me.session.membership.living)
        return go_on(me)

    def joiner(me, run):
        assert (me.session.rank, me.session.world_size, me.session.joined_from) == (3, 3, 0)
        assert me.session.position >= 5
        return go_on(me)

    def go_on(me):
        mix(me, met, 4)
        position, round = me.session.position, me.session.round_number
        assert position // round_steps * settings.get("exchanges", 1) == round
        mean = me.mean()
        me.session.group.barrier()
        return mean, me.session.membership, position

    met = set()
    round_steps = settings.get("every") or settings.get("local_steps", 1)
    means, memberships, positions = zip(*run_open(3, member, joiner, **settings), strict=True)
    assert all_equal(means)
    for membership in memberships:
        assert membership.joined.keys() == {3}
        assert membership.joined[3].generation == membership.generation == 2
        assert membership.joined[3].donor == 0
        assert membership.lost == {}
    assert max(positions) - min(positions) <= 4 * round_steps


def test_what_the_donor_has_is_what_the_joiner_gets(monkeypatch):
    """Weights, moments, step counters and hyper-parameters, as between two of its steps."""
    sent, save = [], torch.save

    def noting(copy, buffer):
        sent.append(copy)
        save(copy, buffer)

    monkeypatch.setattr(torch, "save", noting)

    def member(me, run):
        me.train(3)
        me.session.replica.optimizers[0].param_groups[0]["lr"] = 0.125
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(taken.is_set)

    def joiner(me, run):
        taken.set()
        assert me.session.position >= sent[0]["position"]["steps"]
        return replica_state(me.session.replica.model, me.session.replica.optimizers)

    taken = threading.Event()
    *_, got = run_open(2, member, joiner, optimizer=adam)
    (given,) = sent
    assert got["optimizers"][0]["groups"][0]["lr"] == 0.125
    leaves = [torch.utils._pytree.tree_leaves(each) for each in (got, given["replica"])]
    for here, there in zip(*leaves, strict=True):
        assert torch.equal(here, there) if isinstance(here, torch.Tensor) else here == there


@pytest.mark.parametrize("mode", ["overlap", "stale"])
def test_nobody_is_held_up_by_a_transfer_that_takes_long(mode, sending):
    """It waits for the script; the others, the donor too, make steps and meet in a collective."""
    begun, flowing = sending

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(begun.is_set)
        before = me.session.stats()
        me.train(30)
        after = me.session.stats()
        assert after.late_rounds == before.late_rounds or mode == "stale"
        me.mean()
        assert me.session.membership.living == (0, 1, 2)
        made.add(me.rank)
        me.train_until(lambda: made == {0, 1, 2})
        flowing.set()
        me.train_until(joined.is_set)

    made, joined = set(), threading.Event()
    run_open(3, member, lambda me, run: joined.set(), mode=mode)


@pytest.mark.parametrize("mode", ["overlap", "sync", "stale"])
def test_nobody_waits_for_one_that_has_joined_and_makes_no_step_yet(mode):
    """A single wait would count as a late round."""

    def member(me, run):
        if me.rank == 0:
            run.invite(me.session)
        me.train_until(lambda: 2 in me.session.membership.living)
        before, began[me.rank] = me.session.stats(), me.session.position
        me.train(40)
        after = me.session.stats()
        made.add(me.rank)
        me.train_until(stepped.is_set)
        me.train(3)
        assert after.late_rounds == before.late_rounds or mode == "stale"

    def joiner(me, run):
        until(lambda: made == {0, 1})
        me.train_until(lambda: delivered(me) > 0)
        stepped.set()
        return me.session.position - max(began.values())

    made, began, stepped = set(), {}, threading.Event()
    *_, leap = run_open(2, member, joiner, mode=mode)
    assert leap >= 30, "its position is that of the others again"


def test_collectives_before_during_and_after_entering():
    """Rank 1 waits in one already as somebody joins: all meet again, with the joiner."""

    def call(me):
        me.session.average_()
        return flat(me.session.replica.model)

    def member(me, run):
        me.train(3)
        answers = [call(me)]
        if me.rank != 1:  # which makes no step
            me.train(3)
            if me.rank == 0:
                run.invite(me.session)
            me.train_until(lambda: 3 in me.session.membership.living)
        return finish(me, answers)

    def finish(me, answers):
        answers.append(call(me))
        me.train(2)
        answers.append(call(me))
        me.session.group.barrier()
        return answers

    answers = run_open(3, member, lambda me, run: finish(me, []))
    assert [len(each) for each in answers] == [3, 3, 3, 2]
    for together in zip(*map(reversed, answers), strict=False):
        assert all_equal(together)


@pytest.mark.parametrize("mode", ["overlap", pytest.param("stale", marks=pytest.mark.slow)])
def test_three_become_six_at_once_and_two_are_left(mode):
    """Three join together; then one of each kind dies, one of each leaves, and the rest go on."""

    def life(me):
        rank = me.session.rank
        me.train_until(lambda: len(me.session.membership.living) == 6)
        mix(me, among_six, 6)
        grown[rank] = me.mean()
        me.session.group.barrier()
        if rank in (0, 5):
            me.die()
        me.train_until(lambda: {0, 5} <= me.session.membership.lost.keys())
        if rank in (1, 3):
            return None
        me.train_until(lambda: me.session.membership.living == (2, 4))
        mix(me, among_two, 2)
        mean = me.mean()
        me.session.group.barrier()
        return mean, me.session.membership

    def member(me, run):
        me.train(3)
        if me.rank == 0:
            run.invite(me.session)
        return life(me)

    grown, among_six, among_two = {}, set(), set()
    answers = run_open(3, member, lambda me, run: life(me), newcomers=3, mode=mode)
    assert grown.keys() == {0, 1, 2, 3, 4, 5}
    assert all_equal([*grown.values()])
    (first, membership), (second, _) = filter(None, answers)
    assert torch.equal(first, second)
    assert membership.joined.keys() == {3, 4, 5}
    assert set(membership.lost) == {0, 5}
    assert membership.gone[1].left
    assert membership.gone[3].left
