"""`predict`: figures that follow from each other, any scale, equal figures for equal arguments."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.planning import PROFILES, AffineCost, PiecewiseCost, Profile
from gossipgrad.simulate import (
    STRATEGIES,
    AllReduce,
    CountCost,
    Gossip,
    Local,
    Merged,
    Network,
    PeriodicAverage,
    Racks,
    Setting,
    Steps,
    Strategy,
    Suda,
    Workers,
    predict,
    strategy_by_name,
)
from gossipgrad.simulate._sharing import shared_finish

GIGABIT = Network(exchange=AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=5e-5))
CRAWLING = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1e301))
RESNET = Profile.load("resnet50")


@pytest.mark.parametrize("name", STRATEGIES)
def test_figures_follow_from_each_other(name):
    found = predict(RESNET, GIGABIT, name, world_size=8, workers=Workers(jitter=0.1), steps=40)
    assert found.strategy == name
    assert found.profile == "resnet50"
    assert found.steps >= 40
    assert found.step_seconds >= found.compute_seconds * (1 - 1e-9)
    assert found.efficiency == pytest.approx(found.compute_seconds / found.step_seconds)
    assert found.exposed_seconds == pytest.approx(found.step_seconds - found.compute_seconds)
    assert found.samples_per_second == pytest.approx(8 * RESNET.batch_size / found.step_seconds)
    assert found.compute_seconds == pytest.approx(RESNET.compute_seconds, rel=0.05)


def test_bytes_are_what_each_rank_sends():
    size = RESNET.size_bytes

    def sent(strategy, profile=RESNET, p=8):
        found = predict(profile, GIGABIT, strategy, world_size=p, steps=48)
        return found.bytes_sent_per_step / size

    assert sent("local") == 0
    assert sent("gossip") == 1
    assert sent(Gossip(topology="matching"), p=5) == pytest.approx(4 / 5)  # one sits out
    assert sent(Gossip(every=2)) == 1 / 2
    assert sent(Gossip(element_bytes=2)) == 1 / 2
    assert sent(Gossip(state_every=4, state_copies=2)) == pytest.approx(1.5)
    adam = replace(RESNET, state_copies=2)
    assert sent(Gossip(state_every=4), adam) == pytest.approx(1.5)
    once = sent("every-log-p", replace(RESNET, state_copies=0))
    assert sent("every-log-p") == pytest.approx(2 * once)
    assert sent("every-log-p", adam) == pytest.approx(3 * once)
    for name in ("allreduce", "agd"):
        assert sent(name) == pytest.approx(2 * 7 / 8)
    assert sent("every-log-p") == pytest.approx(2 * 2 * 7 / 8 / 3)
    assert sent("post-local-sgd") == pytest.approx(2 * 7 / 8 / 16)
    assert sent(Gossip(average_every=4)) == pytest.approx(1 + 2 * 7 / 8 / 4)
    assert sent("suda") == 3  # trackers, weights, directions
    assert sent(Suda(backbone="demuon", element_bytes=2)) == 1
    ring = Suda(backbone="ed", topology="ring")
    assert sent(ring) == pytest.approx(4) == sent(ring, p=5)  # to two neighbours
    assert sent(ring, p=2) == 2
    assert sent("suda", p=1) == 0
    with_state = Gossip(average_every=4, state_every=4, state_copies=2)
    assert sent(with_state) == pytest.approx(1.5 + 3 * 2 * 7 / 8 / 4)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_free_network_and_equal_ranks_leave_compute_alone(profile, name):
    free = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0))
    strategy = strategy_by_name(name)
    if isinstance(strategy, Merged):  # selection costs time without a network, too
        nothing = CountCost(0.0, 0.0)
        strategy = replace(strategy, select=nothing, decode=nothing)
    found = predict(Profile.load(profile), free, strategy, world_size=16, steps=16)
    assert found.efficiency == pytest.approx(1)


def test_gossip_costs_the_same_at_any_scale_and_hides_what_fits():
    quick = Network(exchange=AffineCost.from_rate(rate_bits_per_second=1e10, latency_seconds=5e-5))
    for p in (2, 33, 1024):
        assert predict(RESNET, quick, "gossip", world_size=p, steps=30).efficiency > 0.999
        slow = predict(RESNET, GIGABIT, "gossip", world_size=p, steps=30)
        assert slow.step_seconds == pytest.approx(GIGABIT.exchange(RESNET.size_bytes), rel=1e-3)


def test_suda_hides_its_weights_behind_backward_and_refuses_what_sessions_do():
    exchange = GIGABIT.exchange(RESNET.size_bytes)
    for strategy, exposed in (
        (Suda(), 2 * exchange + max(0, exchange - RESNET.compute_seconds)),
        (Suda(mode="sync"), 3 * exchange),
        (Suda(backbone="demuon"), 2 * exchange),
        (Suda(backbone="ed", topology="ring"), 4 * exchange),
    ):
        found = predict(RESNET, GIGABIT, strategy, world_size=8, steps=20)
        assert found.exposed_seconds == pytest.approx(exposed, rel=0.01)
    with pytest.raises(ValueError, match="ring"):
        Suda(backbone="ed")


def test_a_hundred_thousand_ranks_take_seconds():
    start = time.process_time()
    workers = Workers(jitter=0.1, stragglers=3, straggler_factor=2.0)
    found = predict(RESNET, GIGABIT, "gossip", world_size=100_000, workers=workers, steps=17)
    assert time.process_time() - start < 20
    # One slow rank slows all that wait for each other, within a few rounds.
    assert found.step_seconds > 1.5 * RESNET.compute_seconds


def test_many_ranks_that_all_meet_each_other_are_not_awaited_until_they_have():
    """All rounds in which they do are stepped through only where that is not too many."""
    assert predict(RESNET, GIGABIT, Gossip(topology="complete"), world_size=64, steps=3).steps == 63
    complete = Gossip(topology="complete", state_every=4)
    found = predict(RESNET, GIGABIT, complete, world_size=20_001, steps=3)
    assert found.steps == 4  # of the rounds with state as many as in the long run
    both = RESNET.size_bytes * 5 / 4 * (20_000 / 20_001)  # one rank sits out
    assert found.bytes_sent_per_step == pytest.approx(both)
    slow = predict(RESNET, GIGABIT, Gossip(topology="complete"), world_size=20_000, steps=3)
    assert slow.step_seconds == pytest.approx(GIGABIT.exchange(RESNET.size_bytes), rel=1e-3)


def ends(strategy, network, p, workers, steps=12):
    """When each rank ends each step; the mean of a stretch of them may move either way."""
    running = strategy.begin(Setting(profile=RESNET, network=network, world_size=p))
    constant, at, found = workers.constant(p), np.zeros(p), []
    for number in range(steps):
        at = running.step(number, at, workers.pace(constant, number))
        found.append(at)
    return np.array(found)


WORKERS = st.builds(
    Workers,
    jitter=st.sampled_from([0.0, 0.2]),
    stragglers=st.integers(0, 2),
    straggler_factor=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 9),
)
STRATEGY = st.sampled_from(STRATEGIES).map(strategy_by_name)


@settings(max_examples=15, deadline=None)
@given(
    strategy=STRATEGY,
    p=st.integers(2, 40),
    workers=WORKERS,
    rate=st.floats(1e7, 1e11),
    latency=st.floats(0, 1e-2),
    worse=st.floats(1, 10),
    what=st.sampled_from(["rate", "latency", "host", "own", "link"]),
)
def test_a_worse_network_never_makes_a_step_end_sooner(
    strategy, p, workers, rate, latency, worse, what
):
    before = AffineCost.from_rate(rate_bits_per_second=rate, latency_seconds=latency)
    network = after = Network(exchange=before)
    if what == "rate":
        cost = AffineCost.from_rate(rate_bits_per_second=rate / worse, latency_seconds=latency)
        after = Network(exchange=cost)
    elif what == "latency":
        after = Network(exchange=replace(before, alpha_seconds=latency * worse))
    elif what == "host":
        after = Network(exchange=before, slow_hosts={p - 1: worse})
    elif what == "own":
        after = Network(exchange=before, mix_seconds_per_byte=1e-10 * worse)
    else:
        link = replace(before, beta_seconds_per_byte=before.beta_seconds_per_byte * worse)
        after = Network(exchange=before, links={(0, 1): link})
    assert (ends(strategy, after, p, workers) >= ends(strategy, network, p, workers) - 1e-9).all()


@settings(max_examples=10, deadline=None)
@given(strategy=STRATEGY, p=st.integers(2, 40), seed=st.integers(0, 9), factor=st.floats(1, 5))
def test_slower_ranks_never_make_a_step_end_sooner(strategy, p, seed, factor):
    plain = Workers(jitter=0.2, seed=seed)
    slower = replace(plain, stragglers=1, straggler_factor=factor)
    later, earlier = (ends(strategy, GIGABIT, p, workers) for workers in (slower, plain))
    assert (later >= earlier - 1e-9).all()


def test_equal_arguments_give_equal_figures_and_other_seeds_others():
    workers = Workers(jitter=0.3, stall_probability=0.05, stall_seconds=1.0, seed=3)
    for name in ("gossip", "allreduce"):
        found = [
            predict(RESNET, GIGABIT, name, world_size=9, workers=each, steps=30)
            for each in (workers, workers, replace(workers, seed=4))
        ]
        assert found[0] == found[1]
        assert found[0] != found[2]


def test_jitter_costs_all_reduce_the_slowest_of_all_and_gossip_less():
    free = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0))
    workers = Workers(jitter=0.2)
    found = {
        name: predict(RESNET, free, name, world_size=512, workers=workers, steps=60).efficiency
        for name in ("gossip", "allreduce", "post-local-sgd", "local")
    }
    assert found["allreduce"] < found["gossip"] < found["local"]
    assert found["allreduce"] < found["post-local-sgd"] < found["local"]


def test_stalls_and_stragglers_are_those_asked_for():
    workers = Workers(stragglers=2, straggler_factor=3.0, stall_probability=0.5, stall_seconds=7.0)
    constant = workers.constant(1000)
    assert sorted(constant)[-3:] == [1, 3, 3]
    pace = workers.pace(constant, 0)
    assert set(pace.stall_seconds) == {0, 7}
    assert 400 < (pace.stall_seconds > 0).sum() < 600
    jitter = Workers(jitter=0.3)
    drawn = jitter.pace(jitter.constant(200_000), 5).factor
    assert drawn.mean() == pytest.approx(1, abs=0.01)
    assert np.log(drawn).std() == pytest.approx(0.3, abs=0.01)


def shared(start, uplink, size=100.0, rate=10.0, alone=10.0):
    return shared_finish(
        np.array(start, dtype=np.float64),
        np.array(uplink, dtype=np.int64),
        size_bytes=size,
        uplink_bytes_per_second=rate,
        flow_bytes_per_second=alone,
    ).tolist()


def test_flows_share_an_uplink_while_they_overlap():
    assert shared([0.0, 0.0], [0, 1]) == [10, 10]
    assert shared([0.0, 0.0], [0, 0]) == [20, 20]
    # Alone until 5, then both at half: 50 left of the first take until 15, then the second alone.
    assert shared([0.0, 5.0], [4, 4]) == [15, 20]
    assert shared([5.0, 0.0], [4, 4]) == [20, 15]
    assert shared([0.0, 10.0], [0, 0]) == [10, 20]
    assert shared([0.0, 0.0, 0.0], [0, 0, 0], rate=20.0) == pytest.approx([15, 15, 15])
    assert shared([0.0, 0.0], [0, 0], rate=1000.0) == [10, 10]
    assert shared([], []) == []


@settings(max_examples=10, deadline=None)
@given(
    flows=st.lists(st.tuples(st.floats(0, 50), st.integers(0, 2)), min_size=1, max_size=12),
    rate=st.sampled_from([5.0, 12.0, 1000.0]),
)
def test_shared_uplinks_are_what_small_steps_of_time_come_to(flows, rate):
    start, uplink = (np.array(each) for each in zip(*flows, strict=True))
    fast = shared(start, uplink, rate=rate)
    left, at, tick = np.full(len(flows), 100.0), 0.0, 0.05
    end = np.full(len(flows), np.inf)
    while np.isinf(end).any():
        for which in set(uplink):
            present = (uplink == which) & (start <= at) & (left > 0)
            left[present] -= tick * min(10.0, rate / max(1, present.sum()))
        at += tick
        end[(left <= 0) & np.isinf(end)] = at
    assert fast == pytest.approx(end.tolist(), abs=2.0)


def test_a_thin_uplink_costs_gossip_more_than_the_ring_that_crosses_it_once():
    racks = Racks(size=8, uplink_bits_per_second=1e9)
    thin = replace(GIGABIT, racks=racks)
    for strategy in (Gossip(topology="matching"), AllReduce()):
        plain = predict(RESNET, GIGABIT, strategy, world_size=32, steps=30).step_seconds
        behind = predict(RESNET, thin, strategy, world_size=32, steps=30).step_seconds
        if isinstance(strategy, AllReduce):
            assert behind == plain
        else:
            # Most pairs of a round cross; those of one rack share what one host has.
            assert 3 * plain < behind < 8.5 * plain


def test_a_strategy_of_ones_own():
    class Steady(Steps):
        def step(self, number, start, pace):
            return start + 2.0

    class Own(Strategy):
        name = "own"

        def begin(self, setting):
            return Steady()

    found = predict(RESNET, GIGABIT, Own(), world_size=3, steps=5)
    assert found.strategy == "own"
    assert found.step_seconds == pytest.approx(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: predict(RESNET, GIGABIT, "gosip", world_size=2),
            "no strategy 'gosip' is modelled",
        ),
        (lambda: predict(RESNET, GIGABIT, "local", world_size=0), "world size 0 is out of range"),
        (
            lambda: predict(RESNET, GIGABIT, "local", world_size=2, steps=0),
            "step through 1 or more",
        ),
        (
            lambda: predict(RESNET, replace(GIGABIT, slow_hosts={4: 2.0}), "local", world_size=4),
            "names rank 4, but there are 4 ranks",
        ),
        (lambda: replace(GIGABIT, slow_hosts={4: 0.0}), "give a rank and a factor above 0"),
        (
            lambda: replace(GIGABIT, links={(0, 1): GIGABIT.exchange, (1, 0): GIGABIT.exchange}),
            "names a pair twice",
        ),
        (lambda: replace(GIGABIT, collective="tree"), "choose ring or halving"),
        (lambda: replace(GIGABIT, mix_seconds_per_byte=-1.0), "mix_seconds_per_byte is -1"),
        (lambda: Racks(size=0, uplink_bits_per_second=1.0), "a rack of 0 ranks"),
        (lambda: Racks(size=1, uplink_bits_per_second=0.0), "moves nothing"),
        (lambda: Gossip(mode="lagged"), "mode 'lagged' is not modelled: choose overlap, sync"),
        (lambda: Gossip(every=0), "every is 0: it must be 1 or more, a whole number"),
        (lambda: Gossip(state_every=-1), "state_every is -1: it must be 0 or more"),
        (lambda: Gossip(average_every=0), "average_every is 0: it must be 1 or more"),
        (lambda: Gossip(average_every=-3), "average_every is -3: it must be 1 or more"),
        (lambda: Gossip(element_bytes=0), "element_bytes is 0: it must be 1 or more"),
        (lambda: Gossip(element_bytes=-2), "element_bytes is -2: it must be 1 or more"),
        (lambda: Gossip(seed=-1), "seed is -1: it must be 0 or more"),
        (lambda: AllReduce(element_bytes=-2), "element_bytes is -2: it must be 1 or more"),
        (lambda: AllReduce(first_bucket_bytes=-1), "first_bucket_bytes is -1: it must be 1"),
        (lambda: PeriodicAverage(state_copies=-1), "state_copies is -1: it must be 0 or more"),
        (lambda: AllReduce(buckets="tensor"), "choose size or layer"),
        (lambda: AllReduce(at_once=0), "at_once is 0: it must be 1 or more"),
        (lambda: PeriodicAverage(every="log"), "give a number of steps, or 'log_p'"),
        (lambda: PeriodicAverage(every=0), "every is 0: it must be 1 or more"),
        (
            lambda: predict(RESNET, CRAWLING, Gossip(), world_size=2, steps=3),
            "takes more seconds than can be counted",
        ),
        (lambda: Workers(stragglers=-1), "-1 stragglers"),
        (lambda: Workers(stall_probability=2.0), "from 0 to 1"),
        (lambda: Workers(stragglers=3).constant(2), "3 stragglers among 2 ranks"),
    ],
)
def test_mistakes_name_value_and_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        max_size=30,
        unique_by=lambda pair: frozenset(pair),
    ),
    flows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
)
def test_every_pair_has_its_own_cost(pairs, flows):
    links = {
        pair: AffineCost(alpha_seconds=1.0 + place, beta_seconds_per_byte=0.0)
        for place, pair in enumerate(pairs)
    }
    senders, receivers = (np.array([f[end] for f in flows], dtype=np.int64) for end in (0, 1))
    alphas, betas = replace(GIGABIT, links=links).link_costs(senders, receivers)
    for (a, b), alpha, beta in zip(flows, alphas, betas, strict=True):
        cost = links.get((a, b)) or links.get((b, a)) or GIGABIT.exchange
        assert (alpha, beta) == (cost.alpha_seconds, cost.beta_seconds_per_byte)


def test_a_network_is_itself_again_after_json():
    cost = AffineCost(alpha_seconds=1e-4, beta_seconds_per_byte=2e-9)
    network = Network(
        exchange=cost,
        hop=replace(cost, alpha_seconds=3e-4),
        all_reduce=PiecewiseCost(sizes=(4.0, 8.0), seconds=(1.0, 2.0)),
        links={(0, 1): cost, (0, 2): replace(cost, alpha_seconds=0.05)},
        snapshot_seconds_per_byte=1e-10,
        mix_seconds_per_byte=3e-10,
        world_size=3,
    )
    assert Network.from_json(network.to_json()) == network
    shared = replace(network, slow_hosts={2: 4.0}, racks=Racks(size=2, uplink_bits_per_second=1e9))
    for other in (shared, replace(network, collective="halving")):
        assert Network.from_json(json.loads(json.dumps(other.to_json()))) == other
    bare = {"slow_hosts", "racks", "collective"}
    held = {key: value for key, value in network.to_json().items() if key not in bare}
    assert Network.from_json(held) == network
    assert Network.from_json(network.to_json() | {"hosts": ["a", "b", "c"]}) == network
    assert Network.from_json(replace(network, hop=None).to_json()).hop is None
    # The curve stands for the ranks that it was measured with, on links as they were then.
    assert network.all_reduce_seconds(8, 3) == 2
    for other in (
        replace(network, world_size=4),
        replace(network, slow_hosts={0: 1.0}),
        replace(network, collective="halving"),
        replace(network, racks=Racks(size=2, uplink_bits_per_second=1e12)),
    ):
        assert other.all_reduce_seconds(8, 3) < 2
    assert Local().name == "local"


def test_a_gather_goes_at_the_pace_of_its_slowest_link():
    hop = AffineCost(alpha_seconds=1e-4, beta_seconds_per_byte=8e-9)
    assert Network(exchange=hop).all_gather_seconds(1000, 1) == 0
    assert Network(exchange=hop).all_gather_seconds(1000, 4) == pytest.approx(3 * hop(1000))
    slow = Network(exchange=hop, slow_hosts={2: 5.0})
    assert slow.all_gather_seconds(1000, 4) == pytest.approx(3 * hop(5000))
    racks = Network(exchange=hop, racks=Racks(size=2, uplink_bits_per_second=1e8))
    assert racks.all_gather_seconds(1000, 4) == pytest.approx(3 * hop(10_000))
    own = Network(exchange=hop, hop=AffineCost(alpha_seconds=1.0, beta_seconds_per_byte=0.0))
    assert own.all_gather_seconds(1000, 4) == 3
