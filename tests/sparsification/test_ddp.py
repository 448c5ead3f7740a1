"""The hook for DistributedDataParallel: what it sends, and what its buckets may do to it."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.sparsification import CommHook, Warmup, ddp_hook
from support.processes import run_processes
from support.ranks import run_ranks
from support.replicas import assert_same_bits, network, sgd
from support.sparse import backward_of, train_reference


class Bucket:
    """As DistributedDataParallel makes them, of some parameters."""

    def __init__(self, number, parameters):
        self._number, self._parameters = number, parameters
        self._buffer = torch.cat([p.grad.flatten() for p in parameters])

    def index(self):
        return self._number

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters

    def gradients(self):
        pieces = self._buffer.split([p.numel() for p in self._parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]

    def write(self):
        for p, mean in zip(self._parameters, self.gradients(), strict=True):
            p.grad.copy_(mean)


def step(model, state, cuts):
    """What DistributedDataParallel does with gradients that are there."""
    parameters = list(reversed(list(model.parameters())))
    edges = [0, *cuts, len(parameters)]
    buckets = [
        Bucket(number, parameters[start:stop])
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    futures = [state.exchange(bucket) for bucket in buckets]
    for bucket, future in zip(buckets, futures, strict=True):
        assert future.wait() is bucket.buffer()
        bucket.write()


@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.1},
        {"density": Warmup(densities=(0.5,), steps=2, then=0.1), "select": "per_tensor"},
        {"density": 0.1, "value_dtype": torch.bfloat16},
    ],
    ids=["plain", "warm-up", "bf16"],
)
def test_its_buckets_are_groups(settings):
    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with CommHook(model, process_group=group, **settings) as state:
            for number in range(6):
                backward_of(model, rank, number)
                step(model, state, [2])
                optimizer.step()
            group.barrier()
        return [p.detach() for p in model.parameters()]

    theirs = train_reference(3, 6, [2, 2], **settings)
    expected = [[p.detach() for p in model.parameters()] for model in theirs.models]
    assert_same_bits(run_ranks(3, rank_main), expected)


def test_residuals_go_with_their_parameters_into_other_buckets_and_states():
    def rank_main(rank, group):
        model = network()
        with CommHook(model, process_group=group, density=0.1) as state:
            backward_of(model, rank, 0)
            step(model, state, [])
            before = state.state_dict()
            model.zero_grad()
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            step(model, state, [1, 2])
            after = state.state_dict()
            assert after["rounds"] == 2
            sent = 0
            for name, residual in before["residuals"].items():
                kept = after["residuals"][name]
                sent += int((kept != residual).sum())
                assert torch.equal(kept, torch.where(kept == 0, 0.0, residual))
            assert 1 <= sent <= 1 + 2 + 5  # a tenth of each bucket
            state.load_state_dict(before)
            for name, residual in state.state_dict()["residuals"].items():
                assert torch.equal(residual, before["residuals"][name])
            with pytest.raises(ValueError, match="of the same model"):
                state.load_state_dict({"rounds": 1, "residuals": {"other": torch.zeros(1)}})
            group.barrier()

    run_ranks(2, rank_main)


def test_a_rank_that_is_gone_fails_every_bucket_of_the_step():
    def rank_main(rank, group):
        model = network()
        state = CommHook(model, process_group=group, density=0.1)
        backward_of(model, rank, 0)
        step(model, state, [2])
        kept = state.state_dict()["residuals"]
        if rank == 1:
            state.close()
            with pytest.raises(gg.GossipError, match="is closed"):
                step(model, state, [2])
            return
        backward_of(model, rank, 1)
        parameters = list(reversed(list(model.parameters())))
        futures = [
            state.exchange(Bucket(number, parameters[2 * number : 2 * number + 2]))
            for number in range(2)
        ]
        for future in futures:
            with pytest.raises(RuntimeError, match=r"did not come about|are over"):
                future.wait()
        for name, residual in state.state_dict()["residuals"].items():
            torch.testing.assert_close(residual, kept[name])
        state.close()

    run_ranks(2, rank_main)


def test_under_distributed_data_parallel():
    for weights, expected in run_processes(2, _train_wrapped):
        for ours, theirs in zip(weights, expected, strict=True):
            assert (torch.tensor(ours) == torch.tensor(theirs)).all()


def _train_wrapped(rank, store):
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(list(model.parameters()))
    with CommHook(wrapped, density=0.1) as state:
        wrapped.register_comm_hook(state, ddp_hook)
        for number in range(5):
            wrapped.zero_grad()
            generator = torch.Generator().manual_seed(1000 * rank + number)
            x = torch.randn(5, 6, generator=generator)
            y = torch.randn(5, 3, generator=generator)
            (wrapped(x) - y).square().mean().backward()
            optimizer.step()
        torch.distributed.barrier()
    reference = train_reference(2, 5, [4], density=0.1)
    expected = [p.tolist() for p in reference.models[rank].parameters()]
    return [p.tolist() for p in model.parameters()], expected


def test_rounds_that_differ_end_the_step_before_anything_is_sent():
    def rank_main(rank, group):
        model = network()
        with CommHook(model, process_group=group, density=lambda step: 0.5) as state:
            backward_of(model, rank, 0)
            step(model, state, [2])
            kept = state.state_dict()
            state.load_state_dict({**kept, "rounds": 7 + rank})
            with pytest.raises(gg.GossipError, match="after 8 rounds on rank 1, but 7 on rank 0"):
                step(model, state, [2])
            group.barrier()

    run_ranks(2, rank_main)
