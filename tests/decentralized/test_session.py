"""What a user's loop may rely on: one rank, ends, consensus, averages, snapshots, partners."""

import contextlib
import copy
import gc
import threading
import time

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad import topology
from gossipgrad.comm import Faults, FaultyTransport, Hub, ScriptedDeathError
from support.ranks import run_ranks
from support.replicas import (
    adam,
    assert_same_bits,
    backward,
    network,
    set_gradients,
    sgd,
    transport_by_name,
)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


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
        with (
            pytest.warns(UserWarning, match="replicas drift apart"),
            gg.gossip(
                model, optimizer, process_group=gg.Group(group.store, 0, 1), payload="gradients"
            ),
        ):
            pass
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())

    link = transport_by_name("in-process", 2)
    run_ranks(2, rank_main)


@pytest.mark.parametrize("mode", ["overlap", "sync", "lagged"])
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


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("transport", ["in-process", "zeromq", "gloo"])
@pytest.mark.parametrize("average_every", [None, 2])
def test_unequal_step_counts_end_without_a_hang(mode, transport, average_every):
    """Ranks 0 and 2 take three steps more; all come to a consensus, train on, and leave."""
    link = transport_by_name(transport, 4)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        longest = 0.0
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            mode=mode,
            transport=link,
            average_every=average_every,
        ) as session:
            for step in range(6 if rank % 2 else 9):
                start = time.perf_counter()
                backward(model, rank, step)
                optimizer.step()
                longest = max(longest, time.perf_counter() - start)
            with session.consensus():
                seen = flat(model)
            for step in range(4 if rank % 2 else 7):
                backward(model, rank, 100 + step)
                optimizer.step()
        return seen, longest

    results = run_ranks(4, rank_main, timeout_seconds=40)
    for seen, longest in results:
        assert torch.equal(seen, results[0][0])
        assert longest < 10


@pytest.mark.parametrize("transport", ["in-process", "zeromq"])
def test_break_and_exception_end_without_a_hang(transport):
    link = transport_by_name(transport, 4)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        steps = 0
        try:
            with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
                for step in range(12):
                    if rank == 1 and step == 4:
                        break
                    if rank == 2 and step == 6:
                        raise ZeroDivisionError
                    backward(model, rank, step)
                    optimizer.step()
                    steps += 1
                stats = session.stats()
        except ZeroDivisionError:
            return steps, None
        return steps, stats

    results = run_ranks(4, rank_main, timeout_seconds=40)
    assert [steps for steps, _ in results] == [12, 4, 6, 12]
    assert results[0][1].outcomes["dead_peer"] > 0
    assert torch.isfinite(torch.tensor(results[0][1].exposed_seconds))


def test_consensus_names_who_has_left():
    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(model, optimizer, process_group=group, transport=link)
        before = flat(model)
        if rank == 1:
            session.close()
            return
        with pytest.raises(gg.GossipError, match="has died or left"), session.consensus():
            pass
        assert torch.equal(flat(model), before)
        backward(model, rank, 0)
        optimizer.step()  # training goes on
        session.close()

    link = transport_by_name("in-process", 3)
    run_ranks(3, rank_main)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_consensus_that_fails_holds_up_no_round(mode):
    """Those who are left mix on as before, though each had told the others to expect nothing."""

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(
            model, optimizer, process_group=group, transport=link, mode=mode, topology="matching"
        )
        if rank == 3:
            session.close()
            return
        with pytest.raises(gg.GossipError), session.consensus():
            pass
        for step in range(20):
            backward(model, rank, step)
            optimizer.step()
        assert session.stats().outcomes["delivered"] >= 5
        session.close()

    link = transport_by_name("in-process", 4)
    run_ranks(4, rank_main)


def test_different_collectives_are_named():
    def rank_main(rank, group):
        model = network()
        with gg.gossip(
            model, sgd(list(model.parameters())), process_group=group, transport=link
        ) as session:
            with pytest.raises(gg.GossipError, match="rank 0 for distance, rank 1 for average"):
                session.consensus_distance() if rank == 0 else session.average_()
            group.barrier()

    link = transport_by_name("in-process", 2)
    run_ranks(2, rank_main)


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


def test_a_killed_rank_does_not_stop_the_others():
    hub = Hub(4)
    faults = Faults().kill(rank=3, round=5)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        try:
            with gg.gossip(
                model,
                optimizer,
                process_group=group,
                topology="matching",
                transport=lambda g: FaultyTransport(hub.transport(g.rank), faults),
            ) as session:
                for step in range(20):
                    backward(model, rank, step)
                    optimizer.step()
                return session.stats().outcomes["dead_peer"]
        except ScriptedDeathError:
            return "killed"

    outcomes = run_ranks(4, rank_main)
    assert outcomes[3] == "killed"
    assert all(count > 0 for count in outcomes[:3])


def test_stuck_partners_do_not_stop_the_others():
    """Two of six ranks are alive and silent; each link waits for its own, nobody for all."""
    hub = Hub(6)
    faults = Faults()
    for rank in (4, 5):
        for number in range(200):
            faults.drop(rank=rank, round=number)
    healthy = topology.matching(6)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            topology=healthy,
            mode=gg.Overlap(deadline_seconds=0.15),
            transport=lambda g: FaultyTransport(hub.transport(g.rank), faults),
        ) as session:
            if rank < 4:
                for step in range(40):
                    set_gradients(model, rank, step)
                    optimizer.step()
            outcomes = session.stats().outcomes
            group.barrier()
        return outcomes["delivered"]

    delivered = run_ranks(6, rank_main)
    for rank in range(4):
        met = [healthy.peers(number, rank).send_to for number in range(40)]
        assert delivered[rank] >= 0.6 * sum(partner < 4 for partner in met)


def test_an_interrupt_in_a_step_loses_no_round():
    """Ctrl-C while waiting, caught as in a notebook: the exchange is mixed in the next step."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            channel = session._rounds.channel
            for step in range(12):
                take = channel.take
                if rank == 0 and step in (3, 4, 5):
                    channel.take = _interrupt
                set_gradients(model, rank, step)
                with contextlib.suppress(KeyboardInterrupt):
                    optimizer.step()
                channel.take = take
            session.consensus_distance()  # rank 0 has had fewer rounds
            outcomes = session.stats().outcomes
            group.barrier()
        return outcomes

    for outcomes in run_ranks(2, rank_main):
        assert outcomes["delivered"] >= 9
        assert outcomes["void"] <= 3  # a round that one rank was late for, an interrupt


def _interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_collective_holds_up_no_round():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, mode="sync"
        ) as session:
            if rank == 0:
                gather, group.all_gather_object = group.all_gather_object, _interrupt
                with contextlib.suppress(KeyboardInterrupt):
                    session.consensus_distance()
                group.all_gather_object = gather
            for step in range(20):
                set_gradients(model, rank, step)
                optimizer.step()
            delivered = session.stats().outcomes["delivered"]
            group.barrier()
        return delivered

    assert min(run_ranks(2, rank_main)) >= 18


def test_a_late_partner_is_mixed_when_it_comes():
    """Past its deadline a step goes on; what came late is mixed after all, so the mean is kept."""
    hub = Hub(2)
    faults = Faults().delay(rank=0, round=2, seconds=0.6)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            mode=gg.Overlap(deadline_seconds=0.2),
            transport=lambda g: FaultyTransport(hub.transport(g.rank), faults),
        ) as session:
            for step in range(4):
                set_gradients(model, rank, step)
                optimizer.step()
            time.sleep(0.7)
            group.barrier()
            for step in range(4, 8):
                set_gradients(model, rank, step)
                optimizer.step()
            with session.consensus():
                mean = flat(model)
            group.barrier()
            return mean, session.stats().outcomes

    results = run_ranks(2, rank_main)
    assert results[1][1]["late"] >= 1
    plain = [network() for _ in range(2)]
    for rank, model in enumerate(plain):
        optimizer = sgd(list(model.parameters()))
        for step in range(8):
            set_gradients(model, rank, step)
            optimizer.step()
    mean = (flat(plain[0]) + flat(plain[1])) / 2
    torch.testing.assert_close(results[0][0], mean, rtol=1e-5, atol=1e-5)


def test_a_round_without_a_snapshot_is_void_on_both_ends():
    """Weights and state travel together: when one cannot, neither does, and the mean is kept."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            payload="weights+state",
            mode="sync",
            transport=link,
        ) as session:
            (state,) = session._sections.state
            for step in range(6):
                if rank == 0 and step == 3:
                    acquire, state.pool.acquire = state.pool.acquire, lambda *_: None
                set_gradients(model, rank, step)
                optimizer.step()
                if rank == 0 and step == 3:
                    state.pool.acquire = acquire
            total = group.all_reduce_(flat(model))
            return total, session.stats().outcomes

    results = run_ranks(2, rank_main)
    plain = torch.zeros_like(results[0][0])
    for rank in range(2):
        model = network()
        optimizer = sgd(list(model.parameters()))
        for step in range(6):
            set_gradients(model, rank, step)
            optimizer.step()
        plain += flat(model)
    assert results[0][1]["void"] == 1
    assert results[1][1]["void"] == 2  # its two buckets, of weights and of state
    torch.testing.assert_close(results[0][0], plain, rtol=1e-5, atol=1e-5)


def test_memory_is_stated_and_bounded():
    def rank_main(rank, group):
        model = network(dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            for step in range(6):
                set_gradients(model, rank, step)
                optimizer.step()
            group.barrier()
            return session.stats()

    link = transport_by_name("in-process", 2)
    numel = sum(p.numel() for p in network().parameters())
    for stats in run_ranks(2, rank_main):
        # Residuals in fp32, and one or two snapshots in bf16.
        assert stats.extra_memory_bytes in (4 * numel + 2 * numel, 4 * numel + 4 * numel)
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
                if step >= 20:
                    estimates = group.all_gather_object(session.stats().consensus_distance_estimate)
                    mean_square = sum(e**2 for e in estimates) / len(estimates)
                    ratios.append(mean_square**0.5 / session.consensus_distance())
        return sum(ratios) / len(ratios)

    link = transport_by_name("in-process", 8)
    for ratio in run_ranks(8, rank_main):
        assert 0.75 < ratio < 1.35


def test_a_session_nobody_closed_says_leave_when_it_is_collected():
    hub = Hub(2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(
            model, optimizer, process_group=group, transport=lambda g: hub.transport(g.rank)
        )
        if rank == 0:
            del session, optimizer
            gc.collect()
            return None
        for step in range(3):
            backward(model, rank, step)
            optimizer.step()
        outcome = session.stats().outcomes
        session.close()
        return outcome

    assert run_ranks(2, rank_main)[1]["dead_peer"] >= 1


def test_deepcopied_model_trains_alone():
    """Nothing hangs on the model itself, so copying or saving it mid-session is safe."""
    model = network()
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(model, optimizer):
        assert torch.equal(flat(copy.deepcopy(model)), flat(model))
