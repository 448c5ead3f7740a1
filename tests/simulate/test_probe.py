"""`probe`: costs of live workers, how it ends when one does not answer, and the fits."""

import json
import threading
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gossipgrad.comm import Group, Hub, InProcessTransport, Sent
from gossipgrad.errors import GossipError
from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import SIZES_BYTES, Measured, Network, predict, probe
from gossipgrad.simulate import _measuring as measuring
from gossipgrad.simulate._probe import _fitted
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS, NEVER_SECONDS

# Links inside one process are so fast, or so slow, that messages this small may show no rate.
pytestmark = pytest.mark.filterwarnings("ignore:the network is not fully known")
SIZES = (1 << 10, 1 << 16, 1 << 18)


def test_all_ranks_know_the_cost_of_every_pair():
    found = run_ranks(3, lambda rank, group: probe(group, sizes_bytes=SIZES, budget_seconds=10.0))
    assert found[0] == found[1] == found[2]
    network = found[0].network
    assert sorted(found[0].pairs) == [(0, 1), (0, 2), (1, 2)]
    assert network.world_size == 3
    assert network.hop is not None
    assert network.all_reduce_seconds(1 << 16, 3) == network.all_reduce(1 << 16)
    assert min(network.snapshot_seconds_per_byte, network.mix_seconds_per_byte) > 0
    for cost in (network.exchange, found[0].all_reduce, *found[0].pairs.values()):
        assert cost(SIZES[0]) > 0
    sizes = {one.size_bytes for one in found[0].measured if one.what == "all_reduce"}
    assert sizes >= set(SIZES[:2])
    read = Network.from_json(json.loads(json.dumps(found[0].to_json())))
    assert read == network


class Slowed(InProcessTransport):
    """Takes as long for a message as a link of 10 MB/s with 5 ms to start, and nothing else does.

    Each rank has a time of its own. It has waited for its partner in every exchange that it took.
    """

    here = threading.local()

    def __init__(self, hub, group, sent):
        super().__init__(hub, group.rank)
        self._slow = 1 + 3 * (group.rank == 3)
        self._sent = sent  # by ranks: the moments at which the first had sent to the second
        self._now = 0.0
        self.here.transport = self

    def now(self):
        self._now += 1e-7  # no cost could be fitted to what has taken no time at all
        for (rank, peer), moments in self._sent.items():
            if rank == self.rank and moments:
                self._now = max(self._now, self._sent[peer, rank][len(moments) - 1])
        return self._now

    def send(self, peer, header, payload=None):
        if payload is not None:
            self._now = self.now() + self._slow * (0.005 + payload.nbytes / 1e7)
            self._sent[self.rank, peer].append(self._now)
        return super().send(peer, header, payload)


def test_it_finds_what_links_were_made_to_cost(monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: Slowed.here.transport.now())
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "_MEMORY_BYTES", 1 << 16)
    hub, sent = Hub(4), {pair: [] for pair in permutations(range(4), 2)}
    found = run_ranks(
        4,
        lambda rank, group: probe(
            group,
            sizes_bytes=(1 << 10, 1 << 20),
            budget_seconds=1.0,
            transport=lambda group: Slowed(hub, group, sent),
        ),
    )[0]
    for pair, cost in found.pairs.items():
        slow = 4 if 3 in pair else 1  # who waits for the slow one is slowed, too
        for size in (1 << 10, 1 << 20):
            assert cost(size) == pytest.approx(slow * (0.005 + size / 1e7), rel=1e-3), pair
    assert found.network.links.items() <= found.pairs.items()


class Mute(InProcessTransport):
    """Rank 1 is somewhere else after the start, until the others are done."""

    done = threading.Event()

    def send(self, peer, header, payload=None):
        if self.rank == 1 and payload is not None:
            assert self.done.wait(HANG_SECONDS)
            return Sent()
        return super().send(peer, header, payload)


class Mortal(InProcessTransport):
    """Rank 1 dies after a few messages."""

    sent = 0

    def send(self, peer, header, payload=None):
        self.sent += 1
        if self.rank == 1 and self.sent > 5:
            self.close()
            raise GossipError("dead")
        return super().send(peer, header, payload)


@pytest.mark.parametrize(
    ("kind", "timeout_seconds", "message"),
    [
        (Mute, 2.0, "rank 1 did not answer"),
        (Mortal, NEVER_SECONDS, "rank 1 has died"),
    ],
)
def test_a_worker_that_does_not_answer_is_named_and_nobody_hangs(kind, timeout_seconds, message):
    """Ranks 1 and 2 are the first to exchange."""
    hub = Hub(3)
    Mute.done.clear()

    def measure(rank, group):
        with pytest.raises(GossipError, match=message if rank == 2 else None):
            probe(
                group,
                sizes_bytes=SIZES,
                budget_seconds=1.0,
                timeout_seconds=timeout_seconds,
                transport=lambda group: kind(hub, group.rank),
            )
        assert group.broken is not None
        if rank == 2:
            Mute.done.set()

    run_ranks(3, measure)


@pytest.mark.parametrize(
    "options",
    [
        {"sizes_bytes": (4096,)},
        {"sizes_bytes": (4096, 1024)},
        {"sizes_bytes": (4096, 8191)},
        {"budget_seconds": 0.0},
        {"timeout_seconds": 0.0},
    ],
)
def test_options_that_make_no_sense_are_refused_on_all_ranks(options):
    def measure(rank, group):
        with pytest.raises(ValueError, match=r"sizes|above 0"):
            probe(group, **options)

    run_ranks(2, measure)


def test_one_worker_has_no_link():
    with pytest.raises(ValueError, match="two or more"):
        probe(Group(dist.HashStore(), 0, 1))


PUBLISHED = Path(__file__).parents[2] / "benchmarks/results/network_probes.json"
PAYLOAD_SHARE = 1448 / 1514
MEMORY = {"snapshot_seconds_per_byte": 0.0, "mix_seconds_per_byte": 0.0}


# Figures of networks that no test has: these go to the fit itself.


def rate(cost):
    return 8 / cost.beta_seconds_per_byte


def fitted(world_size, exchanges, ring, sizes=SIZES_BYTES):
    """From seconds by size in milliseconds; exchanges by pair."""
    everyone = tuple(range(world_size))
    measured = [
        Measured("exchange", pair, size, 1e-3 * ms)
        for pair, of_pair in exchanges.items()
        for size, ms in of_pair.items()
    ] + [Measured("all_reduce", everyone, size, 1e-3 * ms) for size, ms in ring.items()]
    return _fitted(world_size, sizes, measured, **MEMORY)


def test_start_up_alone_claims_no_rate_that_no_message_reached():
    # 16 hosts at 100 Mbit/s: a line through the exchanges would have 161 Mbit/s.
    ring = {4096: 66.9, 65536: 67.0, 1 << 20: 168.4}
    found = fitted(16, {(0, 1): {4096: 3.3, 65536: 6.4}}, ring)
    best = 8 * 2 * 15 / 16 * (1 << 20) / 0.1684  # a ring that took longer than its bytes
    assert rate(found.network.exchange) == pytest.approx(best)
    assert rate(found.network.hop) == pytest.approx(best)
    assert found.untold == ("exchange", "all_reduce")
    assert found.left_out == {"exchange": SIZES_BYTES[2:], "all_reduce": SIZES_BYTES[3:]}
    exchanges, all_reduces = found.doubts()
    assert "65,536" in exchanges
    assert "1,048,576, 4,194,304, 16,777,216" in exchanges
    assert "1,048,576" in all_reduces
    saved = json.loads(json.dumps(found.to_json()))
    assert saved["untold"] == ["exchange", "all_reduce"]
    assert saved["left_out"]["all_reduce"] == [4194304, 16777216]
    assert Network.from_json(saved) == found.network


def test_no_rate_is_above_that_of_the_largest_message():
    # Small messages that go out in a burst must not tilt the line of 956 Mbit/s to 1,010.
    burst = {4096: 0.634, 65536: 0.852, 1 << 20: 8.919, 1 << 22: 35.87, 1 << 24: 140.9}
    ring = {4096: 4.8, 65536: 5.9, 1 << 20: 13.2, 1 << 22: 52.7, 1 << 24: 210.7}
    found = fitted(4, {(0, 1): burst}, ring)
    assert 0.95e9 < rate(found.network.exchange) < 0.96e9
    assert 0.95e9 < rate(found.network.hop) < 0.96e9
    assert found.untold == ()
    assert found.doubts() == []


def test_a_hop_of_a_ring_is_not_faster_than_an_exchange_unless_rings_were():
    link = {size: 1 + size * 8e-6 for size in SIZES_BYTES}  # 1 Gbit/s
    hidden = {4096: 22.8, 65536: 23.3, 1 << 20: 20.6, 1 << 22: 63.6}  # bytes behind start-ups
    found = fitted(8, {(0, 1): link}, hidden)
    assert rate(found.network.hop) == pytest.approx(1e9, rel=0.01)
    # Past its last point the measured curve goes on at that rate, too.
    grown = found.network.all_reduce_seconds(1 << 24, 8) - found.network.all_reduce_seconds(
        1 << 22, 8
    )
    assert grown == pytest.approx(2 * 7 / 8 * ((1 << 24) - (1 << 22)) * 8e-9, rel=0.01)
    assert found.network.all_reduce_seconds(1 << 20, 8) == pytest.approx(0.0233)
    reached = {size: 2 * (1 + size * 2e-6) for size in SIZES_BYTES}  # 3.5 Gbit/s, truly
    found = fitted(8, {(0, 1): link}, reached)
    assert rate(found.network.hop) == pytest.approx(3.5e9, rel=0.05)


def test_pairs_near_the_usual_one_are_taken_to_be_like_it():
    usual = {size: 1 + size * 1e-5 for size in SIZES_BYTES}

    def times(factor):
        return {size: factor * ms for size, ms in usual.items()}

    found = fitted(3, {(0, 1): usual, (0, 2): times(1.05), (1, 2): times(4)}, usual)
    assert found.network.exchange.alpha_seconds == pytest.approx(1.05e-3)
    assert list(found.network.links) == [(1, 2)]
    assert list(found.pairs) == [(0, 1), (0, 2), (1, 2)]
    assert found.network.hop == found.all_reduce.hop_of_ring(3)


def test_differences_within_the_spread_of_pairs_are_no_link():
    usual = {size: 1 + size * 1e-5 for size in SIZES_BYTES}
    factors = [0.85, 0.93, 0.98, 1.0, 1.02, 1.09, 1.2, 2.5]
    pairs = {
        (0, n + 1): {size: factor * ms for size, ms in usual.items()}
        for n, factor in enumerate(factors)
    }
    assert list(fitted(9, pairs, usual).network.links) == [(0, 8)]
    # Of two racks the pairs across are the more, and those within are told from them.
    across = {(a, b): 1 + (a // 4 != b // 4) for b in range(8) for a in range(b)}
    racks = {
        pair: {size: slow * ms * (1 + 0.01 * (pair[1] % 3)) for size, ms in usual.items()}
        for pair, slow in across.items()
    }
    assert set(fitted(8, racks, usual).network.links) == {p for p, n in across.items() if n == 1}


def test_links_are_found_by_sizes_whose_bytes_outweigh_the_start_up():
    usual = {4096: 3.0, 65536: 8.0, 1 << 20: 87.0}
    noise = {4096: 1.2, 65536: 13.9}
    far = {4096: 100.0, 1 << 20: 184.0}  # its rate is the usual one's, its start-up is not
    ring = {size: 20 + ms for size, ms in usual.items()}
    pairs = {(0, 1): usual, (0, 2): usual, (1, 2): usual, (0, 3): noise, (1, 3): far}
    found = fitted(4, pairs, ring)
    assert list(found.network.links) == [(1, 3)]
    link = found.network.links[1, 3]
    assert link.beta_seconds_per_byte == found.network.exchange.beta_seconds_per_byte
    assert link(1 << 20) == pytest.approx(0.184, rel=0.05)
    # Where no size shows a rate, there are no single links.
    small = {pair: {4096: ms[4096], 65536: ms.get(65536, 8.0)} for pair, ms in pairs.items()}
    assert fitted(4, small, ring).network.links == {}


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the results are not in this copy")
def test_published_probes_predict_other_numbers_of_ranks():
    profile = Profile.load("resnet50")
    for one in json.loads(PUBLISHED.read_text())["probes"]:
        network = Network.from_json(one)
        wire = one["rate_bits_per_second"] * PAYLOAD_SHARE
        for cost in (network.exchange, network.hop, *network.links.values()):
            assert rate(cost) < 1.03 * wire
        exchange, hop = (
            AffineCost.from_rate(rate_bits_per_second=wire, latency_seconds=latency)
            for latency in (2e-4, 9e-4)
        )
        true = Network(exchange=exchange, hop=hop)
        alone = Network.from_json(one | {"links": []})
        for strategy in ("gossip", "allreduce"):
            for p in (4, 16, 64):
                said, fact = (
                    predict(profile, net, strategy, world_size=p, steps=8).step_seconds
                    for net in (alone, true)
                )
                # Two cores that move what 16 hosts send at 1 Gbit/s do it slower than the wire.
                assert 0.9 < said / fact < 1.25, (one["world_size"], wire, strategy, p)


class Scripted(measuring.Exchanges):
    """Rank 0 of a large world in which every exchange takes what `cost` says, on its own clock."""

    def __init__(self, world_size, cost, clock):
        group: Any = SimpleNamespace(
            rank=0, world_size=world_size, all_gather_object=lambda mine: [mine] * world_size
        )
        self._group = group
        self._timeout_seconds, self._round = 30.0, 0
        self._cost, self._clock = cost, clock

    def _chain(self, partner, bucket, length):
        self._clock.now += self._cost(4) + length * self._cost(SIZES_BYTES[bucket - 1])
        return self._cost(SIZES_BYTES[bucket - 1])


@pytest.mark.parametrize(
    ("world_size", "bits_per_second", "start_up", "largest", "met"),
    [
        (4, 1e9, 5e-4, 1 << 24, 3),
        (16, 1e8, 3e-3, 1 << 20, 15),
        (64, 1e8, 8e-3, 1 << 20, 20),
        (64, 1e10, 5e-4, 1 << 24, 63),
        (256, 1e10, 5e-4, 1 << 24, 255),
        (16, 1e6, 1e-2, 1 << 16, 2),
    ],
)
def test_the_time_goes_to_sizes_that_show_a_rate_before_it_goes_to_pairs(
    world_size, bits_per_second, start_up, largest, met, monkeypatch
):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(measuring, "time", clock)
    cost = AffineCost(alpha_seconds=start_up, beta_seconds_per_byte=8 / bits_per_second)
    found = Scripted(world_size, cost, clock).measure(SIZES_BYTES, 6.0)
    sizes = {}
    for one in found:
        sizes.setdefault(one.ranks, []).append(one.size_bytes)
    assert len(sizes) >= met
    first, *others = sizes.values()
    assert first == [size for size in SIZES_BYTES if size <= max(first)]
    assert max(first) >= largest
    for of_pair in others[1:]:  # two partners have all sizes
        assert len(of_pair) == 2
        assert of_pair[0] == 4096
        assert cost(of_pair[1]) >= 5 * start_up
    assert clock.now < 6.0 * 1.25
