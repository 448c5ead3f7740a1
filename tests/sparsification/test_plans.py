"""Plans that are measured: agreed on by all ranks, honest about dense, and taken along."""

import logging
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import Merge, Plan
from gossipgrad.sparsification import _planner
from support.replicas import network
from support.sparse import assume_costs, on_ranks, same_weights, slow_down, train


@pytest.mark.parametrize("plan", ["optimal", "greedy", "mg-wfbp"])
def test_a_plan_is_measured_and_is_the_same_on_all_ranks(plan):
    def use(me):
        session = me.session
        me.train_until_decided()
        me.train(3)
        stats = session.stats()
        assert len(stats.groups) == len(session.plan.groups)
        assert stats.predicted_seconds == session.plan.finish_seconds > 0
        state = session.state_dict()["session"]["plan"]
        return (session.plan, state, stats.compared_seconds), me.weights()

    told = on_ranks(use, plan, world_size=3, density=0.1)
    assert all(seen == told[0][0] for seen, _ in told)
    assert same_weights([weights for _, weights in told])


def decide(me):
    """Trains until the plan is final; the figures then."""
    me.train_until_decided()
    return me.session.stats()


def slow_collectives(monkeypatch, **costs):
    """Has no time pass on a rank, as its planner sees it, but that of its collectives."""
    clocks = Counter()
    monkeypatch.setattr(_planner, "perf_counter", lambda: clocks[threading.current_thread().name])

    def slow(me):
        def pass_(method, size_bytes):
            clocks[f"rank {me.rank}"] += costs[method]

        slow_down(me.group, pass_)
        return me

    return slow


class Parts(nn.Module):
    """Equal tensors that take no time to compute with."""

    def __init__(self, count, elements):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(elements) for _ in range(count))

    def forward(self):
        return sum((part * part.detach().cos()).sum() for part in self.parts)


def test_no_step_exchanges_much_for_a_plan():
    """All gradients whole, as they are until there is a plan, take long on this network."""

    def use(me):
        total, of_steps = 0, []

        def pass_(method, size_bytes):
            nonlocal total
            total += size_bytes
            time.sleep(size_bytes / 2e7)

        slow_down(me.group, pass_)
        while me.session.plan is None:
            before = total
            me.optimizer.zero_grad()
            me.model().backward()
            me.optimizer.step()
            of_steps.append(total - before)
        return max(of_steps) / (4 * sum(p.numel() for p in me.model.parameters()))

    assert max(on_ranks(use, "optimal", make=lambda: Parts(8, 1 << 16), density=0.02)) < 1.5


def test_nothing_is_compressed_where_dense_is_predicted_to_win_and_it_is_said(monkeypatch, caplog):
    assume_costs(monkeypatch, sparse=2e-3, dense=1e-3)
    with caplog.at_level(logging.WARNING, "gossipgrad"):
        told = on_ranks(decide, "optimal", density=0.1)
    assert len([record for record in caplog.records if record.name == "gossipgrad"]) == 1
    for stats in told:
        assert {group.method for group in stats.groups} == {"dense"}
        assert "predicted" in stats.refused
        assert stats.refused in str(stats)


def test_what_is_not_compressed_goes_in_the_buckets_of_ddp(monkeypatch):
    assume_costs(monkeypatch, sparse=2e-3, dense=1e-3)

    def use(me):
        while me.session.stats().refused is None:
            me.optimizer.zero_grad()
            me.model().backward()
            me.optimizer.step()
        return [group.tensors for group in me.session.stats().groups]

    for tensors in on_ranks(use, "optimal", make=lambda: Parts(3, 300_000), density=0.1):
        assert tensors == [1, 2]  # the first of 1 MiB, others of 25


@pytest.mark.parametrize(("dense_seconds", "method"), [(0.0, "dense"), (0.2, "sparse")])
def test_the_faster_in_real_steps_stays(monkeypatch, dense_seconds, method):
    """Whatever was predicted: here, that sparse gradients are a little faster."""
    assume_costs(monkeypatch, sparse=1e-3, dense=2e-3)
    slow = slow_collectives(monkeypatch, sparse=0.03, dense=dense_seconds)
    for stats in on_ranks(lambda me: decide(slow(me)), "optimal", density=0.1):
        assert {group.method for group in stats.groups} == {method}
        assert (stats.refused is None) == (method == "sparse")
        took = stats.compared_seconds
        assert (took["dense"] < took["plan"]) == (method == "dense")


def test_a_plan_is_for_the_density_after_the_warm_up_and_compared_then(monkeypatch):
    assume_costs(monkeypatch, sparse=1e-3, dense=1.1e-3)
    slow = slow_collectives(monkeypatch, sparse=0.03, dense=0.03)

    def use(me):
        slow(me)
        while me.session.plan is None:
            me.train()
        assert not me.session.stats().compared_seconds
        me.train_until_decided()
        return me.session.stats().compared_seconds

    warmup = gg.sparsification.Warmup(steps=20, then=0.01)
    for compared in on_ranks(use, "optimal", density=warmup):
        assert compared.keys() == {"plan", "dense"}


def test_each_density_of_a_warm_up_is_sent_as_what_is_faster_there(monkeypatch):
    """Here half of the elements take longer than all by an all-reduce, and a tenth less long."""
    assume_costs(monkeypatch, sparse=1e-3, dense=1.1e-3)
    clocks = Counter()
    monkeypatch.setattr(_planner, "perf_counter", lambda: clocks[threading.current_thread().name])
    warmup = gg.sparsification.Warmup(densities=(1.0, 0.5), steps=40, then=0.1)

    def use(me):
        def pass_(method, size_bytes):
            is_dense = method == "dense"  # what is sent besides gradients takes no time
            seconds = 3e-4 * (size_bytes - 256) if is_dense else 1e-3 * (size_bytes - 24)
            clocks[f"rank {me.rank}"] += seconds

        slow_down(me.group, pass_)
        methods, refused = [], []
        for _ in range(3):
            me.train(40)
            stats = me.session.stats()
            methods.append({group.method for group in stats.groups})
            refused.append(stats.refused)
        assert refused == [None] * 3
        assert stats.compared_seconds["plan"] < stats.compared_seconds["dense"]
        return methods

    for methods in on_ranks(use, "optimal", density=warmup):
        assert methods == [{"dense"}, {"dense"}, {"sparse"}]


def test_a_plan_can_be_given():
    plan = Plan(
        groups=(Merge(0, 3, "sparse"), Merge(3, 4, "dense")),
        finish_seconds=1.0,
        lower_bound_seconds=0.5,
    )
    told = train(2, 3, plan=plan, density=0.1, look=lambda s: (s.plan, s.stats()))
    for _, (kept, stats) in told:
        assert kept == plan
        assert [of.method for of in stats.groups] == ["sparse", "dense"]


def test_a_plan_finds_its_tensors_by_name():
    """The profile of such a plan may have recorded them in another order than the session's."""
    plan = Plan(
        groups=(Merge(0, 1, "dense"), Merge(1, 4, "sparse")),
        finish_seconds=1.0,
        lower_bound_seconds=0.5,
        names=("2.weight", "2.bias", "0.weight", "0.bias"),
    )

    def look(session):
        return [of.elements for of in session.stats().groups], session.state_dict()["session"]

    for _, (elements, state) in train(2, 3, plan=plan, density=0.1, look=look):
        assert elements == [24, 59]
        assert {"2.bias", "0.weight", "0.bias"} == state["residuals"].keys()
    bare = replace(plan, names=())  # counts from the model's last tensor, which is a bias
    assert train(2, 1, plan=bare, density=0.1, look=look)[0][1][0] == [3, 80]


@pytest.mark.parametrize(
    ("names", "tensors", "named"),
    [
        ((), 3, "3 tensors, the model trains 4"),
        (("2.bias", "body.weight", "0.bias", "head"), 4, "'body.weight'"),
        (("2.bias", "2.weight", "0.bias"), 3, "'0.weight'"),
    ],
)
def test_a_plan_for_other_tensors_is_refused(names, tensors, named):
    groups = (Merge(0, tensors, "sparse"),)
    plan = Plan(groups=groups, finish_seconds=1.0, lower_bound_seconds=0.5, names=names)
    with pytest.raises(ValueError, match=named):
        on_ranks(lambda me: None, plan)


@pytest.mark.parametrize("more", [{}, {"momentum_correction": 0.9}])
def test_a_measured_plan_goes_on_after_a_resume_bit_for_bit(monkeypatch, more):
    assume_costs(monkeypatch, sparse=1e-3)
    settings = {"plan": "optimal", "methods": ("sparse",), **more}

    def first(me):
        me.train_until_decided()
        state, made = me.session.state_dict(), me.steps
        me.train(3)
        return state, made, me.weights()

    def second(me):
        me.session.load_state_dict(states[me.rank])
        assert me.session.plan is not None
        me.steps = steps[me.rank]
        me.train(3)
        return me.weights()

    states, steps, weights = zip(*on_ranks(first, **settings), strict=True)
    assert same_weights([*weights, *on_ranks(second, make=lambda: network(1), **settings)])
