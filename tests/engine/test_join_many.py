"""A run that grows and shrinks: 3 to 6, and down to 2, by deaths and by leaving."""

import pytest
import torch

from support.joining import run_open


@pytest.mark.parametrize("mode", ["overlap", "stale"])
def test_three_become_six_at_once_and_two_are_left(mode):
    """Three join together; then one of each kind dies, one of each leaves, and the rest go on."""

    def mix(me, mixed, number):
        """Trains until all have mixed with others a few times, in the generation that there is."""
        before = me.session.stats().outcomes["delivered"]
        me.train_until(lambda: me.session.stats().outcomes["delivered"] > before + 5)
        mixed.add(me.session.rank)
        me.train_until(lambda: len(mixed) == number)

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
    for mean in grown.values():
        assert torch.equal(mean, grown[0])
    (first, membership), (second, _) = filter(None, answers)
    assert torch.equal(first, second)
    assert membership.joined.keys() == {3, 4, 5}
    assert set(membership.lost) == {0, 5}
    assert membership.gone[1].left
    assert membership.gone[3].left


def test_a_number_is_never_given_twice_and_newcomers_invite_others():
    def member(me, run):
        if me.rank == 0:
            run.invite(me.session, 0)
        me.train_until(lambda: 3 in me.session.membership.joined)
        me.train_until(lambda: done)
        read.append(me.session.membership)
        return read[-1]

    def newcomer(me, run):
        rank = me.session.rank
        if rank == 2:
            run.invite(me.session, 1)
            me.train_until(lambda: 3 in me.session.membership.living)
            return
        me.train_until(lambda: 2 in me.session.membership.gone)
        assert me.session.membership.joined.keys() == {2, 3}
        me.train_until(lambda: me.session.stats().outcomes["delivered"] > 3)
        done.append(rank)
        me.train_until(lambda: len(read) == 2)  # who is gone has no introduction any more

    done, read = [], []
    membership, *_ = run_open(2, member, newcomer, newcomers=2)
    assert done == [3]
    assert membership.joined[2].introduction == (), "who is gone listens nowhere"
    assert membership.joined[3].introduction
