"""Plans that are measured: agreed on by all ranks, honest about dense, and taken along."""

import logging
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import Merge, Plan
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import assume_costs, backward_of, same_weights, slow_down, start, train

DECIDED = 40  # rounds after which a small model has its plan, and has compared it


@pytest.mark.parametrize(("dtype", "plan"), [(torch.float32, 110), (torch.bfloat16, 55)])
def test_a_number_of_bytes_is_of_gradients_in_their_own_type(dtype, plan):
    told = train(2, 0, dtype=dtype, plan=plan, look=lambda s: [g.tensors for g in s.stats().groups])
    assert [groups for _, groups in told] == [[3, 1]] * 2


@pytest.mark.parametrize(
    ("rule", "tensors"),
    [
        *((name, [4]) for name in ("optimal", "greedy", "mg-wfbp", "single")),
        *((name, [1, 1, 1, 1]) for name in ("layerwise", "wfbp")),
        *((12, [1, 1, 1, 1]), (13, [2, 1, 1]), (10_000, [4])),
    ],
)
def test_groups_to_begin_with(rule, tensors):
    """One, where a rule waits for times; a threshold is met by the tensor that reaches it."""
    for _, stats in train(2, 1, plan=rule, look=lambda s: s.stats()):
        assert [group.tensors for group in stats.groups] == tensors
        assert {group.method for group in stats.groups} == {"sparse"}


@pytest.mark.parametrize("plan", ["optimal", "greedy", "mg-wfbp"])
def test_a_plan_is_measured_and_is_the_same_on_all_ranks(plan):
    def look(session):
        stats = session.stats()
        assert stats.measured_seconds > 0
        assert len(stats.groups) == len(session.plan.groups)
        assert {"single, sparse", "greedy, sparse", "layerwise, dense"} <= {*stats.alternatives}
        if plan == "greedy":
            assert stats.predicted_seconds == stats.alternatives["greedy, sparse"]
        return session.plan, session.state_dict()["session"]["plan"], stats.compared_seconds

    told = train(3, DECIDED, plan=plan, density=0.1, look=look)
    assert all(seen == told[0][1] for _, seen in told)
    assert same_weights([weights for weights, _ in told])


class Wide(nn.Module):
    """Half a million parameters that take no time to compute with."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(1 << 16) for _ in range(8))

    def forward(self):
        return sum((part * part.detach().cos()).sum() for part in self.parts)


def test_no_step_waits_long_for_a_plan():
    """All gradients whole take a second on this network, and a step takes some hundredths."""

    def rank_main(rank, group):
        slow_down(group, bytes_per_second=2e6)
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        took = []
        with gg.sparsify(model, optimizer, process_group=group, density=0.02) as session:
            for _ in range(200):
                begun = time.perf_counter()
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
                took.append(time.perf_counter() - begun)
                if session.plan is not None and len(took) % 20 == 0:
                    break
            assert session.plan is not None
            assert session.stats().refused is None
            group.barrier()
        return max(took[1:])

    assert max(run_ranks(2, rank_main)) < 0.8


def test_nothing_is_compressed_where_dense_is_predicted_to_win_and_it_is_said(monkeypatch, caplog):
    assume_costs(monkeypatch, sparse=2e-3, dense=1e-3)
    with caplog.at_level(logging.WARNING, "gossipgrad"):
        told = train(2, DECIDED, density=0.1, look=lambda s: s.stats())
    assert len([record for record in caplog.records if record.name == "gossipgrad"]) == 1
    for _, stats in told:
        assert {group.method for group in stats.groups} == {"dense"}
        assert "predicted" in stats.refused
        assert stats.refused in str(stats)


@pytest.mark.parametrize(("dense_seconds", "method"), [(0.0, "dense"), (0.05, "sparse")])
def test_the_faster_in_real_steps_stays(monkeypatch, dense_seconds, method):
    """Whatever was predicted: here, that sparse gradients are a little faster."""
    assume_costs(monkeypatch, sparse=1e-3, dense=2e-3)

    def rank_main(rank, group):
        slow_down(group, dense_seconds=dense_seconds)
        gather = group.all_gather_into_

        def slow_gather(gathered, mine):
            time.sleep(0.03)
            return gather(gathered, mine)

        group.all_gather_into_ = slow_gather
        model, optimizer, session = start(group, "optimal", density=0.1)
        with session:
            for step in range(DECIDED):
                backward_of(model, rank, step)
                optimizer.step()
            group.barrier()
            return session.stats()

    for stats in run_ranks(2, rank_main):
        assert {group.method for group in stats.groups} == {method}
        assert (stats.refused is None) == (method == "sparse")
        took = stats.compared_seconds
        assert (took["dense"] < took["plan"]) == (method == "dense")


def test_plans_are_made_anew_when_that_is_asked_for(monkeypatch):
    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal", methods=("sparse",))
        found = []
        with session:
            for step in range(2 * DECIDED):
                if step == DECIDED:
                    found.append(session.plan)
                    session.replan()
                    assert session.plan is None
                backward_of(model, rank, step)
                optimizer.step()
            group.barrier()
            return [*found, session.plan]

    assume_costs(monkeypatch, sparse=1e-3)
    for plans in run_ranks(2, rank_main):
        assert None not in plans

    def unmeasured(rank, group):
        with (
            start(group, "single")[-1] as session,
            pytest.raises(ValueError, match="measures nothing"),
        ):
            session.replan()

    run_ranks(2, unmeasured)


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

    def short(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrong = Plan(groups=plan.groups[:1], finish_seconds=1.0, lower_bound_seconds=0.5)
        with pytest.raises(ValueError, match="the plan is for 3 tensors, the model trains 4"):
            gg.sparsify(model, optimizer, process_group=group, plan=wrong)

    run_ranks(2, short)


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
    ("names", "message"),
    [
        (("2.bias", "body.weight", "0.bias", "head"), "does not train: 'body.weight'. Make it"),
        (("2.bias", "2.weight", "0.bias"), "does not name a tensor that .* trains: '0.weight'"),
    ],
)
def test_a_plan_for_other_tensors_is_refused(names, message):
    groups = (Merge(0, len(names), "sparse"),)
    plan = Plan(groups=groups, finish_seconds=1.0, lower_bound_seconds=0.5, names=names)

    def other(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=message):
            gg.sparsify(model, optimizer, process_group=group, plan=plan)

    run_ranks(2, other)


@pytest.mark.parametrize("more", [{}, {"momentum_correction": 0.9}])
def test_a_measured_plan_goes_on_after_a_resume_bit_for_bit(monkeypatch, more):
    assume_costs(monkeypatch, sparse=1e-3)
    states, settings = {}, {"plan": "optimal", "methods": ("sparse",), **more}

    def first(rank, group):
        model, optimizer, session = start(group, **settings)
        with session:
            for step in range(DECIDED):
                if step == DECIDED - 3:
                    states[rank] = session.state_dict()
                backward_of(model, rank, step)
                optimizer.step()
            session.group.barrier()
        return [p.detach() for p in model.parameters()]

    def second(rank, group):
        model, optimizer, session = start(group, model=network(1), **settings)
        with session:
            session.load_state_dict(states[rank])
            assert session.plan is not None
            for step in range(DECIDED - 3, DECIDED):
                backward_of(model, rank, step)
                optimizer.step()
            session.group.barrier()
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, first) + run_ranks(2, second))


@pytest.mark.parametrize("saved_at", [4, 14, 22])
def test_a_state_from_before_the_decision_leads_to_a_plan(monkeypatch, saved_at):
    """Also where training went on beside it, in memory."""
    assume_costs(monkeypatch, sparse=1e-3, dense=1.1e-3)

    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal")
        with session:
            for step in range(DECIDED):
                if step == saved_at:
                    state = session.state_dict()
                backward_of(model, rank, step)
                optimizer.step()
            session.load_state_dict(state)
            for step in range(DECIDED):
                backward_of(model, rank, step)
                optimizer.step()
            group.barrier()
            return session.stats().compared_seconds

    for compared in run_ranks(2, rank_main):
        assert "plan" in compared
