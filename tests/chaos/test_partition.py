"""A network that falls in two: the half with the store goes on without the other."""

import contextlib
import threading

import pytest

import gossipgrad as gg
from gossipgrad.comm import Hub
from support.deaths import take_for_dead
from support.hanging_store import Hanging
from support.ranks import run_ranks
from support.replicas import flat, network, set_gradients, sgd
from support.storm import Storm, StormyTransport
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until

HEARTBEATS = gg.Heartbeats(interval_seconds=0.03, lease_seconds=0.3, silent_seconds=NEVER_SECONDS)


def test_of_two_halves_the_one_with_the_store_goes_on_and_the_other_learns_it():
    storm, hub = Storm(4, "matching", "", 30.0, ()), Hub(4)
    together, parted = threading.Barrier(4), threading.Barrier(4)
    seen = {}

    def rank_main(rank, group):
        here = rank < 2
        model = network()
        optimizer = sgd(list(model.parameters()))
        step = 0

        def train():
            nonlocal step
            set_gradients(model, rank, step)
            optimizer.step()
            step += 1

        def train_until(condition):
            until(lambda: train() or condition())

        evicted = pytest.raises(gg.EvictedError, match=f"rank {rank} was taken for dead")
        with (
            contextlib.nullcontext() if here else evicted,
            gg.gossip(
                model,
                optimizer,
                topology="matching",
                # Longer than a lease: who lost time over that is still met in the same round.
                mode=gg.Overlap(patience_seconds=0.35),
                process_group=group,
                transport=lambda _: StormyTransport(hub.transport(rank), storm),
                heartbeats=HEARTBEATS,
            ) as session,
        ):
            train_until(lambda: step == 5)
            together.wait(HANG_SECONDS)
            storm.part({0, 1}, {2, 3})
            watch = session._members.watch
            if not here:
                watch._store = Hanging(watch._store)
            together.wait(HANG_SECONDS)  # who is given up must not read it in the store
            if rank == 0:  # it would see no sign of life of these
                take_for_dead(session, 2)
                take_for_dead(session, 3)
            train_until(lambda: session.membership.living == (0, 1) if here else watch.store_lost)
            delivered = session.stats().outcomes["delivered"]
            train_until(lambda: session.stats().outcomes["delivered"] > delivered + 3)
            seen[rank] = session.membership.generation
            parted.wait(HANG_SECONDS)
            if here:
                return session.membership.lost.keys()
            storm.heal()
            learned = step
            watch._store.answers.set()
            train_until(lambda: False)
        assert step >= learned
        assert flat(model).isfinite().all()
        return None

    answers = run_ranks(4, rank_main)
    assert answers[:2] == [{2, 3}, {2, 3}]
    assert seen[0] == seen[1] > 0
    assert seen[2] == seen[3] == 0


def test_silent_partners_may_hold_all_snapshots_of_mode_stale_and_steps_go_on():
    storm, hub = Storm(3, "matching", "", 0.0, ()), Hub(3)
    healed, goes_on = threading.Barrier(3), set()

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            mode=gg.Stale(max_staleness=0),
            process_group=group,
            transport=lambda _: StormyTransport(hub.transport(rank), storm),
            heartbeats=None,
        ) as session:

            def delivered_in(steps):
                before = session.stats().outcomes["delivered"]
                for step in range(steps):
                    set_gradients(model, rank, step)
                    optimizer.step()
                return session.stats().outcomes["delivered"] - before

            group.barrier()
            storm.part({0, 1}, {2})
            # One may have made all its steps before another: what had come by then counts once.
            for _ in range(3):
                delivered_in(30)
                group.barrier()
            stuck = delivered_in(10) if rank < 2 else 0
            healed.wait(HANG_SECONDS)
            storm.heal()
            until(lambda: goes_on.update([rank] * delivered_in(1)) or len(goes_on) == 3)
        return stuck

    assert run_ranks(3, rank_main)[:2] == [0, 0]
