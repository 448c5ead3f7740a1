"""Mode stale: a recorded run repeats bit for bit, also from states that were saved on its way."""

import copy
import random
import threading
import time

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Hub
from gossipgrad.decentralized import DeliveryLog, Opening, average_states
from support.ranks import run_ranks
from support.replicas import flat, network, set_gradients, sgd
from support.resuming import assert_same

WORLD_SIZE = 4
ROUNDS = 24


def run_stale(*, seed, modes, states=None, cut=None, rounds=ROUNDS, slow=(0.0, 0.0), **payload):
    """What ranks that are now fast, now slow come to, their logs, and the states of a cut."""
    hub = Hub(WORLD_SIZE)
    together = threading.Barrier(WORLD_SIZE)

    def main(rank, group):
        pace = random.Random(100 * seed + rank)
        model = network(dtype=torch.float64)
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            mode=modes[rank],
            bucket_bytes=200,
            heartbeats=None,  # a lease that runs out on a busy machine would void a round
            **(payload or {"payload": "weights+state"}),
        )
        state, step = None, 0
        with session:
            if states is not None:
                session.load_state_dict(states[rank])
                step = states[rank]["session"]["steps"]
            together.wait()
            while session.position < rounds:
                time.sleep(pace.uniform(*slow) * (4 if rank == 1 else 1))
                set_gradients(model, rank, step)
                optimizer.step()
                step += 1
                if state is None and cut is not None and session.cuts >= cut:
                    state = session.state_dict()
                    together.wait()  # whoever is far behind would come down on a later cut
            moments = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
            came_to = [flat(model), *moments]
            stats = session.stats()
            session.group.barrier()
            log = session.delivery_log
        return came_to, log, state, stats, step

    return run_ranks(WORLD_SIZE, main)


@pytest.fixture(scope="module")
def recorded():
    modes = [gg.Stale(max_staleness=2, cut_every=8, record=True)] * WORLD_SIZE
    return run_stale(seed=1, modes=modes, cut=1, slow=(0.0, 0.002))


def replaying(recorded):
    return [gg.Stale(max_staleness=2, cut_every=8, replay=log) for _, log, *_ in recorded]


def test_a_replay_comes_to_the_same_bits_however_slow_the_ranks_are(recorded):
    again = run_stale(seed=7, modes=replaying(recorded), slow=(0.0, 0.001))
    for rank, (mine, theirs) in enumerate(zip(again, recorded, strict=True)):
        assert_same(mine[0], theirs[0], f"rank {rank}")
        assert mine[4] == theirs[4]
        distances = [stats.consensus_distance_estimate for stats in (mine[3], theirs[3])]
        assert distances[0] == distances[1]
        assert torch.equal(mine[1].tensor(), theirs[1].tensor())


def test_resumed_from_a_cut_a_replay_comes_to_the_same_bits(recorded):
    states = [state for _, _, state, _, _ in recorded]
    assert all(state is not None for state in states)
    assert all(gg.GossipSession.is_complete(state) for state in states)
    resumed = run_stale(seed=8, modes=replaying(recorded), states=states)
    for rank, (mine, theirs) in enumerate(zip(resumed, recorded, strict=True)):
        assert_same(mine[0], theirs[0], f"rank {rank}")
        assert mine[3].torn_rounds == 0


def test_a_run_with_a_shared_mask_goes_on_from_a_cut_to_the_same_bits():
    """What was late is mixed at the coordinates of its own round, also when it is sent again."""
    compress = {"compress": gg.SharedMask(0.25)}
    modes = [gg.Stale(max_staleness=2, cut_every=8, record=True)] * WORLD_SIZE
    once = run_stale(seed=1, modes=modes, cut=1, rounds=16, slow=(0.0, 0.002), **compress)
    states = [state for _, _, state, _, _ in once]
    resumed = run_stale(seed=8, modes=replaying(once), states=states, rounds=16, **compress)
    for rank, (mine, theirs) in enumerate(zip(resumed, once, strict=True)):
        assert_same(mine[0], theirs[0], f"rank {rank}")


def test_a_log_begins_where_a_run_is_resumed_that_was_not_recorded(recorded):
    states = [copy.deepcopy(state) for _, _, state, _, _ in recorded]
    for state in states:
        state["session"]["rounds"]["stale"]["log"] = None
    modes = [gg.Stale(max_staleness=2, record=True)] * WORLD_SIZE
    once = run_stale(seed=2, modes=modes, states=states, rounds=16)
    again = run_stale(seed=3, modes=replaying(once), states=states, rounds=16)
    for rank, (mine, theirs) in enumerate(zip(again, once, strict=True)):
        assert_same(mine[0], theirs[0], f"rank {rank}")


def test_what_a_log_has_forgotten_is_behind_it(recorded):
    """With the states of a run, each a log since the one before, every stretch can be repeated."""
    states = [state for _, _, state, _, _ in recorded]
    logs = []
    for _, log, state, _, _ in recorded:
        kept, saved = DeliveryLog(log.tensor()), state["session"]["rounds"]["stale"]["log"]
        before = len(DeliveryLog(saved))
        kept.forget(before=before)
        assert kept.first == before > 0
        assert len(kept) == len(log)
        assert kept.tensor().numel() == log.tensor().numel() - saved.numel() + 1
        logs.append(kept)
    modes = [gg.Stale(max_staleness=2, replay=log) for log in logs]
    resumed = run_stale(seed=4, modes=modes, states=states)
    for rank, (mine, theirs) in enumerate(zip(resumed, recorded, strict=True)):
        assert_same(mine[0], theirs[0], f"rank {rank}")
    with pytest.raises(gg.GossipError, match=r"the log begins at opening \d+ of its run, and this"):
        run_stale(seed=5, modes=modes)


def test_states_of_a_cut_come_to_their_mean_when_they_are_loaded(recorded):
    """What is saved and owed has the mean that all have once what was under way is mixed.

    That it is the mean of the run: tests/decentralized/test_resume_cuts.py.
    """
    states = [state for _, _, state, _, _ in recorded]
    mean = average_states(states)["model"]
    hub = Hub(WORLD_SIZE)

    def main(rank, group):
        model = network(dtype=torch.float64)
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            mode=gg.Stale(max_staleness=2),
            payload="weights+state",
            bucket_bytes=200,
        ) as session:
            session.load_state_dict(states[rank])
            session.average_()
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    for weights in run_ranks(WORLD_SIZE, main):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, mean[name], rtol=0, atol=1e-12)


def test_a_log_of_another_run_is_refused():
    foreign = DeliveryLog()
    foreign.add(Opening(round=0))
    foreign.add(Opening(round=1, closed=[(7, 0)]))
    hub = Hub(2)

    def main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            mode=gg.Stale(replay=DeliveryLog() if rank else foreign),
        ):
            if rank == 0:
                set_gradients(model, rank, 0)
                with pytest.raises(
                    gg.GossipError, match="mixes bucket 0 of round 7, which rank 0 has not"
                ):
                    optimizer.step()
            group.barrier()

    run_ranks(2, main)


def test_cut_every_counts_rounds():
    with pytest.raises(ValueError, match=r"cut_every counts rounds between states, .* got 0"):
        gg.Stale(cut_every=0)
