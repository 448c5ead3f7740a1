"""What gossip keeps: the sum over ranks of weights, residuals and outstanding deltas."""

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import network, transport_by_name

MODES = ("overlap", "sync")
WIRES = (None, torch.bfloat16, torch.float16)


def sums(world_size, dtype, rounds, cases):
    """For each case (mode, wire type): the mean over ranks before and after rounds of no updates.

    Also the mean of the absolute values, to compare with.
    """
    links = [transport_by_name("in-process", world_size) for _ in cases]

    def rank_main(rank, group):
        found = []
        for number, (mode, wire_dtype) in enumerate(cases):
            own = gg.Group(dist.PrefixStore(f"case {number}", group.store), rank, world_size)
            model = network(dtype=dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with gg.gossip(
                model,
                optimizer,
                process_group=own,
                transport=links[number],
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
                with session.consensus():  # counts what is outstanding in
                    mean = _flat(model)
                own.barrier()
            found.append((before, mean))
        return found

    for found in zip(*run_ranks(world_size, rank_main), strict=True):
        before = torch.stack([b for b, _ in found])
        yield before.mean(0), found[0][1], before.abs().mean(0)


def _seeded(rank, place):
    return torch.Generator().manual_seed(100 * rank + place)


def _flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def keeps_the_mean(world_size, cases):
    for before, after, size in sums(world_size, torch.float32, 7, cases):
        assert (after - before).abs().sum() <= 2e-6 * size.sum()


@pytest.mark.parametrize("world_size", range(2, 10))
def test_mean_is_kept_in_every_mode_on_every_wire(world_size):
    keeps_the_mean(world_size, [(mode, wire_dtype) for mode in MODES for wire_dtype in WIRES])


@pytest.mark.parametrize("world_size", [11, 16, 17])
def test_mean_is_kept_by_more_ranks(world_size):
    """The schedule is another one; modes and wires know nothing of it."""
    keeps_the_mean(world_size, [("overlap", torch.bfloat16)])


def test_mean_of_narrow_weights_is_kept_with_their_residuals():
    for before, after, _ in sums(6, torch.bfloat16, 30, [(mode, None) for mode in MODES]):
        # The consensus is shown in bf16, so it is exact to bf16's own rounding and no more.
        assert ((after - before).abs() <= 2**-8 * before.abs() + 2**-16).all()
