"""Rounds: what is averaged, what is not sent yet, and that nothing is lost on the way."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossipgrad.planning import Merge
from gossipgrad.sparsification import Warmup
from support.replicas import network
from support.sparse import on_ranks, same_weights


class Bare(torch.optim.Optimizer):
    """Adds up the gradients that it is given."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {})
        self.sums = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for total, p in zip(self.sums, self.param_groups[0]["params"], strict=True):
            total.add_(p.grad)


def mean(values):
    return [torch.stack(each).mean(0) for each in zip(*values, strict=True)]


def rest_of(me):
    """What is not sent yet of each parameter."""
    carried = me.carried()
    return [carried.get(name, torch.zeros_like(p)) for name, p in me.model.named_parameters()]


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
    value_dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_nothing_is_lost_whatever_is_planned_anew(world_size, plans, cuts, **more):
    """Applied means, plus the mean of residuals, are the sum of the mean gradients."""

    def merges(methods):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 4]
        return tuple(Merge(a, b, methods[a]) for a, b in pairwise(edges))

    def use(me):
        own = [torch.zeros_like(p) for p in me.model.parameters()]
        for number, methods in enumerate(plans):
            me.session._aggregation.regroup(merges(methods))  # no public door mixes them at will
            for step in range(2):
                with me.session.no_sync():
                    me.backward(10 * number + step)
                for total, p in zip(own, me.model.parameters(), strict=True):
                    total.add_(p.grad)
                me.optimizer.step()
        return own, me.optimizer.sums, rest_of(me)

    told = on_ranks(
        use,
        "single",
        world_size=world_size,
        make=lambda: network(dtype=torch.float64),
        optimizer=Bare,
        together=False,
        methods=("sparse", "dense"),
        **more,
    )
    applied, rest, due = told[0][1], mean([r for _, _, r in told]), mean([o for o, _, _ in told])
    for a, r, d in zip(applied, rest, due, strict=True):
        torch.testing.assert_close(a + r, d, rtol=1e-9, atol=1e-9)
    assert same_weights([sums for _, sums, _ in told])


@pytest.mark.parametrize("value_dtype", [None, torch.bfloat16])
def test_nothing_is_lost_where_each_rank_adds_up_a_part(value_dtype):
    """With more than 8 ranks; bytes are then those of twice a selection, whatever the ranks."""
    sent = {}
    for world_size in (9, 11):

        def use(me):
            own = [torch.zeros_like(p) for p in me.model.parameters()]
            for step in range(4):
                with me.session.no_sync():
                    me.backward(step)
                for total, p in zip(own, me.model.parameters(), strict=True):
                    total.add_(p.grad)
                me.optimizer.step()
            return own, me.optimizer.sums, rest_of(me), me.session.stats().bytes_sent

        told = on_ranks(
            use,
            "single",
            world_size=world_size,
            make=lambda: network(dtype=torch.float64, width=300),
            optimizer=Bare,
            density=0.1,
            value_dtype=value_dtype,
        )
        rest, due = mean([r for _, _, r, _ in told]), mean([o for o, *_ in told])
        for a, r, d in zip(told[0][1], rest, due, strict=True):
            torch.testing.assert_close(a + r, d, rtol=1e-9, atol=1e-9)
        assert same_weights([sums for _, sums, *_ in told])
        sent[world_size] = told[0][3]
    assert sent[11] < 1.1 * sent[9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_sent_whole_are_sent_in_the_type_of_the_model(dtype):
    def use(me):
        me.train(2)
        stats = me.session.stats()
        assert stats.bytes_sent == stats.all_reduce_bytes == 2 * 83 * dtype.itemsize
        return me.weights()

    model = lambda: network(dtype=dtype)  # noqa: E731
    assert same_weights(on_ranks(use, "single", make=model, methods=("dense",)))


class Branches(nn.Module):
    """A trunk that is always used, and a branch that some ranks leave out."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(6, 6)
        self.trunk = nn.Linear(6, 3)


@pytest.mark.parametrize("plan", ["single", "layerwise"])
@pytest.mark.parametrize("density", [0.2, 1.0])
def test_parameters_without_a_gradient_count_as_zeros(plan, density):
    """One of the three ranks has one of the branch: the mean is a third, less what is to come."""

    def use(me):
        for step in range(6):
            me.optimizer.zero_grad()
            used = me.model if (me.rank + step) % 3 == 0 else me.model.trunk
            sum(3 * p.sum() for p in used.parameters()).backward()
            me.optimizer.step()
        me.group.barrier()
        return me.optimizer.sums, rest_of(me)

    told = on_ranks(use, plan, world_size=3, make=Branches, optimizer=Bare, density=density)
    assert same_weights([sums for sums, _ in told])
    rest = mean([carried for _, carried in told])
    for of_step, applied, left in zip((1, 1, 3, 3), told[0][0], rest, strict=True):
        torch.testing.assert_close(applied + left, torch.full_like(applied, 6.0 * of_step))
        assert density < 1 or not left.any()


def test_a_step_without_a_backward_pass_of_its_own_is_a_round():
    """By hand, and with all passes inside no_sync(): no optimizer steps with one rank's own."""

    def use(me):
        for p in me.model.parameters():
            p.grad = torch.full_like(p, float(me.rank))
        me.optimizer.step()
        assert all(bool((grad == 0.5).all()) for grad in me.gradients())
        me.optimizer.zero_grad()
        with me.session.no_sync():
            me.backward(0)
        me.optimizer.step()
        assert me.session.stats().rounds == 2
        return me.weights()

    assert same_weights(on_ranks(use, "single", density=1.0))


def two(parameters, lr):
    parameters = list(parameters)
    return [torch.optim.SGD(part, lr=lr) for part in (parameters[:2], parameters[2:])]


def test_a_step_that_a_scaler_leaves_out_is_left_out_by_all_optimizers():
    """Else what met would be applied and, as the round is taken back, be in residuals as well."""
    x = torch.ones(4, 6)

    def use(me):
        for overflows in (False, True, False):
            me.model.zero_grad()
            before, carried = me.weights(), me.carried()
            factor = float("inf") if overflows and me.rank else 1.0
            loss = me.model(x + me.rank).square().mean() + factor * me.model[0].weight.sum()
            me.scaler.scale(loss).backward()
            for optimizer in me.optimizer:
                me.scaler.step(optimizer)
            me.scaler.update()
            same = [torch.equal(a, b) for a, b in zip(me.weights(), before, strict=True)]
            assert same == [overflows] * 4
            if overflows:
                torch.testing.assert_close(me.carried(), carried)
                assert any(bool(each.any()) for each in carried.values())
        assert me.session.stats().nonfinite_rounds == 1
        return me.weights()

    assert same_weights(on_ranks(use, optimizer=two, scales=True))


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_no_stage_of_a_warm_up_sends_more_than_an_all_reduce(share):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))

    def use(me):
        me.train(4)
        stats = me.session.stats()
        assert stats.bytes_sent <= stats.all_reduce_bytes
        assert any(each.any() for each in me.carried().values()) == (share == 0.25)
        return me.weights()

    density = Warmup(densities=(1.0, share), steps=2, then=0.01)
    assert same_weights(on_ranks(use, "single", world_size=4, make=make, density=density))
