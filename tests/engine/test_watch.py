"""Changes behind the session's back: refused by name, or made good."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd, transport_by_name


def on_two_ranks(function, **settings):
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network(seed=rank)  # rank 1 begins elsewhere: the start must make them one
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, **settings
        ) as session:
            set_gradients(model, rank, 0)
            optimizer.step()
            function(rank, model, optimizer, session)
            group.barrier()

    run_ranks(2, rank_main)


def step(rank, model, optimizer):
    set_gradients(model, rank, 1)
    optimizer.step()


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_load_state_dict_is_refused_by_name_and_broadcast_recovers(mode):
    def change(rank, model, optimizer, session):
        model.load_state_dict(network(seed=7 + rank).state_dict())
        with pytest.raises(gg.ReplicaChangedError, match=r"'0.weight' and 3 more changed outside"):
            step(rank, model, optimizer)
        session.broadcast_()
        assert torch.equal(model[0].weight, network(seed=7)[0].weight)
        step(rank, model, optimizer)
        assert session.consensus_distance() < 2.0

    on_two_ranks(change, mode=mode)


def test_reinitialisation_is_seen_and_can_be_accepted():
    def change(rank, model, optimizer, session):
        with torch.no_grad():
            model[2].bias.fill_(float(rank))
        with pytest.raises(gg.ReplicaChangedError, match=r"'2.bias' changed outside"):
            step(rank, model, optimizer)
        session.accept_changes()
        step(rank, model, optimizer)

    on_two_ranks(change)


def test_a_pending_change_stops_every_ranks_collective():
    """Evaluating right after loading must not take the foreign weights in unseen."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            step(rank, model, optimizer)
            if rank == 0:
                model.load_state_dict(network(seed=7).state_dict())
            for _ in range(2):
                with (
                    pytest.raises(gg.ReplicaChangedError, match=r"on rank 0: parameter '0.weight'"),
                    session.consensus(),
                ):
                    pass
            session.broadcast_()
            with session.consensus():
                assert torch.equal(model[0].weight, network(seed=7)[0].weight)
            group.barrier()

    run_ranks(2, rank_main)


def test_residuals_of_accepted_weights_are_forgotten():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, 1000.0 + 4 * rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, mode="sync"
        ) as session:
            model.weight.grad = torch.full_like(model.weight, 4.0 * rank)
            optimizer.step()  # 1000 and 996 meet at 998, which bf16 does not have
            with torch.no_grad():
                model.weight.fill_(0.001)
            session.accept_changes()
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
            held = model.weight.item()
            group.barrier()
        return held

    assert run_ranks(2, rank_main) == [pytest.approx(0.001, rel=0.01)] * 2


def test_weights_that_come_back_unchanged_are_no_change():
    """An EMA swapped in for evaluation and out again writes the same bits."""

    def change(rank, model, optimizer, session):
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            for p, own in zip(model.parameters(), kept, strict=True):
                p.copy_(own)
        step(rank, model, optimizer)

    on_two_ranks(change)


def test_loading_the_optimizer_is_seen():
    def change(rank, model, optimizer, session):
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(gg.ReplicaChangedError, match=r"SGD\.load_state_dict was called"):
            step(rank, model, optimizer)
        session.broadcast_()
        step(rank, model, optimizer)

    on_two_ranks(change)


def test_added_param_group_is_named_and_broadcast_takes_it_in():
    def change(rank, model, optimizer, session):
        model.add_module("head", nn.Linear(3, 2))
        optimizer.add_param_group({"params": list(model.head.parameters())})
        with pytest.raises(gg.ReplicaChangedError, match=r"new: head\.weight, head\.bias"):
            step(rank, model, optimizer)
        session.broadcast_()
        for number in range(4):
            set_gradients(model, rank, number)
            optimizer.step()
        heads = session.group.all_gather_object(model.head.weight.flatten().tolist())
        assert heads[0] != heads[1]
        session.average_()
        heads = session.group.all_gather_object(model.head.weight.flatten().tolist())
        assert heads[0] == heads[1]

    on_two_ranks(change)


def test_gradients_still_travel_after_a_broadcast():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, payload="gradients+weights"
        ) as session:
            session.broadcast_()
            assert len(model.weight._post_accumulate_grad_hooks) == 1
            (model.weight.sum() * (1.0 + 2 * rank)).backward()
            optimizer.step()
            held = model.weight.grad.item()
            group.barrier()
        return held

    assert run_ranks(2, rank_main) == [2.0, 2.0]


@pytest.mark.parametrize("way", ["swap", "replace"])
def test_another_set_of_as_many_parameters_is_seen_and_not_to_be_accepted(way):
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        model[0].requires_grad_(False)
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            if way == "swap":
                model[0].requires_grad_(True)
                model[2].requires_grad_(False)
            else:
                fresh = nn.Parameter(torch.zeros(3))
                optimizer.param_groups[0]["params"][3] = model[2].bias = fresh
            for attempt in (session.accept_changes, optimizer.step):
                with pytest.raises(
                    gg.ReplicaChangedError, match="the optimizers train have changed"
                ):
                    attempt()
            session.broadcast_()
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + rank) if p.requires_grad else None
            optimizer.step()
            session.average_()
            held = [p.flatten().tolist() for p in model.parameters()]
            both = group.all_gather_object(held)
            assert both[0] == both[1]

    run_ranks(2, rank_main)


def test_unfreezing_is_seen():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        model[0].requires_grad_(False)
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            sent = sum(p.numel() for p in model[2].parameters()) * 4
            assert session.stats().bytes_sent == sent  # the frozen layer does not travel
            model[0].requires_grad_(True)
            with pytest.raises(gg.ReplicaChangedError, match=r"new: 0\.weight, 0\.bias"):
                step(rank, model, optimizer)
            session.broadcast_()
            step(rank, model, optimizer)
            group.barrier()

    run_ranks(2, rank_main)


def test_start_makes_all_replicas_rank_0s():
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with torch.no_grad():
            model[0].weight.fill_(rank + 5.0)
            model[1].running_var.fill_(rank + 6.0)
            model[1].num_batches_tracked.fill_(rank + 7)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
        if rank != 2:  # rank 2 has no state yet
            set_gradients(model, rank, 0)
            optimizer.step()
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            held = [
                *model.state_dict().values(),
                *(t for s in optimizer.state.values() for t in s.values()),
            ]
            assert len(optimizer.state) == 4
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (rank + 1))
            session.group.barrier()
        return [t.clone() for t in held]

    results = run_ranks(3, rank_main)
    assert all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )
