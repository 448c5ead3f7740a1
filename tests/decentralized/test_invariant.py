"""What gossip keeps: the sum over ranks of weights, residuals and outstanding deltas."""

import pytest
import torch

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import network, transport_by_name


def sums(world_size, mode, wire_dtype, dtype, rounds):
    """The sum over ranks of all weights, before and after rounds without updates."""
    link = transport_by_name("in-process", world_size)

    def rank_main(rank, group):
        model = network(dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=link,
            mode=mode,
            wire_dtype=wire_dtype,
            bucket_bytes=100,
        ) as session:
            # Replicas begin equal; pull them apart, on purpose.
            with torch.no_grad():
                for place, p in enumerate(model.parameters()):
                    p.add_(torch.randn(p.shape, generator=_seeded(rank, place)).to(dtype))
            session.accept_changes()
            before = _flat(model)
            for _ in range(rounds):
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                optimizer.step()
            with session.consensus():  # settles what is outstanding, virtually
                mean = _flat(model)
            session.group.barrier()
        return before, mean

    results = run_ranks(world_size, rank_main)
    before = torch.stack([b for b, _ in results]).mean(0)
    size = torch.stack([b for b, _ in results]).abs().mean(0)
    after = results[0][1]
    return before, after, size


def _seeded(rank, place):
    return torch.Generator().manual_seed(100 * rank + place)


def _flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("world_size", range(2, 18))
def test_mean_is_kept(world_size, mode):
    before, after, size = sums(world_size, mode, None, torch.float32, rounds=7)
    assert (after - before).abs().sum() <= 2e-6 * size.sum()


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 5, 8, 17])
def test_mean_is_kept_on_a_narrow_wire(world_size, wire_dtype, mode):
    before, after, size = sums(world_size, mode, wire_dtype, torch.float32, rounds=7)
    assert (after - before).abs().sum() <= 2e-6 * size.sum()


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_mean_of_narrow_weights_is_kept_with_their_residuals(mode):
    before, after, _ = sums(6, mode, None, torch.bfloat16, rounds=30)
    # The consensus is shown in bf16, so it is exact to bf16's own rounding and no more.
    assert ((after - before).abs() <= 2**-8 * before.abs() + 2**-16).all()


@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize(("mode", "moved"), [("overlap", 1.0), ("sync", 1.0), ("lagged", 0.5)])
def test_the_authors_rule_alone_halves_the_mean_update(world_size, mode, moved):
    link = transport_by_name("in-process", world_size)

    def rank_main(rank, group):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gg.gossip(model, optimizer, process_group=group, transport=link, mode=mode) as session:
            model.weight.grad = torch.full((1, 1), -1.0)
            optimizer.step()
            held = model.weight.item()
            session.group.barrier()
        return held

    assert sum(run_ranks(world_size, rank_main)) / world_size == pytest.approx(moved)
