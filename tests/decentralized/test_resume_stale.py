"""Mode stale: states taken together have the mean of the run, and so has a resumed run.

The truth is independent of all mixing: with SGD the mean over ranks is that of the start, less the
rate times the mean of the gradients of all steps.
"""

import random
import time

import pytest
import torch

import gossipgrad as gg
from gossipgrad.decentralized import average_states
from support.replicas import network, plain_sgd
from support.sessions import run_sessions
from support.wires import Wires

WORLD_SIZE = 4
RATE = 0.1
SETTINGS = {
    "state, two steps a round": {"payload": "weights+state", "every": 2},
    "shared mask": {"compress": gg.SharedMask(0.25)},
}


def run_stale(until, *, seed, states=None, **settings):
    """Ranks that are now fast, now slow: states, how far the gradients led, and the last mean."""

    def use(me):
        pace = random.Random(100 * seed + me.rank)
        if states is not None:
            me.session.load_state_dict(states[me.rank])
        me.steps = 1000 * seed
        start, descended = me.weights(), 0.0
        while me.session.position < until:
            time.sleep(pace.uniform(0.0, 0.002) * (4 if me.rank == 1 else 1))
            me.train()
            descended -= RATE * torch.cat([p.grad.flatten() for p in me.model.parameters()])
        before, state = me.session.position, me.session.state_dict()
        assert me.session.position >= before
        mean = me.mean()
        me.train()  # training goes on behind it
        return state, start, descended, mean

    return run_sessions(
        WORLD_SIZE,
        use,
        make=lambda rank: network(seed, dtype=torch.float64),
        optimizer=plain_sgd,
        mode=gg.Stale(max_staleness=2),
        bucket_bytes=200,
        heartbeats=None,  # a lease that runs out on a busy machine would void a round
        **settings,
    )


def expected(found):
    return sum(start + descended for _, start, descended, _ in found) / len(found)


@pytest.mark.parametrize("name", SETTINGS)
def test_states_have_the_mean_of_the_run_and_a_resumed_run_keeps_it(name):
    first = run_stale(12, seed=0, **SETTINGS[name])
    states = [state for state, *_ in first]
    assert [state["session"]["rank"] for state in states] == [0, 1, 2, 3]
    named = average_states(states)["model"]
    mean = torch.cat([named[name].flatten() for name, _ in network().named_parameters()])
    torch.testing.assert_close(mean, expected(first), rtol=0, atol=1e-12)
    torch.testing.assert_close(first[0][3], mean, rtol=0, atol=1e-12)
    resumed = run_stale(24, seed=1, states=states, **SETTINGS[name])
    started = sum(start for _, start, _, _ in resumed) / WORLD_SIZE
    torch.testing.assert_close(started, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(resumed[0][3], expected(resumed), rtol=0, atol=1e-12)


def test_rounds_after_a_load_are_not_as_old_as_those_before_it():
    """Nothing has arrived since the session began, so the loaded rounds were in flight before."""
    mode, wires = gg.Stale(max_staleness=2), Wires(2)
    of_both = {"mode": mode, "heartbeats": None, "leaves_together": False}
    states = run_sessions(2, lambda me: me.session.state_dict(), **of_both)

    def use(me):
        me.train(5 if me.rank == 0 else 0)
        waited = me.session.stats().void_rounds
        me.session.load_state_dict(states[me.rank])
        me.train(mode.max_staleness if me.rank == 0 else 0)
        voids = me.session.stats().void_rounds
        me.group.barrier()
        me.session.__exit__(RuntimeError, None, None)  # waits for nothing
        return waited, voids

    waited, voids = run_sessions(2, use, wrap=lambda end: wires.transport(end.rank), **of_both)[0]
    assert waited > 0
    assert voids == 0
