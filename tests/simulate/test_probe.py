"""`probe`: costs of live workers, how it ends when one does not answer, and what it doubts."""

import json
import threading
from itertools import permutations

import pytest
import torch.distributed as dist

from gossipgrad.comm import Group, Hub, InProcessTransport
from gossipgrad.errors import GossipError
from gossipgrad.planning import AffineCost
from gossipgrad.simulate import Measured, Network, Probe, probe
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS, NEVER_SECONDS

SIZES = (1 << 10, 1 << 16, 1 << 18)


def test_all_ranks_know_the_cost_of_every_pair():
    found = run_ranks(3, lambda rank, group: probe(group, sizes_bytes=SIZES, budget_seconds=10.0))
    assert found[0] == found[1] == found[2]
    network = found[0].network
    assert sorted(found[0].pairs) == [(0, 1), (0, 2), (1, 2)]
    assert network.world_size == 3
    assert network.hop is not None
    assert network.all_reduce(3)(1 << 16) == pytest.approx(found[0].all_reduce(1 << 16))
    for cost in (network.exchange, found[0].all_reduce, *found[0].pairs.values()):
        assert cost(SIZES[0]) > 0
    sizes = {one.size_bytes for one in found[0].measured if one.what == "all-reduce"}
    assert sizes >= set(SIZES[:2])
    assert Network.from_json(json.loads(json.dumps(found[0].to_json()))) == network


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

    def send(self, peer, header, payload=None, ticket=None):
        if payload is not None:
            self._now = self.now() + self._slow * (0.005 + payload.nbytes / 1e7)
            self._sent[self.rank, peer].append(self._now)
        super().send(peer, header, payload, ticket)


def measured(sizes_bytes, budget_seconds):
    hub, sent = Hub(4), {pair: [] for pair in permutations(range(4), 2)}
    return run_ranks(
        4,
        lambda rank, group: probe(
            group,
            sizes_bytes=sizes_bytes,
            budget_seconds=budget_seconds,
            transport=lambda group: Slowed(hub, group, sent),
            clock=lambda: Slowed.here.transport.now(),
        ),
    )[0]


def test_it_finds_what_links_were_made_to_cost():
    found = measured((1 << 10, 1 << 20), 10.0)
    assert len(found.pairs) == 6
    for pair, cost in found.pairs.items():
        slow = 4 if 3 in pair else 1  # who waits for the slow one is slowed, too
        for size in (1 << 10, 1 << 20):
            assert cost(size) == pytest.approx(slow * (0.005 + size / 1e7), rel=1e-3), pair


def test_sizes_for_which_there_is_no_time_are_left_out():
    """A message of 1 MB takes 0.4 s there, one of 16 MB 7 s."""
    sizes = (1 << 10, 1 << 16, 1 << 24)
    exchanged = {
        budget: {m.size_bytes for m in measured(sizes, budget).measured if m.what == "exchange"}
        for budget in (10.0, 300.0)
    }
    assert exchanged == {10.0: set(sizes[:2]), 300.0: set(sizes)}


class Mute(InProcessTransport):
    """Rank 1 is somewhere else after the start, until the others are done."""

    done = threading.Event()

    def send(self, peer, header, payload=None, ticket=None):
        if self.rank == 1 and payload is not None:
            assert self.done.wait(HANG_SECONDS)
            return
        super().send(peer, header, payload, ticket)


class Mortal(InProcessTransport):
    """Rank 1 dies after a few messages."""

    sent = 0

    def send(self, peer, header, payload=None, ticket=None):
        self.sent += 1
        if self.rank == 1 and self.sent > 5:
            self.close()
            raise GossipError("dead")
        super().send(peer, header, payload, ticket)


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


def test_one_worker_has_no_link():
    with pytest.raises(ValueError, match="two or more"):
        probe(Group(dist.HashStore(), 0, 1))


def test_a_rate_that_no_message_was_long_enough_to_show_is_doubted():
    cost = AffineCost(alpha_seconds=3e-3, beta_seconds_per_byte=8e-8)
    network = Network(exchange=cost, hop=cost, world_size=4)
    figures = (Measured("exchange", (0, 1), 4096, 3e-3), Measured("all-reduce", (0, 1), 1 << 20, 1))
    (doubt,) = Probe(network, cost, {(0, 1): cost}, figures).doubts()
    assert "exchange of 4,096 bytes" in doubt


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
