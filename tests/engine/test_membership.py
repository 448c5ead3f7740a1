"""Ranks that die, leave or hang: the others take up a generation and train on."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group, Hub
from support.deaths import fall_silent, run_mortals, take_for_dead
from support.ranks import run_ranks
from support.replicas import flat, network, set_gradients, sgd
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until

PATIENT = gg.Heartbeats(
    interval_seconds=0.03, lease_seconds=NEVER_SECONDS, silent_seconds=NEVER_SECONDS
)


def all_equal(means):
    means = [mean for mean in means if mean is not None]
    return all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.parametrize(
    ("mode", "dead"),
    [
        *(("overlap", dead) for dead in ({0}, {2}, {0, 1}, {1, 3}, {0, 1, 2})),
        *(("sync", dead) for dead in ({0}, {1, 3})),
    ],
)
def test_the_living_go_on_among_themselves(mode, dead):
    living = {0, 1, 2, 3} - dead

    def main(me):
        me.train(4)
        if me.rank in dead:
            me.die()
        me.train_without(*dead)
        before = me.session.stats().outcomes
        me.train(12)
        after = me.session.stats().outcomes
        mean = me.mean()
        assert set(me.session.membership.lost) == dead
        assert {*me.session.membership.living} <= living, "some may have left by now"
        assert after["dead_peer"] == before["dead_peer"], "nobody is scheduled with the dead"
        return mean

    means = run_mortals(4, main, mode=mode)
    assert sum(mean is not None for mean in means) == len(living)
    assert all_equal(means)


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
        me.train(1 if mode == "overlap" else 0)
        me.session.group.barrier()
        if me.rank >= 5 - deaths:
            me.die()
        # Nothing with the dead is open any more; generations are entered at unlike steps.
        me.train_until(lambda: me.session._rounds.channel.gone.keys() >= {*range(5 - deaths, 5)})
        before = me.mean().double()
        me.train_until(lambda: me.session.membership.generation > 0)
        me.train(10 + 3 * me.rank)
        assert me.session.stats().outcomes["delivered"] > 5
        return (me.mean().double() - before).abs().max().item()

    errors = run_mortals(5, main, mode=mode, gradients=still)
    assert max(error for error in errors if error is not None) < 1e-6


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_rank_that_dies_around_a_collective(when):
    """Before: those who have come already meet again, without an error. Else it works again."""

    def main(me):
        me.train(3)
        weights = flat(me.session.replica.model)
        if me.rank == 1:
            time.sleep(0.2)
            if when == "before":
                me.die()
            me.session._averaging.means = lambda *_: me.die()
            me.mean()
        if when == "in the middle":
            with pytest.raises(gg.GossipError, match="a rank has died, left or broken it off"):
                me.mean()
        assert torch.equal(flat(me.session.replica.model), weights)
        return me.mean()

    means = run_mortals(4, main)
    assert means[1] is None
    assert all_equal(means)


@pytest.mark.parametrize("when", ["before it connects", "in the middle"])
def test_a_second_loss_inside_a_collective_costs_no_more_than_the_first(when):
    """Links tell of it while the others wait; for its silence alone nobody is given up."""

    def main(me):
        me.train(6)
        me.session.group.barrier()
        if me.rank == 3:
            me.die()
        if me.rank == 2 and when == "before it connects":
            me.session.group.enter = lambda *_: me.die()
        if me.rank == 2 and when == "in the middle":
            me.session._averaging.means = lambda *_: me.die()
        while True:
            try:
                return me.mean()
            except gg.GossipError:
                if me.rank == 2:
                    raise  # its own death

    assert all_equal(run_mortals(4, main)[:2])


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
        return weights if call != "consensus_distance" else torch.tensor(answer)

    assert all_equal(run_mortals(4, main))


def test_a_rank_that_was_stopped_sees_its_eviction_before_it_sends():
    over = threading.Barrier(2)

    def main(me):
        me.train(3)
        if me.rank == 1:
            watch, channel = me.session._members.watch, me.session._rounds.channel
            fall_silent(me.session)  # as if the process was stopped: no beat, no send
            take_for_dead(me.session, 1)
            until(lambda: others and 1 not in others[0]().living)
            watch._confirmed_seconds -= PATIENT.lease_seconds
            watch._stopped = False
            watch.start()
            sent, weights = channel.bytes_sent, flat(me.session.replica.model)
            with pytest.raises(gg.EvictedError, match="rank 1 was taken for dead"):
                me.train(1)
            assert channel.bytes_sent == sent
            assert not torch.equal(flat(me.session.replica.model), weights), "the update is kept"
            with pytest.raises(gg.EvictedError):
                me.mean()
            over.wait(HANG_SECONDS)
            return None
        others.append(lambda: me.session.membership)
        me.train_without(1)
        if me.rank == 0:
            over.wait(HANG_SECONDS)
        return me.mean()

    others = []
    assert all_equal(run_mortals(3, main, heartbeats=PATIENT))


@pytest.mark.parametrize("where", ["a step", "a collective"])
def test_a_rank_that_hangs_holds_the_others_up_until_it_is_given_up(where):
    """Nothing breaks: its links and connections stay."""
    resumed = threading.Event()

    def main(me):
        me.train(3)
        if me.rank == 1:
            fall_silent(me.session)
            time.sleep(0.2)  # the others wait
            take_for_dead(me.session, 1)
            assert resumed.wait(HANG_SECONDS)
            return None
        if where == "a step":  # in a mode that waits, with a deadline far away
            me.train_without(1)
            me.train(5)
        mean = me.mean()
        resumed.set()
        return mean

    means = run_mortals(3, main, mode=gg.Sync(patience_seconds=NEVER_SECONDS), heartbeats=PATIENT)
    assert all_equal(means)


def test_without_heartbeats_the_membership_is_fixed():
    def main(me):
        me.train(3)
        if me.rank == 1:
            me.die()
        me.train_until(lambda: me.session.stats().outcomes["dead_peer"])
        with pytest.raises(gg.GossipError, match="a rank has died, left or broken it off"):
            me.mean()
        me.train(3)
        return me.session.membership.generation

    assert run_mortals(3, main, heartbeats=None) == [0, None, 0]


def test_a_run_starts_with_those_who_are_there():
    hub, living = Hub(4), (0, 2, 3)

    def main(place, shared):
        rank = living[place]
        model = network(seed=rank)
        optimizer = sgd(list(model.parameters()))
        group = Group(dist.PrefixStore("mine", shared.store), rank, 4, members=living)
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
                mean = flat(model)
            session.group.barrier()
        return mean

    assert all_equal(run_ranks(3, main))
