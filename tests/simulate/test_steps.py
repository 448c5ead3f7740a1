"""The vectorised steps against hand-made timelines and against one event at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import AllReduce, Gossip, Network, Setting, Workers


def profile_of(elements, *, forward=1.0, backward=1.0, optimizer=0.5):
    count = len(elements)
    return Profile(
        name="made up",
        device="none",
        source="made up",
        batch_size=8,
        forward_seconds=forward,
        optimizer_seconds=optimizer,
        names=tuple(f"layer{count - i}.weight" for i in range(count)),
        elements=tuple(elements),
        backward_seconds=(backward / count,) * count,
    )


def network_of(alpha=0.0, beta=0.0):
    return Network(exchange=AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta))


def ends(strategy, profile, network, p, workers=None, steps=6):
    """When each rank ends each step, shape (steps, p)."""
    running = strategy.begin(Setting(profile=profile, network=network, world_size=p))
    workers = workers or Workers()
    constant, time, found = workers.constant(p), np.zeros(p), []
    for number in range(steps):
        time = running.step(number, time, workers.pace(constant, number))
        found.append(time)
    return np.array(found)


# By hand: compute is 2.5 s, of which forward and backward 1 s each; 100 elements are 400 bytes.


def test_sync_hides_all_but_the_first_of_many_messages():
    """Ten messages of 0.1 s each, as the forward pass takes 0.1 s for each tenth of the model."""
    found = ends(
        Gossip(mode="sync", bucket_bytes=400),
        profile_of([100] * 10),
        network_of(beta=0.1 / 400),
        2,
        steps=2,
    )
    assert found[1] - found[0] == pytest.approx(np.array([2.6, 2.6]))


def test_all_reduce_begins_in_backward():
    """Two layers of 200 bytes, ready at 1.5 and 2.0 s; a ring of two moves 200 bytes in 0.3 s."""
    profile, network = profile_of([50, 50]), network_of(0.05, 0.001)
    apart = AllReduce(bucket_bytes=1, first_bucket_bytes=None)
    found = ends(apart, profile, network, 2, steps=2)
    assert found == pytest.approx(np.array([[2.3 + 0.5] * 2, [5.1 + 0.5] * 2]))
    # In one bucket all of it waits for the end of backward.
    together = ends(AllReduce(), profile, network, 2, steps=1)
    assert together == pytest.approx(np.array([[2.0 + 0.5 + 0.5] * 2]))


@given(
    p=st.integers(2, 500), size=st.integers(1, 10**9), alpha=st.floats(0, 1), beta=st.floats(0, 1)
)
def test_without_jitter_a_ring_is_its_closed_form(p, size, alpha, beta):
    profile = profile_of([size])
    found = ends(AllReduce(), profile, network_of(alpha, beta), p, steps=1)
    ring = 2 * (p - 1) * alpha + 2 * (p - 1) / p * 4 * size * beta
    assert found == pytest.approx(np.full((1, p), 2.0 + ring + 0.5))
