"""Rounds: what meets, what is carried over, and that nothing is lost on the way."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import Merge
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import backward_of, same_weights, start


class Bare(torch.optim.Optimizer):
    """Adds up the gradients that it is given."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.sums = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for total, p in zip(self.sums, self.param_groups[0]["params"], strict=True):
            total.add_(p.grad)


def mean(values):
    return [torch.stack(each).mean(0) for each in zip(*values, strict=True)]


@settings(max_examples=12)
@given(
    world_size=st.integers(2, 4),
    plans=st.lists(
        st.lists(st.sampled_from(["sparse", "dense"]), min_size=4, max_size=4),
        min_size=2,
        max_size=3,
    ),
    cuts=st.lists(st.booleans(), min_size=3, max_size=3),
    density=st.sampled_from([0.02, 0.3]),
    select=st.sampled_from(["per_group", "per_tensor"]),
    value_dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_nothing_is_lost_whatever_is_planned_anew(
    world_size, plans, cuts, density, select, value_dtype
):
    """Applied means, plus the mean of what is carried over, are the sum of the mean gradients."""

    def rank_main(rank, group):
        model = network(dtype=torch.float64)
        optimizer = Bare(model.parameters())
        own = [torch.zeros_like(p) for p in model.parameters()]
        with gg.sparsify(
            model,
            optimizer,
            process_group=group,
            plan="single",
            density=density,
            select=select,
            methods=("sparse", "dense"),
            value_dtype=value_dtype,
        ) as session:
            for number, methods in enumerate(plans):
                session._aggregation.regroup(merges(methods, cuts))
                for step in range(2):
                    with session.no_sync():
                        backward_of(model, rank, 10 * number + step)
                    for total, p in zip(own, model.parameters(), strict=True):
                        total.add_(p.grad)
                    optimizer.step()
            carried = session.state_dict()["session"]["residuals"]
            rest = [carried.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
        return own, optimizer.sums, rest

    told = run_ranks(world_size, rank_main)
    applied, rest, due = told[0][1], mean([r for _, _, r in told]), mean([o for o, _, _ in told])
    for a, r, d in zip(applied, rest, due, strict=True):
        torch.testing.assert_close(a + r, d, rtol=1e-9, atol=1e-9)
    for _, sums, _ in told:
        assert all(torch.equal(a, s) for a, s in zip(applied, sums, strict=True))


def merges(methods, cuts):
    """Groups of the four tensors of a network, cut where `cuts` says."""
    edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 4]
    return tuple(Merge(a, b, methods[a]) for a, b in pairwise(edges))


class Branches(nn.Module):
    """A trunk that is always used, and a branch that some ranks leave out."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(6, 6)
        self.trunk = nn.Linear(6, 3)

    def forward(self, x, *, with_branch):
        return self.trunk(self.branch(x) if with_branch else x)


@pytest.mark.parametrize("plan", ["single", "layerwise"])
@pytest.mark.parametrize("density", [0.2, 1.0])
def test_parameters_without_a_gradient_count_as_zeros(plan, density):
    """One of the three ranks has one of the branch: the mean is a third, less what is to come."""

    def rank_main(rank, group):
        model = Branches()
        optimizer = Bare(model.parameters())
        with gg.sparsify(
            model, optimizer, process_group=group, plan=plan, density=density
        ) as session:
            for step in range(6):
                optimizer.zero_grad()
                used = model if (rank + step) % 3 == 0 else model.trunk
                sum(3 * p.sum() for p in used.parameters()).backward()
                optimizer.step()
            session.group.barrier()
            carried = session.state_dict()["session"]["residuals"]
        named = model.named_parameters()
        return optimizer.sums, [carried.get(name, torch.zeros_like(p)) for name, p in named]

    told = run_ranks(3, rank_main)
    assert same_weights([sums for sums, _ in told])
    rest = mean([carried for _, carried in told])
    for of_step, applied, left in zip((1, 1, 3, 3), told[0][0], rest, strict=True):
        torch.testing.assert_close(applied + left, torch.full_like(applied, 6.0 * of_step))
        assert density < 1 or not left.any()


def test_gradients_out_of_the_order_of_the_plan_are_sent_in_it():
    """Each rank has them in another order."""

    def rank_main(rank, group):
        model = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.sparsify(
            model, optimizer, process_group=group, plan="layerwise", density=1.0
        ) as session:
            one, other = ((1 + i) * model[i].sum() for i in ((0, 1) if rank else (1, 0)))
            (one + other).backward()
            came = list(session._aggregation.stamps())
        return came, [p.grad.unique().tolist() for p in model]

    told = run_ranks(2, rank_main)
    assert told[0][0] != told[1][0]
    assert [grads for _, grads in told] == [[[1.0], [2.0]]] * 2


def test_accumulated_gradients_are_those_of_one_batch():
    def run(parts):
        def rank_main(rank, group):
            model = network(dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with gg.sparsify(
                model, optimizer, process_group=group, plan="layerwise", density=0.2
            ) as session:
                for step in range(4):
                    optimizer.zero_grad()
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    batch = torch.randn(8, 6, generator=generator, dtype=torch.float64)
                    *early, last = batch.chunk(parts)
                    for part in early:
                        with session.no_sync():
                            (model(part).square().sum() / 8).backward()
                    (model(last).square().sum() / 8).backward()
                    optimizer.step()
                assert session.stats().rounds == 4
            return [p.detach() for p in model.parameters()]

        return run_ranks(2, rank_main)[0]

    for whole, parted in zip(run(1), run(4), strict=True):
        torch.testing.assert_close(whole, parted)


def test_a_step_without_a_backward_pass_of_its_own_is_a_round():
    """By hand, and with all passes inside no_sync(): no optimizer steps with one rank's own."""

    def rank_main(rank, group):
        model, optimizer, session = start(group, "single", density=1.0)
        with session:
            for p in model.parameters():
                p.grad = torch.full_like(p, float(rank))
            optimizer.step()
            assert all(bool((p.grad == 0.5).all()) for p in model.parameters())
            optimizer.zero_grad()
            with session.no_sync():
                backward_of(model, rank, 0)
            optimizer.step()
            assert session.stats().rounds == 2
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))


def test_a_step_that_a_scaler_leaves_out_is_left_out_by_all_optimizers():
    """Else what met would be applied and, as the round is taken back, carried over as well."""

    def rank_main(rank, group):
        model = network()
        both = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        settings = {"plan": "layerwise", "density": 0.2, "scaler": scaler}
        with gg.sparsify(model, both, process_group=group, **settings) as session:
            for overflows in (False, True, False):
                model.zero_grad()
                before = [p.detach().clone() for p in model.parameters()]
                carried = session.state_dict()["session"]["residuals"]
                factor = float("inf") if overflows and rank else 1.0
                loss = model(torch.ones(4, 6) + rank).square().mean()
                scaler.scale(loss + factor * model[0].weight.sum()).backward()
                for optimizer in both:
                    scaler.step(optimizer)
                scaler.update()
                now = list(model.parameters())
                same = [torch.equal(a, b) for a, b in zip(now, before, strict=True)]
                assert same == [overflows] * 4
                if overflows:
                    kept = session.state_dict()["session"]["residuals"]
                    torch.testing.assert_close(kept, carried)
                    assert any(bool(each.any()) for each in kept.values())
            assert session.stats().nonfinite_rounds == 1
            session.group.barrier()
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))


def test_residuals_follow_the_scale_of_the_loss():
    """Scales are powers of two: whatever they are, the weights are the same to the last bit."""

    def run(scales):
        def rank_main(rank, group):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales is not None)
            settings = {"plan": "layerwise", "density": 0.2, "process_group": group}
            with gg.sparsify(model, optimizer, scaler=scaler, **settings):
                for step in range(5):
                    optimizer.zero_grad()
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    loss = model(torch.randn(4, 6, generator=generator)).square().mean()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    if scales is not None:
                        scaler.update(scales[step])
            return [p.detach() for p in model.parameters()]

        return run_ranks(2, rank_main)[0]

    scaled = run([4.0, 4.0, 1.0, 8.0, 0.5])
    assert all(torch.equal(a, b) for a, b in zip(scaled, run(None), strict=True))


def test_starved_tensors_are_told_of_and_per_tensor_selection_starves_none():
    def starved(select, rounds):
        def rank_main(rank, group):
            model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with gg.sparsify(
                model, optimizer, process_group=group, plan="single", density=0.02, select=select
            ) as session:
                for _ in range(rounds):
                    for p in model.parameters():
                        p.grad = torch.full_like(p, 1e-9)
                    model[0].weight.grad[0, 0] = 1.0
                    optimizer.step()
                return session.stats()

        return run_ranks(2, rank_main)[0]

    stats = starved("per_group", 190)
    assert stats.starved_after == 189
    assert stats.starved_tensors == 3
    assert stats.starved_share == pytest.approx((6 + 18 + 3) / 63)
    assert "3 tensors starved" in str(stats)
    stats = starved("per_tensor", 10)
    assert stats.starved_tensors == stats.longest_wait_rounds == 0


def test_memory_and_bytes_are_as_stated():
    def rank_main(rank, group):
        model, _, session = start(group, "single", density=0.1)
        with session:
            backward_of(model, rank, 0)
            stats = session.stats()
            made = session._aggregation.groups[0]
            assert stats.all_reduce_bytes == 4 * made.numel * 4 // 3
            (of,) = stats.groups
            assert (of.tensors, of.elements, of.method) == (4, made.numel, "sparse")
            assert of.chosen == made.numel // 10
            assert stats.bytes_sent == of.bytes_sent == 2 * made._message.nbytes
            messages = 4 * made._message.nbytes
            assert stats.extra_memory_bytes == 2 * 4 * made.numel + messages
            assert stats.residual_ratio > 0

    run_ranks(3, rank_main)
