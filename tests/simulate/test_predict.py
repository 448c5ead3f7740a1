"""`predict`: figures that follow from each other, any scale, equal figures for equal arguments."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossipgrad as gg
from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import (
    STRATEGIES,
    AllReduce,
    Gossip,
    Network,
    Setting,
    Sparse,
    Suda,
    Workers,
)

GIGABIT = Network.from_rate(1e9)
FREE = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0))
CRAWLING = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1e301))
RESNET = Profile.load("resnet50")


def step_seconds(strategy, network=GIGABIT, p=8, steps=24, **options):
    return gg.predict(RESNET, network, strategy, world_size=p, steps=steps, **options).step_seconds


@pytest.mark.parametrize("name", STRATEGIES)
def test_figures_follow_from_each_other(name):
    workers = Workers(jitter=0.1)
    found = gg.predict("resnet50", GIGABIT, name, world_size=8, workers=workers, steps=40)
    assert found.strategy == name
    assert found.step_seconds >= found.compute_seconds * (1 - 1e-9)
    assert found.efficiency == pytest.approx(found.compute_seconds / found.step_seconds)
    assert found.exposed_seconds == pytest.approx(found.step_seconds - found.compute_seconds)
    assert found.compute_seconds == pytest.approx(RESNET.compute_seconds, rel=0.05)
    assert step_seconds(name, p=1) == pytest.approx(RESNET.compute_seconds), "one rank never waits"


@pytest.mark.parametrize(
    ("strategy", "p", "models"),
    [
        ("local", 8, 0),
        ("gossip", 8, 1),
        (Gossip(topology="matching"), 5, 4 / 5),  # one has no partner
        (Gossip(every=2), 8, 1 / 2),
        (Gossip(element_bytes=2), 8, 1 / 2),
        ("gossip-mask", 8, 0.1),
        ("local-steps", 8, 1 / 32),
        (Gossip(mode="sync", exchanges=2), 8, 2),
        (Gossip(mode="sync", exchanges=2, overlap=True), 8, 2),
        (Gossip(state_copies=2), 8, 3),
        ("allreduce", 8, 2 * 7 / 8),
        ("suda", 8, 3),  # trackers, weights, directions
        ("suda", 1, 0),
        (Suda(element_bytes=2), 8, 1.5),
    ],
)
def test_bytes_are_those_that_each_rank_sends(strategy, p, models):
    found = gg.predict(RESNET, GIGABIT, strategy, world_size=p, steps=48)
    assert found.bytes_sent_per_step / RESNET.size_bytes == pytest.approx(models, rel=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_free_network_and_equal_ranks_leave_compute_alone(name):
    """Also with sparse gradients, whose selection costs time: all are then sent whole."""
    found = gg.predict("gpt2", FREE, name, world_size=16, steps=16)
    assert found.efficiency == pytest.approx(1)


@pytest.mark.parametrize("p", [2, 16])
def test_a_sparse_step_of_even_ranks_is_that_of_the_plan(p):
    strategy = Sparse(density=0.001)
    plan, _ = strategy.plan(RESNET, GIGABIT, p)
    outside = RESNET.forward_seconds + RESNET.optimizer_seconds
    assert step_seconds(strategy, p=p) == pytest.approx(outside + plan.finish_seconds)
    assert plan.names == RESNET.names


def test_sparse_bytes_do_not_grow_with_the_ranks_above_8():
    sent = {
        p: gg.predict(RESNET, GIGABIT, Sparse(), world_size=p, steps=8).bytes_sent_per_step
        for p in (16, 64)
    }
    assert sent[64] == pytest.approx(sent[16], rel=0.1)


def test_backward_hides_the_second_exchange():
    """On links where an exchange takes a tenth of the compute."""
    seconds = [
        gg.predict(RESNET, Network.from_rate(8e10), Gossip(mode="sync", **options), world_size=8)
        for options in ({}, {"exchanges": 2, "overlap": True}, {"exchanges": 2})
    ]
    one, hidden, two = (found.step_seconds for found in seconds)
    assert one == pytest.approx(hidden, rel=1e-3)
    assert two > 1.02 * one


def test_stale_gossip_never_waits_and_skips_rounds_for_which_its_link_has_no_time():
    workers = Workers(jitter=0.1, stragglers=1, straggler_factor=5.0)
    slow, fast = (
        gg.predict(
            RESNET,
            Network.from_rate(rate),
            "gossip-stale",
            world_size=8,
            workers=workers,
            steps=48,
        )
        for rate in (5e8, 1e11)
    )
    alone = step_seconds("local", p=8, steps=48, workers=workers)
    assert slow.step_seconds == pytest.approx(alone, rel=0.02)
    assert fast.bytes_sent_per_step > slow.bytes_sent_per_step > 0


def ends(strategy, network, p, workers, steps=12):
    """When each rank ends each step; the mean of a stretch of them may move either way."""
    running = strategy.begin(Setting(profile=RESNET, network=network, world_size=p))
    constant, at, found = workers.constant(p), np.zeros(p), []
    for number in range(steps):
        at = running.step(number, at, workers.pace(constant, number))
        found.append(at)
    return np.array(found)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(list(STRATEGIES)),
    p=st.integers(2, 40),
    jitter=st.sampled_from([0.0, 0.2]),
    rate=st.floats(1e7, 1e11),
    latency=st.floats(0, 1e-2),
    worse=st.floats(1, 10),
    what=st.sampled_from(["rate", "latency", "worker"]),
)
def test_a_worse_network_or_worker_never_makes_a_step_end_sooner(
    name, p, jitter, rate, latency, worse, what
):
    before = Network.from_rate(rate, latency_seconds=latency)
    after = {
        "rate": Network.from_rate(rate / worse, latency_seconds=latency),
        "latency": Network.from_rate(rate, latency_seconds=latency * worse),
    }.get(what, before)
    workers = Workers(jitter=jitter, stragglers=1, straggler_factor=1.0)
    slower = replace(workers, straggler_factor=worse) if what == "worker" else workers
    strategy = STRATEGIES[name]
    assert (ends(strategy, after, p, slower) >= ends(strategy, before, p, workers) - 1e-9).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: gg.predict("resnet5", GIGABIT, "local", world_size=2),
        lambda: gg.predict(RESNET, GIGABIT, "gosip", world_size=2),
        lambda: gg.predict(RESNET, GIGABIT, "local", world_size=0),
        lambda: gg.predict(RESNET, GIGABIT, "local", world_size=2, steps=0),
        lambda: gg.predict(RESNET, CRAWLING, "gossip", world_size=2, steps=3),
        lambda: Network.from_rate(0.0),
        lambda: Network.from_rate(1e9, latency_seconds=-1.0),
        *(
            lambda options=options: Gossip(**options)
            for options in (
                {"mode": "lagged"},
                {"every": 0},
                {"state_copies": -1},
                {"element_bytes": 0},
                {"density": 2.0},
                {"density": 0.5, "state_copies": 1},
                {"exchanges": 2},
                {"mode": "sync", "overlap": True},
                {"mode": "stale", "topology": "dissemination"},
            )
        ),
        lambda: AllReduce(bucket_bytes=0),
        lambda: Sparse(density=0.0),
        lambda: Suda(bucket_bytes=0),
        lambda: Workers(stragglers=-1),
        lambda: Workers(jitter=9.0),
        lambda: Workers(stragglers=3).constant(2),
        lambda: Profile.of_size(0, 1.0),
        lambda: Profile.of_size(10, 0.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match=r"."):
        make()
