"""Plans that are measured: agreed on by all ranks, honest about dense, and taken along."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import Group as Merge
from gossipgrad.planning import Plan
from gossipgrad.sparsification import Replan, _planner
from gossipgrad.sparsification._rules import merges_without_times
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import backward_of, costs_that_say, same_weights, start, train


@pytest.mark.parametrize(("dtype", "plan"), [(torch.float32, 110), (torch.bfloat16, 55)])
def test_a_number_of_bytes_is_of_gradients_in_their_own_type(dtype, plan):
    told = train(2, 0, dtype=dtype, plan=plan, look=lambda s: [g.tensors for g in s.stats().groups])
    assert [groups for _, groups in told] == [[3, 1]] * 2


def test_costs_are_measured_in_the_type_of_most_elements():
    def rank_main(rank, group):
        largest, *others = nn.Linear(8, 8, bias=False), nn.Linear(8, 5), nn.Linear(5, 8)
        model = nn.Sequential(largest, *(other.bfloat16() for other in others))
        with start(group, model=model)[-1] as session:
            assert session._aggregation.dtype is torch.bfloat16

    run_ranks(2, rank_main)


@pytest.mark.parametrize("plan", ["optimal", "greedy", "mg-wfbp"])
def test_a_plan_is_measured_and_is_the_same_on_all_ranks(plan):
    def look(session):
        stats = session.stats()
        assert session.plan is not None
        assert stats.measured_seconds > 0
        assert len(stats.groups) == len(session.plan.groups)
        assert {"single, sparse", "greedy, sparse", "layerwise, dense"} <= {*stats.alternatives}
        if plan == "optimal":
            assert stats.predicted_seconds <= min(stats.alternatives.values()) * 1.0001
        return session.plan, session.state_dict()["session"]["plan"]

    told = train(3, 9, plan=plan, density=0.1, look=look)
    assert all(seen == told[0][1] for _, seen in told)
    assert same_weights([weights for weights, _ in told])


@pytest.mark.parametrize("plan", ["greedy", "mg-wfbp"])
def test_a_rule_that_is_asked_for_is_followed_where_another_plan_is_better(plan, monkeypatch):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1.0, dense=1e-3))
    for _, stats in train(2, 7, plan=plan, density=0.1, look=lambda s: s.stats()):
        assert stats.predicted_seconds == stats.alternatives[f"{plan}, sparse"]
        assert {group.method for group in stats.groups} == {"sparse"}


def test_what_other_groups_took_is_not_told_of_the_present_ones():
    def look(session):
        before = session.stats().measured_seconds
        session._aggregation.regroup(session._aggregation.merges)
        return before, session.stats().measured_seconds

    for _, (before, after) in train(2, 3, plan="single", density=0.1, look=look):
        assert before > 0
        assert after is None


def test_nothing_is_compressed_where_dense_wins_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=2e-3, dense=1e-3))
    with caplog.at_level(logging.WARNING, "gossipgrad"):
        replan = Replan(contest=False)
        told = train(2, 9, density=0.1, replan=replan, look=lambda s: s.stats())
    said = [record.message for record in caplog.records if record.name == "gossipgrad"]
    assert len(said) == 1
    assert "nothing is compressed: gradients are predicted" in said[0]
    for _, stats in told:
        assert {group.method for group in stats.groups} == {"dense"}
        assert stats.refused is not None
        assert stats.refused in str(stats)


def test_everything_is_compressed_where_that_wins(monkeypatch):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))
    for _, stats in train(2, 9, density=0.1, look=lambda s: s.stats()):
        assert {group.method for group in stats.groups} == {"sparse"}
        assert stats.refused is None


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
        assert state["plan"]["names"] == list(plan.names)
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


def test_a_measured_plan_is_as_good_in_another_session(monkeypatch):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]

    def look(session):
        return session.plan, session.state_dict()["session"]["plan"]

    (_, (measured, of_session)), *_ = train(2, 9, density=0.1, look=look)
    assert sorted(measured.names) == names
    assert list(measured.names) == of_session["names"]
    turned = replace(measured, names=measured.names[::-1])
    for given in (measured, turned):
        for _, (kept, used) in train(2, 1, plan=given, density=0.1, look=look):
            assert kept == given
            assert used["names"] == list(given.names)


@pytest.mark.parametrize("more", [{}, {"momentum_correction": 0.9}])
def test_a_measured_plan_goes_on_after_a_resume_bit_for_bit(monkeypatch, more):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))
    states, settings = {}, {"plan": "optimal", "replan": Replan(every=2, contest=False), **more}

    def first(rank, group):
        model, optimizer, session = start(group, **settings)
        with session:
            for step in range(12):
                if step == 9:
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
            known = session.state_dict()["session"]["planner"]
            assert known == states[rank]["session"]["planner"]
            for step in range(9, 12):
                backward_of(model, rank, step)
                optimizer.step()
            session.group.barrier()
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, first) + run_ranks(2, second))


def test_a_state_from_among_the_measured_rounds_leads_to_a_plan(monkeypatch):
    """Also where training went on beside it, in memory."""
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))

    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal")
        with session:
            for step in range(8):
                if step == 4:
                    state = session.state_dict()
                backward_of(model, rank, step)
                optimizer.step()
            assert session.plan is not None
            session.load_state_dict(state)
            assert session.plan is None
            for step in range(4, 8):
                backward_of(model, rank, step)
                optimizer.step()
            assert session.plan is not None
            session.group.barrier()

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("rule", "stops"),
    [
        *((name, [4]) for name in ("optimal", "greedy", "mg-wfbp", "single")),
        *((name, [1, 2, 3, 4]) for name in ("layerwise", "wfbp")),
        *((8, [2, 3, 4]), (9, [3, 4]), (100, [4])),
    ],
)
def test_groups_to_begin_with(rule, stops):
    """One, where a rule waits for times; a threshold is met by the tensor that reaches it."""
    merges = merges_without_times(rule, [4, 4, 8, 4], "sparse")
    assert [merge.stop for merge in merges] == stops
    assert {merge.method for merge in merges} == {"sparse"}
