"""What a user's loop may rely on: one rank, consensus, averages, snapshots, partners."""

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, Hub
from support.ranks import run_ranks
from support.replicas import (
    adam,
    assert_same_bits,
    backward,
    flat,
    network,
    set_gradients,
    sgd,
    transport_by_name,
)
from support.waiting import until


@pytest.mark.parametrize("settings", [{}, {"mode": "sync", "payload": "weights+state"}])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_one_rank_is_the_plain_optimizer(optimizer, settings):
    ours, plain = network(), network()
    o, q = optimizer(list(ours.parameters())), optimizer(list(plain.parameters()))
    with gg.gossip(ours, o, average_every=3, **settings) as session:
        for step in range(10):
            for model, opt in ((ours, o), (plain, q)):
                backward(model, 0, step)
                opt.step()
        with session.consensus():
            assert torch.equal(flat(ours), flat(plain))
        assert session.consensus_distance() == 0.0
        session.average_()
        assert session.stats().bytes_sent == 0
    assert torch.equal(flat(ours), flat(plain))


def test_hooks_are_gone_after_close():
    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu")
        before = (
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
            len(optimizer._optimizer_load_state_dict_post_hooks),
        )
        session = gg.gossip(model, optimizer, process_group=group, transport=link, scaler=scaler)
        assert "step" in vars(scaler)
        session.close()
        session.close()
        after = (
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
            len(optimizer._optimizer_load_state_dict_post_hooks),
        )
        assert before == after == (0, 0, 0)
        assert "step" not in vars(scaler)
        with pytest.raises(gg.GossipError, match="the session is closed"):
            session.average_()

    link = transport_by_name("in-process", 2)
    run_ranks(2, rank_main)
    model = network()
    with (
        pytest.warns(UserWarning, match="replicas drift apart"),
        gg.gossip(model, sgd(list(model.parameters())), payload="gradients"),
    ):
        pass
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("transport", ["in-process", "zeromq"])
def test_evaluating_does_not_change_training(mode, transport):
    links = [transport_by_name(transport, 4) for _ in range(2)]

    def rank_main(rank, group):
        ends = []
        for evaluates in (False, True):
            model = network()
            optimizer = adam(list(model.parameters()))
            own = gg.Group(torch.distributed.PrefixStore(str(evaluates), group.store), rank, 4)
            with gg.gossip(
                model, optimizer, process_group=own, mode=mode, transport=links[evaluates]
            ) as session:
                for step in range(9):
                    backward(model, rank, step)
                    optimizer.step()
                    if evaluates and step % 2 == 0:
                        with session.consensus():
                            seen = flat(model)
                        assert session.stats().consensus_distance > 0
                        means = own.all_gather_object(seen.tolist())
                        assert all(mean == means[0] for mean in means)
                ends.append([p.detach().clone() for p in model.parameters()])
                own.barrier()
        assert_same_bits([ends[0]], [ends[1]])

    run_ranks(4, rank_main)


def test_consensus_is_the_mean_and_is_taken_back_on_error():
    def rank_main(rank, group):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, mode="sync"
        ) as session:
            with torch.no_grad():
                model[0].weight.fill_(float(rank))
                model[1].running_mean.fill_(float(rank))
                model[1].num_batches_tracked.fill_(rank)
            session.accept_changes()
            shown = []
            with contextlib.suppress(KeyError), session.consensus():
                shown += [model[0].weight.mean().item(), model[1].running_mean.mean().item()]
                assert model[1].num_batches_tracked == rank
                raise KeyError
            assert shown == [1.0, 1.0]
            assert torch.all(model[0].weight == rank)
            assert torch.all(model[1].running_mean == rank)
            expected = (4 * (1 + 0 + 1) / 3) ** 0.5
            assert session.consensus_distance() == pytest.approx(expected)
            with session.consensus():
                before = session.stats().consensus_distance
                for method in (
                    session.consensus().__enter__,
                    session.average_,
                    session.broadcast_,
                    session.consensus_distance,
                ):
                    with pytest.raises(gg.GossipError, match=r"\(\) inside consensus\(\)"):
                        method()
                assert session.stats().consensus_distance == before
                with pytest.raises(gg.GossipError, match="inside consensus"):
                    optimizer.step()
            session.average_()
            assert torch.all(model[0].weight == 1.0)
            assert session.consensus_distance() == 0.0
            group.barrier()

    link = transport_by_name("in-process", 3)
    run_ranks(3, rank_main)


def test_what_travels_is_a_snapshot():
    """The partner's link is slow and the weights change meanwhile: what comes is what was sent."""
    hub = Hub(2)
    faults = Faults().delay(rank=0, round=0, seconds=0.4)

    def rank_main(rank, group):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: FaultyTransport(hub.transport(group.rank), faults),
        ) as session:
            model.weight.grad = torch.full((1, 1), -10.0 * (1 + rank))  # 2 -> 12, 2 -> 22
            optimizer.step()
            held = model.weight.item()
            session.group.barrier()
        return held

    # The deltas of round 0 are those of the equal snapshots: zero. A live buffer would mix 12, 22.
    assert run_ranks(2, rank_main) == [12.0, 22.0]


def test_zero_copy_sends_never_read_the_live_weights():
    """The buffer that ZeroMQ sends from is not the weights' memory, nor written before it left."""

    def rank_main(rank, group):
        model = nn.Linear(1024, 1024, bias=False)  # 4 MiB: sent without a copy
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gg.gossip(model, optimizer, process_group=group) as session:
            for _ in range(8):
                model.weight.grad = torch.full_like(model.weight, -1.0 - rank)
                optimizer.step()
                # Torn or late reads would leave columns that differ.
                assert model.weight.min() == model.weight.max()
            group.barrier()
            return session.stats().outcomes["delivered"]

    assert run_ranks(2, rank_main) == [8, 8]


@pytest.mark.parametrize("payload", ["weights+state", "gradients+weights"])
def test_all_buckets_of_a_round_share_one_partner(payload):
    class Spans:
        def __init__(self):
            self.met = {}
            self.lock = threading.Lock()

        def span(self, name, start_seconds, end_seconds, **attributes):
            if name == "exchange":
                with self.lock:
                    partners = self.met.setdefault(attributes["round"], {})
                    key = (attributes["send_to"], attributes["recv_from"])
                    partners.setdefault(key, []).append(attributes["bucket"])

    link = transport_by_name("in-process", 5)

    def rank_main(rank, group):
        spans = Spans()
        model = network()
        optimizer = adam(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=link,
            payload=payload,
            bucket_bytes=40,
            recorder=spans,
        ):
            for step in range(12):
                backward(model, rank, step)
                optimizer.step()
            group.barrier()
        return spans.met

    for met in run_ranks(5, rank_main):
        assert len(met) >= 12
        assert all(len(partners) == 1 for partners in met.values())
        assert max(len(buckets) for partners in met.values() for buckets in partners.values()) > 3
        assert all(
            len(set(buckets)) == len(buckets)
            for partners in met.values()
            for buckets in partners.values()
        )


def test_memory_is_stated_and_bounded():
    def rank_main(rank, group):
        model = network(dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            for step in range(6):
                set_gradients(model, rank, step)
                optimizer.step()
            (open_round,) = session._rounds.in_flight
            until(open_round.prepare, 60.0)  # all has come, and is taken as a delta
            group.barrier()
            return session.stats()

    link = transport_by_name("in-process", 2)
    numel = sum(p.numel() for p in network().parameters())
    for stats in run_ranks(2, rank_main):
        # Residuals in fp32, one or two snapshots in bf16, and what came, as a delta in fp32.
        held = [(4 + snapshots + 4) * numel for snapshots in (2, 4)]
        assert stats.extra_memory_bytes in held
        assert stats.bytes_received == stats.bytes_sent
        assert stats.rounds == 6
        assert stats.bytes_sent == 7 * 2 * numel


def test_the_free_estimate_follows_the_exact_distance():
    def rank_main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ratios = []
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            for step in range(60):
                set_gradients(model, rank, step)
                optimizer.step()
                if step >= 20 and step % 4 == 0:
                    estimates = group.all_gather_object(session.stats().consensus_distance_estimate)
                    mean_square = sum(e**2 for e in estimates) / len(estimates)
                    ratios.append(mean_square**0.5 / session.consensus_distance())
        return sum(ratios) / len(ratios)

    link = transport_by_name("in-process", 8)
    for ratio in run_ranks(8, rank_main):
        assert 0.75 < ratio < 1.35


def test_deepcopied_model_trains_alone():
    """Nothing hangs on the model itself, so copying or saving it mid-session is safe."""
    model = network()
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(model, optimizer):
        assert torch.equal(flat(copy.deepcopy(model)), flat(model))
