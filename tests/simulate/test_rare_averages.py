"""Averages that come seldom: in the mean of a step whether or not they are stepped through."""

import pytest

from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import Gossip, Network, Setting, Workers, predict

GIGABIT = Network(exchange=AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=5e-5))
RESNET = Profile.load("resnet50")


@pytest.mark.parametrize("apart", [3, 50, 100, 1000, 10**7])
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


def test_averages_that_are_not_stepped_through_cost_what_they_would(monkeypatch):
    def step_seconds():
        workers = Workers(jitter=0.2, stragglers=1, straggler_factor=1.5)
        strategy = Gossip(average_every=60, every=2)
        found = predict(RESNET, GIGABIT, strategy, world_size=8, workers=workers, steps=960)
        return found.step_seconds

    stepped = step_seconds()
    monkeypatch.setattr("gossipgrad.simulate._gossip_steps._LONGEST_APART", 59)
    assert step_seconds() == pytest.approx(stepped, rel=0.01)
