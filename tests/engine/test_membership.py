"""Ranks that die, leave or stand still: the others take up a generation and train on."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group, Hub
from gossipgrad.decentralized import check_settings
from support.deaths import QUICK, fall_silent, run_mortals, take_for_dead
from support.replicas import flat, network, set_gradients, sgd
from support.waiting import until


@pytest.mark.parametrize("dead", [{0}, {2}, {0, 1}, {1, 3}, {0, 1, 2}])
@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_the_living_go_on_among_themselves(mode, dead):
    living = tuple(sorted(set(range(4)) - dead))

    def main(me):
        me.train(4)
        if me.rank in dead:
            me.die()
        me.train_without(*dead)
        before = me.session.stats().outcomes
        me.train(12)
        after = me.session.stats().outcomes
        mean = me.mean()
        me.train(2)
        assert set(me.session.membership.lost) == dead
        assert {*me.session.membership.living} <= {*living}, "some may have left by now"
        return mean, after["dead_peer"] - before["dead_peer"]

    means = [answer for answer in run_mortals(4, main, mode=mode) if answer]
    assert len(means) == len(living)
    for mean, dead_peers in means:
        assert torch.equal(mean, means[0][0])
        assert dead_peers == 0, "nobody is scheduled with the dead any more"


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("deaths", [1, 2])
def test_the_mean_of_the_living_is_kept_when_generations_change(mode, deaths):
    """With no gradients nothing but mixing moves weights, and what the dead sent is counted."""

    def still(model, rank, step):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def main(me):
        model = me.session.replica.model
        with torch.no_grad():  # replicas that differ
            for parameter, other in zip(
                model.parameters(), network(seed=100 + me.rank).parameters(), strict=True
            ):
                parameter.copy_(other)
        me.session.accept_changes()
        me.train(1 if mode == "overlap" else 0)
        if me.rank >= 5 - deaths:
            me.session.group.barrier()
            me.die()
        me.session.group.barrier()
        # Nothing with the dead is open any more; generations are entered at unlike steps.
        me.train_until(lambda: me.session._rounds.channel.gone.keys() >= {*range(5 - deaths, 5)})
        held = me.mean().double()
        me.train_until(lambda: me.session.membership.generation > 0)
        me.train(10 + 3 * me.rank)
        now = me.mean().double()
        assert me.session.stats().outcomes["delivered"] > 5
        return (now - held).abs().max().item(), now

    answers = [answer for answer in run_mortals(5, main, mode=mode, gradients=still) if answer]
    assert max(error for error, _ in answers) < 1e-6


def test_a_rank_that_dies_before_a_collective_is_not_awaited():
    """The others have come already: they meet again without it, and nobody gets an error."""

    def main(me):
        me.train(3)
        if me.rank == 1:
            time.sleep(0.2)
            me.die()
        start = time.monotonic()
        mean = me.mean()
        return mean, time.monotonic() - start, me.session.consensus_distance()

    first, _, *others = run_mortals(4, main)
    for mean, seconds, distance in [first, *others]:
        assert torch.equal(mean, first[0])
        assert seconds < QUICK.silent_seconds
        assert distance == first[2]


def test_a_rank_that_dies_in_the_middle_of_a_collective_is_told_and_it_works_again():
    def main(me):
        me.train(3)
        before = flat(me.session.replica.model)
        if me.rank == 2:
            me.session._averaging.consensus = lambda *_: me.die()
            with me.session.consensus():
                pass
        with (
            pytest.raises(gg.GossipError, match="the collective did not come about: a rank has di"),
            me.session.consensus(),
        ):
            pass
        assert torch.equal(flat(me.session.replica.model), before)
        me.train(5)
        return me.mean()

    first, second, _, fourth = run_mortals(4, main)
    assert torch.equal(first, second)
    assert torch.equal(first, fourth)


@pytest.mark.parametrize("call", ["average_", "broadcast_", "consensus_distance"])
def test_collectives_are_among_the_living(call):
    def main(me):
        me.train(3)
        if me.rank == 0:
            me.die()
        me.train_without(0)
        answer = getattr(me.session, call)()
        weights = flat(me.session.replica.model)
        me.train(3)
        return answer, weights

    _, first, *others = run_mortals(4, main)
    for answer, weights in others:
        assert answer == first[0]
        if call != "consensus_distance":
            assert torch.equal(weights, first[1])


def test_periodic_averages_go_on_among_the_living():
    def main(me):
        me.train(4)
        if me.rank == 3:
            me.die()
        me.train_until(lambda: me.session.membership.generation > 0)
        before = me.session.stats().averages
        me.train_until(lambda: me.session.stats().averages > before + 2)
        return True

    assert run_mortals(4, main, average_every=2) == [True, True, True, None]


def test_a_rank_that_leaves_in_order_is_not_lost():
    """Its links end before it says so: nobody takes it for dead as soon as that."""
    beats = gg.Heartbeats(interval_seconds=0.03, lease_seconds=20.0, silent_seconds=20.0)

    def main(me):
        me.train(3)
        if me.rank == 1:
            return None
        me.train_without(1)
        assert me.session.membership.lost == {}
        assert me.session.membership.gone[1].why == "left"
        mean = me.mean()
        me.session.group.barrier()
        return mean

    first, _, third = run_mortals(3, main, heartbeats=beats)
    assert torch.equal(first, third)


def test_a_rank_that_stood_still_sees_its_eviction_before_it_sends():
    over = threading.Barrier(2)

    def main(me):
        me.train(3)
        channel = me.session._rounds.channel
        if me.rank == 1:
            watch = me.session._members.watch
            fall_silent(me.session)  # as if the process stood still: no beat, no send
            take_for_dead(me.session, 1)
            until(lambda: others and 1 not in others[0]().living, 60)
            watch._confirmed_seconds -= beats.lease_seconds
            watch._stopped = False
            watch.start()
            sent, weights = channel.bytes_sent, flat(me.session.replica.model)
            with pytest.raises(
                gg.EvictedError, match=r"rank 1 was taken for dead .*no sign of life"
            ):
                me.train(1)
            assert channel.bytes_sent == sent
            assert not torch.equal(flat(me.session.replica.model), weights), "the update is kept"
            with pytest.raises(gg.EvictedError), me.session.consensus():
                pass
            over.wait(60)
            return None
        others.append(lambda: me.session.membership)
        me.train_without(1)
        if me.rank == 0:
            over.wait(60)
        return me.mean()

    others = []
    beats = gg.Heartbeats(interval_seconds=0.03, lease_seconds=20.0, silent_seconds=20.0)
    first, _, third = run_mortals(3, main, heartbeats=beats)
    assert torch.equal(first, third)


def test_an_eviction_that_is_learnt_while_a_generation_is_taken_up_is_told_and_enters_nothing():
    def main(me):
        me.train(3)
        me.session.group.barrier()
        if me.rank == 0:
            watch, channel = me.session._members.watch, me.session._rounds.channel
            fall_silent(me.session)  # what it would learn is told here
            renew = watch._renew_lease

            def late():
                # What the thread would learn right after it was asked.
                watch._renew_lease = renew
                watch.latest = watch.latest.without({0: "no sign of life"}, left=False, by=1)

            watch._renew_lease, entered = late, channel.generation
            with pytest.raises(gg.EvictedError, match="rank 0 was taken for dead by rank 1"):
                me.session._members.take_up(me.session._rounds)
            assert channel.generation == me.session.group.generation == entered

            confirm = watch.confirm

            def later():
                watch.confirm, watch.latest = confirm, told
                known = confirm()
                watch.latest = told.without({0: "no sign of life"}, left=False, by=1)
                return known

            told, watch.confirm = me.session._members.current, later
            assert not me.session._members.take_up(me.session._rounds)
            with pytest.raises(gg.EvictedError):
                me.session._members.take_up(me.session._rounds)
            assert channel.generation == me.session.group.generation == entered
            watch.latest = told

    run_mortals(2, main)


def stand_still(me, resumed):
    """As a stopped process: shows no sign of life, and its links stay."""
    fall_silent(me.session)
    assert resumed.wait(60)


def test_a_partner_that_stands_still_holds_a_step_until_it_is_given_up():
    """In a mode that waits, with a deadline far away."""
    resumed = threading.Event()

    def main(me):
        me.train(3)
        if me.rank == 1:
            return stand_still(me, resumed)
        start = time.monotonic()
        me.train_without(1)
        me.train(5)
        resumed.set()
        return time.monotonic() - start

    beats = gg.Heartbeats(interval_seconds=0.03, lease_seconds=0.5, silent_seconds=1.0)
    mode = gg.Sync(deadline_seconds=60.0)
    seconds, _ = run_mortals(2, main, mode=mode, heartbeats=beats)
    assert seconds < 30


def test_a_rank_that_stands_still_on_the_way_to_a_collective_is_not_awaited():
    """Nothing breaks, so Gloo by itself would wait for it."""
    resumed = threading.Event()

    def main(me):
        me.train(3)
        if me.rank == 1:
            until(lambda: come == {0, 2}, 60)
            take_for_dead(me.session, 1)
            return stand_still(me, resumed)
        come.add(me.rank)
        mean = me.mean()
        resumed.set()
        return mean

    come = set()
    first, _, third = run_mortals(3, main)
    assert torch.equal(first, third)


@pytest.mark.parametrize("entered", [False, True])
def test_an_interrupt_while_a_generation_is_taken_up_loses_nothing_of_it(entered):
    def main(me):
        me.train(3)
        me.session.group.barrier()
        if me.rank == 1:
            me.die()
        members, rounds = me.session._members, me.session._rounds
        enter = rounds.channel.enter

        def interrupted(*arguments):
            rounds.channel.enter = enter
            if entered:
                enter(*arguments)
            raise KeyboardInterrupt

        rounds.channel.enter = interrupted
        with pytest.raises(KeyboardInterrupt):
            me.train_until(lambda: False)
        me.train(1)
        taken_up = members.current.generation
        assert rounds.channel.generation == me.session.group.generation == taken_up > 0
        me.train_without(1)
        return me.mean()

    first, _, third = run_mortals(3, main)
    assert torch.equal(first, third)


def test_two_generations_that_are_learnt_at_once():
    def main(me):
        me.train(2)
        if me.rank in (1, 2):
            me.die()
        watch, channel = me.session._members.watch, me.session._rounds.channel
        until(lambda: channel.poll() or watch.latest.living == (0, 3), 60)
        me.train_without(1, 2)
        me.train(4)
        return me.mean()

    first, *_, last = run_mortals(4, main, gradients=set_gradients)
    assert torch.equal(first, last)


def test_without_heartbeats_the_membership_is_fixed():
    def main(me):
        me.train(3)
        if me.rank == 1:
            me.die()
        me.train_until(lambda: me.session.stats().outcomes["dead_peer"])
        with (
            pytest.raises(gg.GossipError, match="a rank has died, left or broken it off"),
            me.session.consensus(),
        ):
            pass
        me.train(3)
        return me.session.membership.generation

    assert run_mortals(3, main, heartbeats=None) == [0, None, 0]


def test_heartbeats_are_a_setting():
    with pytest.raises(ValueError, match=r"heartbeats must be gg.Heartbeats\(...\), or None"):
        check_settings(heartbeats=3)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gg.gossip(model, optimizer) as session:
        assert session.membership.living == (0,)
        assert isinstance(session.group, Group)


def test_a_run_starts_with_those_who_are_there():
    hub, store = Hub(4), dist.HashStore()
    living, means, errors = (0, 2, 3), {}, []

    def main(rank):
        try:
            model = network(seed=rank)
            optimizer = sgd(list(model.parameters()))
            group = Group(store, rank, 4, members=living)
            with gg.gossip(
                model,
                optimizer,
                process_group=group,
                transport=lambda group: hub.transport(group.rank),
                average_every=4,
            ) as session:
                for step in range(10):
                    set_gradients(model, rank, step)
                    optimizer.step()
                assert session.membership.living == living
                assert session.membership.lost[1].why == "it never started"
                outcomes = session.stats().outcomes
                assert outcomes["dead_peer"] == outcomes["late"] == 0
                with session.consensus():
                    means[rank] = flat(model)
                session.group.barrier()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in living]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert torch.equal(means[0], means[2])
    assert torch.equal(means[0], means[3])
