"""Random faults by seed, in ranks that are threads: what holds after every one of them.

A seed that fails is in the name of the test and repeats. More of them than `make test` takes:
`GOSSIPGRAD_STORMS=500 pytest tests/chaos`.
"""

import os
import re
from collections import Counter

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Hub
from support.deaths import QUICK
from support.links import ours, until_none_but
from support.ranks import run_ranks
from support.replicas import network
from support.storm import STEPS, DeadError, StormyTransport, draw_storm

MODES = ("overlap", "sync", "stale")
SEEDS = range(int(os.environ.get("GOSSIPGRAD_STORMS", "16")))


class Spans:
    """The exchanges of one rank, as they ended."""

    def __init__(self):
        self.ended = []

    def span(self, name, start_seconds, end_seconds, **attributes):
        if name == "exchange":
            self.ended.append(attributes)

    def delivered_with(self, peer):
        return {
            (e["round"], e["bucket"])
            for e in self.ended
            if e["recv_from"] == peer and e["outcome"] == "delivered"
        }


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def run(storm):
    """Training without updates, so that nothing but mixing moves the weights."""
    hub = Hub(storm.world_size)
    transports = [StormyTransport(hub.transport(r), storm) for r in range(storm.world_size)]
    waits = {"overlap": gg.Overlap, "sync": gg.Sync}
    mode = (
        waits[storm.mode](patience_seconds=storm.patience_seconds)
        if storm.mode in waits
        else gg.Stale(max_staleness=2)
    )

    def rank_main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        spans = Spans()
        try:
            with gg.gossip(
                model,
                optimizer,
                topology=storm.topology,
                mode=mode,
                process_group=group,
                transport=lambda _: transports[rank],
                bucket_bytes=200,
                recorder=spans,
                heartbeats=QUICK,
            ) as session:
                generator = torch.Generator().manual_seed(rank)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(torch.randn(p.shape, generator=generator))
                begin = flat(model)
                group.barrier()  # nobody is to die before it has begun
                for step in range(STEPS):
                    transports[rank].reach("between", step)
                    for p in model.parameters():
                        p.grad = torch.zeros_like(p)
                    optimizer.step()
        except DeadError:
            pass
        except gg.GossipError:  # what it was to send could not be
            if rank not in storm.dead:
                raise
        return begin, flat(model), session.stats(), spans

    return run_ranks(storm.world_size, rank_main)


@pytest.mark.parametrize(
    "seed", [s if s < 6 else pytest.param(s, marks=pytest.mark.slow) for s in SEEDS]
)
def test_a_storm_leaves_survivors_sound(seed, caplog):
    before = {*ours()}
    storm = draw_storm(seed, MODES)
    found = run(storm)
    survivors = [rank for rank in range(storm.world_size) if rank not in storm.dead]
    for rank in survivors:
        _, weights, stats, spans = found[rank]
        assert weights.isfinite().all(), (rank, str(storm))
        check_counts(stats, spans, storm)
    if storm.topology != "dissemination":
        check_pairs(found, survivors, given_up(caplog), storm)
    check_mean(found, len(storm.dead) + len(given_up(caplog)), storm)
    until_none_but(before)


def check_counts(stats, spans, storm):
    counted = Counter(e["outcome"] for e in spans.ended)
    for outcome in ("delivered", "dead_peer"):
        assert stats.outcomes[outcome] == counted[outcome], str(storm)
    again = Counter((e["round"], e["bucket"]) for e in spans.ended)
    assert set(again.values()) <= {1}, f"an exchange ended twice: {storm}"


def given_up(caplog):
    """Rounds that a waiting rank gave up after it had sent its part: it must say so."""
    words = re.compile(r"rank (\d+): gave up round (\d+) with rank (\d+), which is late")
    found = [words.match(record.getMessage()) for record in caplog.records]
    return [tuple(int(number) for number in match.groups()) for match in found if match]


def check_pairs(found, survivors, excepted, storm):
    """An exchange counts on both ends or on neither."""
    for a in survivors:
        for b in survivors:
            there, here = found[a][3].delivered_with(b), found[b][3].delivered_with(a)
            differ = {
                key for key in there ^ here if not {(a, key[0], b), (b, key[0], a)} & {*excepted}
            }
            assert not differ, f"ranks {a} and {b} differ in {differ}: {storm}"


def check_mean(found, uncertain, storm):
    """What the ranks hold, the dead as they died, adds up, but for what was in flight then."""
    begin = torch.stack([begin for begin, *_ in found])
    end = torch.stack([end for _, end, *_ in found])
    size = begin.abs().sum(0)
    missing = (end.sum(0) - begin.sum(0)).abs()
    spread = begin.max(0).values - begin.min(0).values
    assert (missing <= uncertain * 0.75 * spread + 1e-5 * size).all(), str(storm)
