"""`predict`: figures that follow from each other, any scale, equal figures for equal arguments."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.planning import AffineCost, Profile
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
from gossipgrad.simulate._network import shared_finish  # all uplinks at once: worth its own test


def network_of(gigabits, latency=5e-5, **others):
    cost = AffineCost.from_rate(rate_bits_per_second=1e9 * gigabits, latency_seconds=latency)
    return Network(exchange=cost, **others)


GIGABIT = network_of(1)
FREE = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0))
CRAWLING = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1e301))
RESNET = Profile.load("resnet50")


def step_seconds(strategy, network=GIGABIT, p=8, steps=24, **options):
    found = predict(RESNET, network, strategy, world_size=p, steps=steps, **options)
    return found.step_seconds


@pytest.mark.parametrize("name", STRATEGIES)
def test_figures_follow_from_each_other(name):
    found = predict(RESNET, GIGABIT, name, world_size=8, workers=Workers(jitter=0.1), steps=40)
    assert (found.strategy, found.profile) == (name, "resnet50")
    assert found.steps >= 40
    assert found.step_seconds >= found.compute_seconds * (1 - 1e-9)
    assert found.efficiency == pytest.approx(found.compute_seconds / found.step_seconds)
    assert found.exposed_seconds == pytest.approx(found.step_seconds - found.compute_seconds)
    assert found.samples_per_second == pytest.approx(8 * RESNET.batch_size / found.step_seconds)
    assert found.compute_seconds == pytest.approx(RESNET.compute_seconds, rel=0.05)
    assert step_seconds(name, p=1) == pytest.approx(RESNET.compute_seconds), "one rank never waits"


ADAM = replace(RESNET, state_copies=2)


@pytest.mark.parametrize(
    ("strategy", "p", "profile", "models"),
    [
        ("local", 8, RESNET, 0),
        ("gossip", 8, RESNET, 1),
        (Gossip(topology="matching"), 5, RESNET, 4 / 5),  # one sits out
        (Gossip(every=2), 8, RESNET, 1 / 2),
        (Gossip(element_bytes=2), 8, RESNET, 1 / 2),
        ("gossip-mask", 8, RESNET, 0.1),
        (Gossip(mode="sync", exchanges=2), 8, RESNET, 2),
        (Gossip(state_every=4, state_copies=2), 8, RESNET, 1.5),
        (Gossip(state_every=4), 8, ADAM, 1.5),
        (Gossip(average_every=4), 8, RESNET, 1 + 2 * 7 / 8 / 4),
        (Gossip(average_every=4, state_every=4), 8, ADAM, 1.5 + 3 * 2 * 7 / 8 / 4),
        ("allreduce", 8, RESNET, 2 * 7 / 8),
        ("agd", 8, RESNET, 2 * 7 / 8),
        ("every-log-p", 8, replace(RESNET, state_copies=0), 2 * 7 / 8 / 3),
        ("every-log-p", 8, ADAM, 3 * 2 * 7 / 8 / 3),
        ("post-local-sgd", 8, RESNET, 2 * 7 / 8 / 16),
        ("suda", 8, RESNET, 3),  # trackers, weights, directions
        ("suda", 1, RESNET, 0),
        (Suda(backbone="demuon", element_bytes=2), 8, RESNET, 1),
        (Suda(backbone="ed", topology="ring"), 5, RESNET, 4),  # to two neighbours
        (Suda(backbone="ed", topology="ring"), 2, RESNET, 2),
        (Merged(rule="wfbp"), 8, RESNET, 2 * 7 / 8),
        (Merged(rule="topk", density=0.001), 8, RESNET, 7 * 0.001 * 8 / 4),
    ],
)
def test_bytes_are_those_that_each_rank_sends(strategy, p, profile, models):
    found = predict(profile, GIGABIT, strategy, world_size=p, steps=48)
    assert found.bytes_sent_per_step / RESNET.size_bytes == pytest.approx(models, rel=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_free_network_and_equal_ranks_leave_compute_alone(name):
    strategy = strategy_by_name(name)
    if isinstance(strategy, Merged):  # selection costs time without a network, too
        nothing = CountCost(0.0, 0.0)
        strategy = replace(strategy, select=nothing, decode=nothing)
    found = predict(Profile.load("gpt2"), FREE, strategy, world_size=16, steps=16)
    assert found.efficiency == pytest.approx(1)


def test_gossip_costs_the_same_at_any_scale_and_hides_what_is_shorter_than_compute():
    for p in (2, 33, 1024):
        assert step_seconds("gossip", network_of(10), p) < 1.001 * RESNET.compute_seconds
        exchange = GIGABIT.exchange(RESNET.size_bytes)
        assert step_seconds("gossip", p=p) == pytest.approx(exchange, rel=1e-3)


def test_suda_hides_its_weights_behind_backward():
    exchange = GIGABIT.exchange(RESNET.size_bytes)
    for strategy, exposed in (
        (Suda(), 2 * exchange + max(0, exchange - RESNET.compute_seconds)),
        (Suda(mode="sync"), 3 * exchange),
        (Suda(backbone="demuon"), 2 * exchange),
        (Suda(backbone="ed", topology="ring"), 4 * exchange),
    ):
        found = predict(RESNET, GIGABIT, strategy, world_size=8, steps=20)
        assert found.exposed_seconds == pytest.approx(exposed, rel=0.01)


@pytest.mark.parametrize("rule", ["omgs", "topk", "lags", "wfbp", "mg-wfbp"])
@pytest.mark.parametrize("p", [2, 16])
def test_a_step_of_even_ranks_is_that_of_the_plan(rule, p):
    strategy = Merged(rule=rule, density=0.001)
    plan, _ = strategy.plan(RESNET, GIGABIT, p)
    outside = RESNET.forward_seconds + RESNET.optimizer_seconds
    assert step_seconds(strategy, p=p) == pytest.approx(outside + plan.finish_seconds)


def test_stale_gossip_never_waits_and_skips_rounds_that_its_link_cannot_carry():
    workers = Workers(jitter=0.1, stragglers=1, straggler_factor=5.0)
    slow, fast = (
        predict(RESNET, network_of(rate), "gossip-stale", world_size=8, workers=workers, steps=48)
        for rate in (0.5, 100.0)
    )
    alone = step_seconds("local", p=8, steps=48, workers=workers)
    assert slow.step_seconds == pytest.approx(alone, rel=0.02)
    assert fast.bytes_sent_per_step > slow.bytes_sent_per_step > 0


@pytest.mark.parametrize("apart", [3, 100, 10**7])
def test_averages_are_in_the_mean_however_far_apart_they_are(apart):
    plain, found = (
        predict(RESNET, GIGABIT, Gossip(average_every=every), world_size=8, steps=10)
        for every in (None, apart)
    )
    setting = Setting(profile=RESNET, network=GIGABIT, world_size=8)
    messages = 25  # of 4 MiB
    one = setting.average_seconds([RESNET.size_bytes / messages] * messages)
    assert found.step_seconds - plain.step_seconds == pytest.approx(one / apart, rel=0.02)
    extra = found.bytes_sent_per_step - plain.bytes_sent_per_step
    assert extra == pytest.approx(2 * 7 / 8 * RESNET.size_bytes / apart)


def test_one_slow_rank_of_a_hundred_thousand_slows_them_within_a_few_rounds():
    workers = Workers(jitter=0.1, stragglers=3, straggler_factor=2.0)
    slow = step_seconds("gossip", p=100_000, workers=workers, steps=17)
    assert slow > 1.5 * RESNET.compute_seconds


def test_all_partners_are_stepped_through_only_where_these_are_not_too_many():
    assert predict(RESNET, GIGABIT, Gossip(topology="complete"), world_size=64, steps=3).steps == 63
    complete = Gossip(topology="complete", state_every=4)
    found = predict(RESNET, GIGABIT, complete, world_size=20_001, steps=3)
    assert found.steps == 4  # whole cycles of the rounds with state
    both = RESNET.size_bytes * 5 / 4 * (20_000 / 20_001)  # one rank sits out
    assert found.bytes_sent_per_step == pytest.approx(both)


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


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(STRATEGIES),
    p=st.integers(2, 40),
    workers=WORKERS,
    rate=st.floats(1e-2, 1e2),
    latency=st.floats(0, 1e-2),
    worse=st.floats(1, 10),
    what=st.sampled_from(["rate", "latency", "host", "own", "link", "worker"]),
)
def test_a_worse_network_or_worker_never_makes_a_step_end_sooner(
    name, p, workers, rate, latency, worse, what
):
    network, slower = network_of(rate, latency), workers
    link = network_of(rate / worse, latency).exchange
    after = {
        "rate": network_of(rate / worse, latency),
        "latency": network_of(rate, latency * worse),
        "host": replace(network, slow_hosts={p - 1: worse}),
        "own": replace(network, mix_seconds_per_byte=1e-10 * worse),
        "link": replace(network, links={(0, 1): link}),
    }.get(what, network)
    if what == "worker":
        workers = replace(workers, stragglers=1, straggler_factor=1.0)
        slower = replace(workers, straggler_factor=worse)
    strategy = strategy_by_name(name)
    assert (ends(strategy, after, p, slower) >= ends(strategy, network, p, workers) - 1e-9).all()


def test_equal_arguments_give_equal_figures_and_other_seeds_others():
    workers = Workers(jitter=0.3, stall_probability=0.05, stall_seconds=1.0, seed=3)
    for name in ("gossip", "allreduce"):
        found = [
            step_seconds(name, p=9, workers=each)
            for each in (workers, workers, replace(workers, seed=4))
        ]
        assert found[0] == found[1] != found[2]


def test_jitter_costs_all_reduce_the_slowest_of_all_and_gossip_less():
    workers = Workers(jitter=0.2)
    of = {
        name: step_seconds(name, FREE, 512, workers=workers, steps=60)
        for name in ("gossip", "allreduce", "post-local-sgd", "local")
    }
    assert of["allreduce"] > max(of["gossip"], of["post-local-sgd"])
    assert min(of["gossip"], of["post-local-sgd"]) > of["local"]


def test_stalls_jitter_and_stragglers_are_those_of_the_options():
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


def test_flows_share_an_uplink_while_they_overlap():
    """Ranks 0 and 1 of a rack send 100 bytes each over an uplink as fast as a host."""
    profile = replace(RESNET, names=("w",), elements=(25,), backward_seconds=(1.0,))
    exchange = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1.0)
    sync, pace = Gossip(mode="sync", topology="complete"), Workers()

    def exchange_seconds(uplink_bytes, size=2):
        racks = Racks(size=size, uplink_bits_per_second=8.0 * uplink_bytes)
        network = Network(exchange=exchange, racks=racks)
        running = sync.begin(Setting(profile=profile, network=network, world_size=4))
        at, waits = np.zeros(4), set()
        for number in range(6):  # all partners twice
            before, at = at, running.step(number, at, pace.pace(np.ones(4), number))
            waits.add(round(float((at - before).max() - profile.compute_seconds)))
        return waits

    assert exchange_seconds(1) == {0, 100, 200}, "one round within the racks, two across"
    assert exchange_seconds(1000) == {0, 100}
    assert exchange_seconds(1, size=4) == {0, 100}


@settings(max_examples=10, deadline=None)
@given(
    flows=st.lists(st.tuples(st.floats(0, 50), st.integers(0, 2)), min_size=1, max_size=12),
    rate=st.sampled_from([5.0, 12.0, 1000.0]),
)
def test_shared_uplinks_are_as_in_small_steps_of_time(flows, rate):
    start, uplink = (np.array(each) for each in zip(*flows, strict=True))
    shared = {"uplink_bytes_per_second": rate, "flow_bytes_per_second": 10.0}
    fast = shared_finish(start, uplink, size_bytes=100.0, **shared)
    left, at, tick = np.full(len(flows), 100.0), 0.0, 0.05
    end = np.full(len(flows), np.inf)
    while np.isinf(end).any():
        for which in set(uplink):
            present = (uplink == which) & (start <= at) & (left > 0)
            left[present] -= tick * min(10.0, rate / max(1, present.sum()))
        at += tick
        end[(left <= 0) & np.isinf(end)] = at
    assert fast == pytest.approx(end, abs=2.0)


def test_a_thin_uplink_costs_gossip_more_than_the_ring_that_crosses_it_once():
    thin = replace(GIGABIT, racks=Racks(size=8, uplink_bits_per_second=1e9))
    assert step_seconds("allreduce", thin, 32) == step_seconds("allreduce", GIGABIT, 32)
    plain, behind = (step_seconds(Gossip(topology="matching"), n, 32) for n in (GIGABIT, thin))
    assert 3 * plain < behind < 8.5 * plain, "most pairs of a round cross"


def test_a_strategy_of_ones_own():
    class Steady(Steps):
        def step(self, number, start, pace):
            return start + 2.0

    class Own(Strategy):
        name = "own"

        def begin(self, setting):
            return Steady()

    found = predict(RESNET, GIGABIT, Own(), world_size=3, steps=5)
    assert (found.strategy, found.step_seconds) == ("own", pytest.approx(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: predict(RESNET, GIGABIT, "gosip", world_size=2),
        lambda: predict(RESNET, GIGABIT, "local", world_size=0),
        lambda: predict(RESNET, GIGABIT, "local", world_size=2, steps=0),
        lambda: predict(RESNET, replace(GIGABIT, slow_hosts={4: 2.0}), Local(), world_size=4),
        lambda: predict(RESNET, CRAWLING, Gossip(), world_size=2, steps=3),
        lambda: replace(GIGABIT, slow_hosts={4: 0.0}),
        lambda: replace(GIGABIT, links={(0, 1): GIGABIT.exchange, (1, 0): GIGABIT.exchange}),
        lambda: replace(GIGABIT, collective="tree"),
        lambda: replace(GIGABIT, mix_seconds_per_byte=-1.0),
        lambda: Racks(size=0, uplink_bits_per_second=1.0),
        lambda: Racks(size=1, uplink_bits_per_second=0.0),
        *(
            lambda options=options: Gossip(**options)
            for options in (
                {"mode": "lagged"},
                {"every": 0},
                {"state_every": -1},
                {"average_every": -3},
                {"element_bytes": 0},
                {"seed": -1},
                {"density": 2.0},
                {"density": 0.5, "state_every": 1},
                {"exchanges": 2},
                {"mode": "stale"},
                {"mode": "stale", "topology": "matching", "average_every": 8},
            )
        ),
        lambda: AllReduce(buckets="tensor"),
        lambda: AllReduce(at_once=0),
        lambda: PeriodicAverage(every="log"),
        lambda: PeriodicAverage(every=0),
        lambda: PeriodicAverage(state_copies=-1),
        lambda: Merged(rule="best"),
        lambda: Merged(density=0.0),
        lambda: Suda(backbone="ed"),
        lambda: Workers(stragglers=-1),
        lambda: Workers(jitter=9.0),
        lambda: Workers(stall_probability=2.0),
        lambda: Workers(stragglers=3).constant(2),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match=r"."):
        make()
