"""The vectorised steps against hand-made timelines and against one event at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.planning import AffineCost, PiecewiseCost, Profile
from gossipgrad.simulate import AllReduce, Gossip, Local, Network, PeriodicAverage, Setting, Workers
from gossipgrad.topology import by_name
from support import event_heap


def profile_of(elements, *, forward=1.0, backward=1.0, optimizer=0.5, names=None):
    count = len(elements)
    return Profile(
        name="made up",
        device="none",
        source="made up",
        batch_size=8,
        forward_seconds=forward,
        optimizer_seconds=optimizer,
        names=tuple(names or (f"layer{count - i}.weight" for i in range(count))),
        elements=tuple(elements),
        backward_seconds=(backward / count,) * count,
    )


def network_of(alpha=0.0, beta=0.0, **others):
    return Network(exchange=AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta), **others)


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


@pytest.mark.parametrize(
    ("mode", "alpha", "beta", "expected"),
    [
        ("overlap", 0.4, 0.005, [2.5, 5.0]),  # hidden: shorter than a step
        ("overlap", 0.5, 0.01, [4.5, 9.0]),  # as long as the message
        ("sync", 0.5, 0.01, [2.5, 9.5]),  # awaited in the next forward pass
    ],
)
def test_one_message_of_two_ranks(mode, alpha, beta, expected):
    found = ends(Gossip(mode=mode), profile_of([100]), network_of(alpha, beta), 2, steps=2)
    assert found == pytest.approx(np.array([expected] * 2).T)


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
    hop = AffineCost(alpha_seconds=0.05, beta_seconds_per_byte=0.001)
    profile = profile_of([50, 50])
    network = Network(exchange=hop)
    found = ends(AllReduce(buckets="layer"), profile, network, 2, steps=2)
    assert found == pytest.approx(np.array([[2.3 + 0.5] * 2, [5.1 + 0.5] * 2]))
    # In one bucket all of it waits for the end of backward.
    together = ends(AllReduce(), profile, network, 2, steps=1)
    assert together == pytest.approx(np.array([[2.0 + 0.5 + 0.5] * 2]))


def test_start_ups_of_two_all_reduces_pass_at_once_and_their_bytes_do_not():
    """Ready at 1.25, 1.5, 1.75, 2.0 s; a start-up takes 1 s, the bytes of each 0.25 s."""
    hop = AffineCost(alpha_seconds=0.5, beta_seconds_per_byte=0.0025)
    profile, network = profile_of([25] * 4), Network(exchange=hop)

    def end(at_once):
        strategy = AllReduce(buckets="layer", at_once=at_once)
        return ends(strategy, profile, network, 2, steps=1).max() - 0.5

    assert end(1) == pytest.approx(1.25 + 4 * 1.25)
    # Bytes from 2.25, 2.5; the third starts at 2.5, the fourth at 2.75: bytes from 3.5 and 3.75.
    assert end(2) == pytest.approx(4.0)
    # All have started by 3.0, and the link has been free for each at once.
    assert end(4) == pytest.approx(3.25)
    # Where it was measured as 1.25 s whatever the size, its bytes take the links for 0.25 s still.
    flat = PiecewiseCost(sizes=(1.0, 1e6), seconds=(1.25, 1.25))
    network = Network(exchange=hop, all_reduce=flat, world_size=2)
    assert end(4) == pytest.approx(3.25)
    thin = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.01))
    for at_once in (1, 2, 4):
        strategy = AllReduce(buckets="layer", at_once=at_once)
        assert ends(strategy, profile, thin, 2, steps=1).max() == pytest.approx(1.25 + 4.0 + 0.5)


@given(
    p=st.integers(2, 500), size=st.integers(1, 10**9), alpha=st.floats(0, 1), beta=st.floats(0, 1)
)
def test_without_jitter_a_ring_is_its_closed_form(p, size, alpha, beta):
    profile = profile_of([size])
    found = ends(AllReduce(), profile, network_of(alpha, beta), p, steps=1)
    ring = 2 * (p - 1) * alpha + 2 * (p - 1) / p * 4 * size * beta
    assert found == pytest.approx(np.full((1, p), 2.0 + ring + 0.5))


WORKERS = st.builds(
    Workers,
    jitter=st.sampled_from([0.0, 0.1, 0.6]),
    stragglers=st.integers(0, 1),
    straggler_factor=st.sampled_from([1.3, 3.0]),
    stall_probability=st.sampled_from([0.0, 0.2]),
    stall_seconds=st.sampled_from([0.0, 4.0]),
    seed=st.integers(0, 99),
)
COSTS = st.builds(
    lambda alpha, beta: AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta),
    st.sampled_from([0.0, 0.01, 0.7]),
    st.sampled_from([0.0, 1e-4, 3e-3, 2e-2]),
)
ELEMENTS = st.lists(st.integers(1, 200), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(1, 8),
    elements=ELEMENTS,
    cost=COSTS,
    workers=WORKERS,
    options=st.builds(
        Gossip,
        mode=st.sampled_from(["overlap", "sync"]),
        topology=st.sampled_from(["dissemination", "matching", "complete", "ring"]),
        every=st.integers(1, 3),
        average_every=st.sampled_from([None, None, 4]),
        state_every=st.integers(0, 2),
        element_bytes=st.sampled_from([None, 2]),
        bucket_bytes=st.sampled_from([64, 400, 4 << 20]),
        seed=st.just(3),
    ),
    own=st.sampled_from([(0.0, 0.0), (2e-4, 3e-3), (5e-3, 1e-4)]),
    slow=st.booleans(),
)
def test_gossip_is_as_in_single_events(p, elements, cost, workers, options, own, slow):
    other = AffineCost(alpha_seconds=0.3, beta_seconds_per_byte=5e-3)
    network = Network(
        exchange=cost,
        slow_hosts={1: 2.5} if slow and p > 1 and not options.average_every else {},
        links={(0, 1): other} if p > 1 and not options.average_every else {},
        snapshot_seconds_per_byte=own[0],
        mix_seconds_per_byte=own[1],
    )
    profile, steps = profile_of(elements), 7
    run = event_heap.Run(profile, network, p, workers, steps)
    plain = event_heap.gossip(run, options, by_name(options.topology, p, seed=3))
    fast = ends(options, profile, network, p, workers, steps)
    np.testing.assert_allclose(fast, np.array(plain), rtol=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    p=st.integers(1, 8),
    elements=ELEMENTS,
    cost=COSTS,
    workers=WORKERS,
    options=st.builds(
        AllReduce,
        buckets=st.sampled_from(["size", "layer"]),
        bucket_bytes=st.sampled_from([64, 25 << 20]),
        element_bytes=st.sampled_from([None, 2]),
        at_once=st.integers(1, 3),
    ),
)
def test_all_reduce_is_as_its_hops_or_its_threads(p, elements, cost, workers, options):
    profile, network, steps = profile_of(elements), Network(exchange=cost), 5
    plain = event_heap.all_reduce(event_heap.Run(profile, network, p, workers, steps), options)
    fast = ends(options, profile, network, p, workers, steps)
    np.testing.assert_allclose(fast, np.array(plain), rtol=1e-9)


@settings(max_examples=15, deadline=None)
@given(p=st.integers(1, 8), elements=ELEMENTS, cost=COSTS, workers=WORKERS, every=st.integers(1, 3))
def test_averages_are_as_their_hops(p, elements, cost, workers, every):
    profile, network, steps = profile_of(elements), Network(exchange=cost), 6
    options = PeriodicAverage(every=every, state_copies=1)
    buckets = [float(profile.size_bytes)] * 2
    run = event_heap.Run(profile, network, p, workers, steps)
    plain = event_heap.periodic(run, every, buckets if p > 1 else [])
    fast = ends(options, profile, network, p, workers, steps)
    np.testing.assert_allclose(fast, np.array(plain), rtol=1e-9)


def test_a_ring_goes_at_the_pace_of_its_slowest_link():
    network = network_of(alpha=0.01, beta=1e-3, slow_hosts={2: 3.0})
    profile = profile_of([500])
    one = AllReduce(at_once=1)
    plain = event_heap.all_reduce(event_heap.Run(profile, network, 6, Workers(), 1), one)
    fast = ends(one, profile, network, 6, steps=1)
    assert fast.max() == pytest.approx(np.max(plain))


def test_strategies_have_the_same_draws():
    workers = Workers(jitter=0.3, stall_probability=0.1, stall_seconds=2.0, seed=5)
    free = network_of()
    alone = ends(Local(), profile_of([100]), free, 4, workers, steps=1)
    together = ends(PeriodicAverage(every=1), profile_of([100]), free, 4, workers, steps=1)
    assert together[0] == pytest.approx(np.full(4, alone[0].max()))
    assert not np.array_equal(
        alone, ends(Local(), profile_of([100]), free, 4, Workers(jitter=0.3, seed=6), steps=1)
    )
