"""Plans that are measured: agreed on by all ranks, honest about dense, slow to change."""

import logging
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import gossipgrad as gg
from gossipgrad.planning import Group as Merge
from gossipgrad.planning import Plan
from gossipgrad.sparsification import Replan, _planner
from gossipgrad.sparsification._costs import Costs
from gossipgrad.sparsification._drift import Course, Drift
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import backward_of, train

SIZES = (1, 1000)


def costs_that_say(**seconds):
    """Curves that grow from nothing to what is said for 1,000 elements, by method."""

    def measured(settings, *_, **__):
        return [
            Costs(name, SIZES, (1e-9, 1e-9), (1e-9, seconds[name])) for name in settings.methods
        ]

    return measured


@pytest.mark.parametrize("plan", ["optimal", "greedy", "mg-wfbp"])
def test_a_plan_is_measured_and_is_the_same_on_all_ranks(plan):
    def look(session):
        stats = session.stats()
        assert session.plan is not None
        assert stats.predicted_seconds == session.plan.finish_seconds
        assert stats.measured_seconds > 0
        assert len(stats.groups) == len(session.plan.groups)
        assert {"single, sparse", "greedy, sparse", "layerwise, dense"} <= {*stats.alternatives}
        if plan == "optimal":
            assert stats.predicted_seconds <= min(stats.alternatives.values()) * 1.0001
        return session.plan, session.state_dict()["session"]["plan"]

    told = train(3, 9, plan=plan, density=0.1, look=look)
    assert all(seen == told[0][1] for _, seen in told)
    for weights, _ in told[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, told[0][0], strict=True))


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
        told = train(2, 9, density=0.1, look=lambda s: s.stats())
    assert len(caplog.records) == 1
    assert "nothing is compressed: gradients are predicted" in caplog.text
    for _, stats in told:
        assert {group.method for group in stats.groups} == {"dense"}
        assert stats.refused is not None
        assert stats.refused in str(stats)


def test_everything_is_compressed_where_that_wins(monkeypatch):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))
    for _, stats in train(2, 9, density=0.1, look=lambda s: s.stats()):
        assert {group.method for group in stats.groups} == {"sparse"}
        assert stats.refused is None


def test_a_network_that_changes_changes_the_plan_once_and_noise_does_not(monkeypatch):
    """Costs are measured where a look finds drift, and each time the next look is farther off."""
    looks = []
    truth = {"sparse": 1e-3, "dense": 1.0}

    def measured(*args, **kwargs):
        looks.append(1)
        return costs_that_say(**truth)(*args, **kwargs)

    monkeypatch.setattr(_planner, "measure_costs", measured)

    def rank_main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        methods = []
        with gg.sparsify(
            model, optimizer, process_group=group, density=0.1, replan=Replan(every=5)
        ) as session:
            for step in range(60):
                if step == 20 and rank == 0:
                    truth.update(sparse=1.0, dense=1e-3)
                group.barrier()
                backward_of(model, rank, step)
                optimizer.step()
                methods.append({of.method for of in session.stats().groups})
            stats = session.stats()
        assert methods[7] == {"sparse"}
        assert methods[-1] == {"dense"}
        assert stats.replans == 1
        assert sum(a != b for a, b in pairwise(methods)) <= 2

    run_ranks(2, rank_main)
    assert len(looks) <= 2 * 6


def test_drift_is_told_from_noise_and_alarms_become_rare():
    drift = Drift(Replan(every=10, drift=0.2, threshold=1.0))
    assert not drift.due(9)
    for number in range(1, 200):
        noise = 0.15 if number % 2 else -0.15
        assert drift.due(10 * number)
        assert not drift.look(10 * number, [1 + noise], [1.0])
    slow = Drift(Replan(every=10, drift=0.2, threshold=1.0))
    alarms = [slow.look(10 * number, [1.5], [1.0]) for number in range(1, 6)]
    assert alarms == [False, False, False, True, True]
    fast = Drift(Replan(every=10, drift=0.2, threshold=1.0))
    assert [fast.look(10 * n, [0.2], [1.0]) for n in range(1, 3)] == [False, True]
    rounds, alarms = 0, 0
    while rounds < 10_000:
        rounds += 1
        if slow.due(rounds) and slow.look(rounds, [9.0], [1.0]):
            slow.measured_anew(rounds)
            alarms += 1
    assert alarms <= 10


def test_a_warm_up_that_ends_is_planned_anew(monkeypatch):
    asked = []

    def measured(settings, *args, density, **kwargs):
        asked.append(density)
        return costs_that_say(sparse=1e-3, dense=1.0)(settings)

    monkeypatch.setattr(_planner, "measure_costs", measured)
    course = gg.sparsification.Warmup(densities=(0.5, 0.25), steps=10, then=0.1)
    train(2, 25, density=course, look=lambda s: s.stats())
    assert sorted(asked, reverse=True) == pytest.approx([0.5] * 2 + [0.25] * 2 + [0.1] * 2)


@pytest.mark.parametrize(
    "settings",
    [{"replan": None}, {"plan": "mg-wfbp", "methods": ("dense",)}, {"replan": Replan(every=150)}],
    ids=["never", "a rule", "between looks"],
)
def test_what_a_planner_remembers_is_bounded(monkeypatch, settings):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))

    def look(session):
        return len(session._planner._times)

    for _, remembered in train(2, 137, density=0.1, look=look, **settings):
        assert remembered == (100 if settings.get("replan") == Replan(every=150) else 0)


def asked_at(monkeypatch, density, **settings):
    """The densities at which costs are measured in 100 steps, on one rank, and its stats."""
    asked = []

    def measured(settings, group, *args, density, **kwargs):
        if group.rank == 0:
            asked.append(density)
        return costs_that_say(sparse=density, dense=0.5)(settings)

    monkeypatch.setattr(_planner, "measure_costs", measured)
    ((_, stats), _) = train(2, 100, density=density, look=lambda s: s.stats(), **settings)
    return asked, stats


def test_no_plan_follows_the_first_where_nobody_asks_for_one(monkeypatch):
    course = gg.sparsification.Warmup(densities=(1.0, 0.25), steps=20, then=0.01)
    asked, stats = asked_at(monkeypatch, course, replan=None)
    assert asked == [1.0]
    assert stats.replans == 0
    assert {group.method for group in stats.groups} == {"dense"}


def test_a_density_that_does_not_matter_is_not_measured(monkeypatch):
    asked, _ = asked_at(monkeypatch, lambda step: 0.5**step, plan="mg-wfbp", methods=("dense",))
    assert len(asked) == 1


def test_a_density_that_comes_and_goes_is_measured_once_and_then_left_alone(monkeypatch):
    asked, stats = asked_at(
        monkeypatch, lambda step: 1.0 if step % 10 == 0 else 0.01, replan=Replan(every=1000)
    )
    assert asked == pytest.approx([0.01, 1.0])
    assert stats.replans == 2  # there and back: the next stay would have to be longer
    assert {group.method for group in stats.groups} == {"sparse"}


def test_stays_at_another_density_count_the_longer_the_more_there_were():
    course = Course()
    looks = []
    for step in range(10_000):
        if course.look_due(away=bool(step // 100 % 2)):
            course.looked()
            looks.append(step)
    assert len(looks) == 7
    assert looks[:3] == [100, 102, 106]
    again = Course()
    again.load(course.state())
    assert again.patience == course.patience


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


def test_a_measured_plan_goes_on_after_a_resume_bit_for_bit(monkeypatch):
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))
    states, settings = {}, {"density": 0.1, "replan": None}

    def first(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.sparsify(model, optimizer, process_group=group, **settings) as session:
            for step in range(12):
                if step == 9:
                    states[rank] = session.state_dict()
                backward_of(model, rank, step)
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    def second(rank, group):
        model = network(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.sparsify(model, optimizer, process_group=group, **settings) as session:
            session.load_state_dict(states[rank])
            assert session.plan is not None
            for step in range(9, 12):
                backward_of(model, rank, step)
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    for whole, resumed in zip(run_ranks(2, first), run_ranks(2, second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
