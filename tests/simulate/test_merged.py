"""The time model of merged gradients agrees with the plans, and that of stale gossip waits not."""

import pytest

from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import STRATEGIES, Gossip, Merged, Network, Workers, predict

PROFILE = Profile.load("vgg16")


def network(gigabits=1.0):
    return Network(
        exchange=AffineCost.from_rate(rate_bits_per_second=1e9 * gigabits, latency_seconds=5e-5)
    )


@pytest.mark.parametrize("rule", ["omgs", "topk", "lags", "wfbp", "mg-wfbp"])
@pytest.mark.parametrize("world_size", [2, 16])
def test_a_step_of_even_ranks_is_that_of_the_plan(rule, world_size):
    strategy = Merged(rule=rule, density=0.001)
    found = predict(PROFILE, network(), strategy, world_size=world_size, steps=48)
    plan, _ = strategy.plan(PROFILE, network(), world_size)
    outside = PROFILE.forward_seconds + PROFILE.optimizer_seconds
    assert found.step_seconds == pytest.approx(outside + plan.finish_seconds)


def test_sparse_gradients_send_less_and_pay_on_slow_links():
    sparse = predict(PROFILE, network(), Merged(density=0.001), world_size=16, steps=48)
    dense = predict(PROFILE, network(), "allreduce", world_size=16, steps=48)
    assert sparse.step_seconds < dense.step_seconds
    assert sparse.bytes_sent_per_step < dense.bytes_sent_per_step


def test_one_rank_of_any_strategy_computes_alone():
    for name in STRATEGIES:
        found = predict(PROFILE, network(), name, world_size=1, steps=48)
        assert found.step_seconds == pytest.approx(PROFILE.compute_seconds, rel=0.01), name


def test_stale_gossip_never_waits_and_skips_rounds_that_its_link_cannot_carry():
    workers = Workers(jitter=0.1, stragglers=1, straggler_factor=5.0)
    stale = Gossip(mode="stale", topology="matching")
    slow = predict(PROFILE, network(1.0), stale, world_size=8, steps=48, workers=workers)
    fast = predict(PROFILE, network(100.0), stale, world_size=8, steps=48, workers=workers)
    alone = predict(PROFILE, network(), "local", world_size=8, steps=48, workers=workers)
    assert slow.step_seconds == pytest.approx(alone.step_seconds, rel=0.02)
    assert fast.bytes_sent_per_step > slow.bytes_sent_per_step > 0


def test_a_mask_sends_its_share_and_two_exchanges_send_twice():
    whole, tenth = (
        predict(PROFILE, network(), Gossip(density=density), world_size=8, steps=48)
        for density in (1.0, 0.1)
    )
    assert tenth.bytes_sent_per_step == pytest.approx(0.1 * whole.bytes_sent_per_step)
    one, two = (
        predict(PROFILE, network(), Gossip(mode="sync", exchanges=count), world_size=8, steps=48)
        for count in (1, 2)
    )
    assert two.bytes_sent_per_step == pytest.approx(2 * one.bytes_sent_per_step)
    assert two.step_seconds > one.step_seconds


@pytest.mark.parametrize(
    "make",
    [
        lambda: Merged(rule="best"),
        lambda: Merged(density=0.0),
        lambda: Gossip(density=2.0),
        lambda: Gossip(exchanges=2),
        lambda: Gossip(mode="stale"),
    ],
)
def test_settings_that_cannot_be_are_refused(make):
    with pytest.raises(ValueError, match=r"choose|share|sync|symmetric"):
        make()
