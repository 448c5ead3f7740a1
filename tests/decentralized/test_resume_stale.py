"""Mode stale: states taken together have the mean of the run, and so has a resumed run.

The truth is independent of all mixing: with SGD the mean over ranks is that of the start, less the
rate times the mean of the gradients of all steps.
"""

import random
import time

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Hub
from gossipgrad.decentralized import average_states
from support.ranks import run_ranks
from support.replicas import flat, network, set_gradients

WORLD_SIZE = 4
RATE = 0.05
SETTINGS = {
    "weights": {},
    "state": {"payload": "weights+state"},
    "shared mask": {"compress": gg.SharedMask(0.25)},
    "two steps a round": {"every": 2},
}


def as_vector(weights):
    return torch.cat([weights[name].flatten() for name, _ in network().named_parameters()])


def run_stale(until, *, seed, states=None, **settings):
    """Ranks that are now fast, now slow: states, how far the gradients led, and the last mean."""
    hub = Hub(WORLD_SIZE)

    def main(rank, group):
        pace = random.Random(100 * seed + rank)
        model = network(seed, dtype=torch.float64)
        start = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            mode=gg.Stale(max_staleness=2),
            bucket_bytes=200,
            heartbeats=None,  # a lease that runs out on a busy machine would void a round
            **settings,
        ) as session:
            if states is not None:
                session.load_state_dict(states[rank])
                start = flat(model)
            descended, steps = torch.zeros_like(start), 0
            while session.position < until:
                time.sleep(pace.uniform(0.0, 0.002) * (4 if rank == 1 else 1))
                set_gradients(model, rank, 1000 * seed + steps)
                descended -= RATE * torch.cat([p.grad.flatten() for p in model.parameters()])
                optimizer.step()
                steps += 1
            before = session.position
            state = session.state_dict()
            assert session.position >= before
            with session.consensus():
                mean = flat(model)
            set_gradients(model, rank, 7)
            optimizer.step()  # training goes on behind it
            session.group.barrier()
        return state, start, descended, mean

    return run_ranks(WORLD_SIZE, main)


def expected(found):
    return sum(start + descended for _, start, descended, _ in found) / len(found)


@pytest.mark.parametrize("name", SETTINGS)
def test_states_have_the_mean_of_the_run_and_a_resumed_run_keeps_it(name):
    first = run_stale(12, seed=0, **SETTINGS[name])
    states = [state for state, *_ in first]
    assert [state["session"]["rank"] for state in states] == [0, 1, 2, 3]
    mean = as_vector(average_states(states)["model"])
    torch.testing.assert_close(mean, expected(first), rtol=0, atol=1e-12)
    torch.testing.assert_close(first[0][3], mean, rtol=0, atol=1e-12)
    resumed = run_stale(24, seed=1, states=states, **SETTINGS[name])
    started = sum(start for _, start, _, _ in resumed) / WORLD_SIZE
    torch.testing.assert_close(started, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(resumed[0][3], expected(resumed), rtol=0, atol=1e-12)
    assert all(state["session"]["next_round"] > 0 for state, *_ in resumed)


def test_the_position_goes_on_where_it_was():
    hub = Hub(2)

    def main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        settings = {
            "process_group": group,
            "transport": lambda group: hub.transport(group.rank),
            "mode": "stale",
        }
        with gg.gossip(model, optimizer, **settings) as session:
            for step in range(5):
                set_gradients(model, rank, step)
                optimizer.step()
            state = session.state_dict()
            position = session.position
            for step in range(3):
                set_gradients(model, rank, step)
                optimizer.step()
            session.load_state_dict(state)
            assert session.position == position >= 5
            set_gradients(model, rank, 9)
            optimizer.step()
            assert session.position > position
            session.group.barrier()

    run_ranks(2, main)
