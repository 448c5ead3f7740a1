"""Roots computed by one rank and used by all: equal bits, a p-th of the work, and late ranks."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Hub
from gossipgrad.second_order import SOAP, KLShampoo, Refresh, Shampoo, share_roots
from support.processes import run_processes
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS, NEVER_SECONDS

SEEDING = threading.Lock()

PATIENT = {"patience_seconds": NEVER_SECONDS}


def build(kind, refresh, **options):
    with SEEDING:  # ranks are threads
        torch.manual_seed(0)
        layers = nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4)
    model = nn.Sequential(*layers)
    return model, kind(model, lr=3e-3, max_dim=10, refresh=refresh, **options)


def train(model, optimizer, steps, seed=0, group=None, before_step=None):
    """Gradients are the mean over the ranks of the group, as with DDP."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(16, 12, generator=generator)
        loss = (model(x) - x[:, :4].square()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            for parameter in model.parameters():
                group.mean_(parameter.grad)
        if before_step is not None:
            before_step(step)
        optimizer.step()
    return loss.item()


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_ranks(world_size, rank_main):
    hub = Hub(world_size)

    def start(rank, group):
        return rank_main(
            rank, group, {"process_group": group, "transport": lambda g: hub.transport(rank)}
        )

    return run_ranks(world_size, start)


@pytest.mark.parametrize(
    ("kind", "refresh"),
    [
        (SOAP, Refresh(4, 2)),
        (KLShampoo, Refresh(4)),
        (Shampoo, Refresh(4, 2, where="device")),
    ],
)
def test_shared_roots_are_those_of_each_rank_and_each_computes_its_part(kind, refresh):
    def rank_main(rank, group, links):
        model, optimizer = build(kind, refresh)
        with share_roots(optimizer, **PATIENT, **links) as sharing:
            train(model, optimizer, 10, seed=rank, group=group)
            optimizer.state_dict()
            group.barrier()
            stats, owned = sharing.stats, sharing.owners.count(rank)
        optimizer.close()
        return weights(model), stats, owned, optimizer.refresh_stats.refreshes

    def alone(rank, group, links):
        model, optimizer = build(kind, refresh)
        train(model, optimizer, 10, seed=rank, group=group)
        optimizer.close()
        return weights(model)

    expected = on_ranks(3, alone)
    results = on_ranks(3, rank_main)
    for own, (found, stats, owned, refreshes) in zip(expected, results, strict=True):
        assert torch.equal(found, own)
        assert stats.alone == 0
        assert stats.computed + stats.received == refreshes - 6  # the first are each rank's own
        assert owned == 2  # of six units
        assert stats.computed / (stats.computed + stats.received) == pytest.approx(1 / 3, abs=0.1)
        assert stats.sent_bytes > 0


def _data_parallel(rank, store, shares):
    model, optimizer = build(SOAP, Refresh(4, 2))
    replica = nn.parallel.DistributedDataParallel(model)
    with share_roots(optimizer, **PATIENT) if shares else nullcontext() as sharing:
        loss = train(replica, optimizer, 14, seed=rank)
        optimizer.state_dict()
        dist.barrier()
        computed = sharing.stats.computed if shares else optimizer.refresh_stats.refreshes - 6
    optimizer.close()
    return weights(model).tolist(), loss, computed


@pytest.mark.process
def test_data_parallel_processes_share_roots_and_lose_no_bit():
    alone, shared = (run_processes(2, _data_parallel, shares) for shares in (False, True))
    assert [each[:2] for each in shared] == [each[:2] for each in alone]
    assert shared[0][0] == shared[1][0]
    assert shared[0][2] + shared[1][2] < 0.7 * (alone[0][2] + alone[1][2])


def test_a_late_rank_is_waited_for_once_and_then_all_compute_its_roots():
    late = threading.Event()

    def rank_main(rank, group, links):
        model, optimizer = build(SOAP, Refresh(2))
        with share_roots(optimizer, patience_seconds=0.3, **links) as sharing:
            train(model, optimizer, 5, seed=rank, group=group)
            if rank == 1:
                late.wait(HANG_SECONDS)
                train(model, optimizer, 1)
                return None
            train(model, optimizer, 20)
            late.set()
            return sharing.stats

    stats, _ = on_ranks(2, rank_main)
    assert stats.alone >= 15


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_root_computed_for_a_silent_rank_is_of_the_factor_of_its_step(where):
    done = threading.Event()

    def rank_main(rank, group, links):
        model, optimizer = build(SOAP, Refresh(2, 1, where=where))
        with share_roots(optimizer, patience_seconds=0.3, **links) as sharing:
            train(model, optimizer, 5, group=group)  # in step: a rank ahead sends later roots
            if rank:
                done.wait(HANG_SECONDS)
                return None
            train(model, optimizer, 11)
            done.set()
            return weights(model), sharing.stats.alone

    found, alone = on_ranks(2, rank_main)[0]
    model, optimizer = build(SOAP, Refresh(2, 1, where=where))
    train(model, optimizer, 5)
    train(model, optimizer, 11)
    assert alone > 5
    assert torch.equal(found, weights(model))


def test_ranks_that_are_gone_are_not_waited_for():
    def rank_main(rank, group, links):
        model, optimizer = build(Shampoo, Refresh(2, 1))
        with share_roots(optimizer, **PATIENT, **links) as sharing:
            train(model, optimizer, 5, seed=rank)
            if rank == 1:
                return None
            train(model, optimizer, 40)
            return sharing.stats.alone

    assert on_ranks(2, rank_main)[0] > 10


def test_with_the_state_of_an_earlier_step_roots_are_shared_as_before():
    def rank_main(rank, group, links):
        model, optimizer = build(SOAP, Refresh(2, 1))
        with share_roots(optimizer, patience_seconds=HANG_SECONDS, **links) as sharing:
            train(model, optimizer, 3, group=group)
            state = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, 12, group=group)
            optimizer.load_state_dict(state)
            train(model, optimizer, 6, group=group)
            optimizer.state_dict()
            group.barrier()
            return weights(model), sharing.stats.alone

    (first, alone), (second, others) = on_ranks(2, rank_main)
    assert torch.equal(first, second)
    assert alone == others == 0


def test_a_root_of_other_parameters_is_not_used():
    """A layer that has its gradients late on one rank is another unit there."""

    def rank_main(rank, group, links, shares=True):
        with SEEDING:
            torch.manual_seed(0)
            layers = [nn.Linear(600, 600) for _ in range(2)]  # a unit each
        optimizer = Shampoo(nn.Sequential(*layers), refresh=Refresh(2))
        order = layers[::-1] if rank else layers
        with share_roots(optimizer, patience_seconds=0.3, **links) if shares else nullcontext():
            for step in range(4):
                for layer in order[: step + 1]:
                    generator = torch.Generator().manual_seed(2 * step + layers.index(layer))
                    layer.weight.grad = torch.randn(600, 600, generator=generator)
                optimizer.step()
            return [layer.weight.detach().clone() for layer in layers]

    with pytest.warns(UserWarning, match="not shared"):
        found = on_ranks(2, rank_main)[1]
    assert all(map(torch.equal, found, rank_main(1, None, {}, shares=False)))


def test_roots_are_shared_once():
    def rank_main(rank, group, links):
        _, optimizer = build(SOAP, Refresh())
        with share_roots(optimizer, **links), pytest.raises(gg.GossipError, match="once"):
            share_roots(optimizer, **links)

    on_ranks(2, rank_main)


def test_a_patience_that_cannot_be_is_refused():
    _, optimizer = build(SOAP, Refresh())
    with pytest.raises(ValueError, match="patience"):
        share_roots(optimizer, patience_seconds=0.0)


def test_another_optimizer_and_another_model_are_refused():
    with pytest.raises(ValueError, match="SGD"):
        share_roots(torch.optim.SGD([torch.ones(1)]))

    def rank_main(rank, group, links):
        _, optimizer = build(SOAP if rank else KLShampoo, Refresh())
        with pytest.raises(gg.AgreementError, match="rank 1"):
            share_roots(optimizer, **links)

    on_ranks(2, rank_main)
