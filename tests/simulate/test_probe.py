"""`probe`: costs of live workers, and how it ends when one of them does not answer."""

import json
import threading
import time
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gossipgrad.comm import Group, Hub, InProcessTransport, Sent
from gossipgrad.errors import GossipError
from gossipgrad.simulate import Network, probe
from gossipgrad.simulate import _measuring as measuring
from support.ranks import run_ranks

# Links inside one process are so fast, or so slow, that messages this small may tell no rate.
pytestmark = pytest.mark.filterwarnings("ignore:the network is not fully known")
SIZES = (1 << 10, 1 << 16, 1 << 18)


def test_all_ranks_know_the_cost_of_every_pair():
    start = time.monotonic()
    found = run_ranks(3, lambda rank, group: probe(group, sizes_bytes=SIZES, budget_seconds=10.0))
    took_seconds = time.monotonic() - start
    assert found[0] == found[1] == found[2]
    network = found[0].network
    assert sorted(found[0].pairs) == [(0, 1), (0, 2), (1, 2)]
    assert network.world_size == 3
    assert network.hop is not None
    assert network.all_reduce_seconds(1 << 16, 3) == network.all_reduce(1 << 16)
    assert 0 < network.snapshot_seconds_per_byte < network.mix_seconds_per_byte < 1e-7
    for cost in (network.exchange, found[0].all_reduce, *found[0].pairs.values()):
        assert 0 < cost(SIZES[0]) < took_seconds
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
            assert self.done.wait(60)
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
        (Mute, 0.4, r"rank 1 did not answer rank 2 within 0.4 s: is it running"),
        (Mortal, 60.0, "rank 1 has died or left while it was measured"),
    ],
)
def test_a_worker_that_does_not_answer_is_named_and_nobody_hangs(kind, timeout_seconds, message):
    """Ranks 1 and 2 are the first to exchange."""
    hub = Hub(3)
    Mute.done.clear()
    start = time.monotonic()

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
    assert time.monotonic() - start < 20


def test_what_cannot_be_measured_is_refused():
    alone = Group(dist.HashStore(), 0, 1)
    with pytest.raises(ValueError, match="one worker has no link to measure: start two or more"):
        probe(alone)
    two = Group.__new__(Group)
    two.world_size = 2
    for options, message in [
        ({"sizes_bytes": (4096,)}, "must rise, and be two or more"),
        ({"sizes_bytes": (4096, 1024)}, "must rise, and be two or more"),
        ({"sizes_bytes": (4096, 8191)}, "must be multiples of 4 bytes"),
        ({"budget_seconds": 0.0}, "must be above 0"),
        ({"timeout_seconds": 0.0}, "must be above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            probe(two, **options)
