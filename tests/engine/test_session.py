"""What a user's loop may rely on: consensus, averages, snapshots, partners, memory."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport
from support.ranks import run_ranks
from support.replicas import adam, assert_same_bits, backward, network, sgd, transport_by_name
from support.sessions import run_sessions, train
from support.waiting import until


def test_a_session_that_is_closed_says_so():
    model = network()
    with (
        pytest.warns(UserWarning, match="replicas drift apart"),
        gg.gossip(model, sgd(list(model.parameters())), payload="gradients") as session,
    ):
        pass
    session.close()
    with pytest.raises(gg.GossipError, match="closed"):
        session.average_()


@pytest.mark.parametrize(("mode", "transport"), [("overlap", "tcp"), ("sync", "in-process")])
def test_evaluating_does_not_change_training(mode, transport):
    def use(me):
        for step in range(9):
            me.train()
            if step % 2 == 0:
                means = me.group.all_gather_object(me.mean().tolist())
                assert all(mean == means[0] for mean in means)
                assert me.session.consensus_distance() > 0
        return [p.detach().clone() for p in me.model.parameters()]

    settings = {"mode": mode, "transport": transport, "optimizer": adam, "gradients": backward}
    assert_same_bits(run_sessions(4, use, bucket_bytes=100, **settings), train(4, 9, **settings))


def test_consensus_is_the_mean_and_is_taken_back_on_error():
    def use(me):
        model, session = me.model, me.session
        with torch.no_grad():
            model[0].weight.fill_(float(me.rank))
            model[1].running_mean.fill_(float(me.rank))
            model[1].num_batches_tracked.fill_(me.rank)
        shown = []
        with contextlib.suppress(KeyError), session.consensus():
            shown += [model[0].weight.mean().item(), model[1].running_mean.mean().item()]
            assert model[1].num_batches_tracked == me.rank
            raise KeyError
        assert shown == [1.0, 1.0]
        assert torch.all(model[0].weight == me.rank)
        assert torch.all(model[1].running_mean == me.rank)
        assert session.consensus_distance() == pytest.approx((4 * (1 + 0 + 1) / 3) ** 0.5)
        with session.consensus():
            assert session.consensus_distance() == pytest.approx((4 * (1 + 0 + 1) / 3) ** 0.5)
            for method in (
                session.consensus().__enter__,
                session.average_,
                session.broadcast_,
                me.optimizer.step,
            ):
                with pytest.raises(gg.GossipError, match="inside consensus"):
                    method()
        session.average_()
        assert torch.all(model[0].weight == 1.0)
        assert session.consensus_distance() == 0.0

    make = lambda rank: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # noqa: E731
    run_sessions(3, use, make=make, mode="sync")


def test_what_travels_is_a_snapshot():
    """The partner's link is slow and the weights change meanwhile: what comes is what was sent."""
    faults = Faults().delay(rank=0, round=0, seconds=0.4)

    def make(rank):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 2.0)
        return model

    def use(me):
        me.model.weight.grad = torch.full((1, 1), -100.0 * (1 + me.rank))  # 2 -> 12, 2 -> 22
        me.optimizer.step()
        return me.model.weight.item()

    # The deltas of round 0 are those of the equal snapshots: zero. A live buffer would mix 12, 22.
    slow = lambda link: FaultyTransport(link, faults)  # noqa: E731
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    assert run_sessions(2, use, make=make, optimizer=optimizer, wrap=slow) == [12.0, 22.0]


class Partners:
    """A recorder: with whom a round's buckets were exchanged."""

    def __init__(self):
        self.met = {}
        self.lock = threading.Lock()

    def span(self, name, start_seconds, end_seconds, **attributes):
        if name == "exchange":
            with self.lock:
                partners = self.met.setdefault(attributes["round"], {})
                key = (attributes["send_to"], attributes["recv_from"])
                partners.setdefault(key, []).append(attributes["bucket"])
                assert attributes["generation"] == 0, "nobody was lost and nobody joined"


@pytest.mark.parametrize("payload", ["weights+state", "gradients+weights"])
def test_all_buckets_of_a_round_share_one_partner(payload):
    link = transport_by_name("in-process", 5)

    def rank_main(rank, group):
        model, spans = network(), Partners()
        optimizer = adam(list(model.parameters()))
        settings = {"payload": payload, "bucket_bytes": 40, "recorder": spans}
        settings["topology"] = "dissemination"  # of five ranks none ever sits out
        with gg.gossip(model, optimizer, process_group=group, transport=link, **settings):
            for step in range(12):
                backward(model, rank, step)
                optimizer.step()
            group.barrier()
        return spans.met

    for met in run_ranks(5, rank_main):
        assert len(met) >= 12
        assert all(len(partners) == 1 for partners in met.values())
        exchanged = [buckets for partners in met.values() for buckets in partners.values()]
        assert max(map(len, exchanged)) > 3
        assert all(len({*buckets}) == len(buckets) for buckets in exchanged)


def test_memory_is_stated_and_bounded():
    def use(me):
        me.train(6)
        stats = me.session.stats
        until(lambda: stats().bytes_received == stats().bytes_sent)
        return stats()

    make = lambda rank: network(dtype=torch.bfloat16)  # noqa: E731
    numel = sum(p.numel() for p in network().parameters())
    for stats in run_sessions(2, use, make=make):
        # Residuals in fp32, one or two snapshots in bf16, and what came, in bf16 or as a delta.
        assert (4 + 2) * numel <= stats.extra_memory_bytes <= (4 + 4 + 4) * numel
        assert stats.rounds == 6
        assert stats.bytes_sent == 7 * 2 * numel
