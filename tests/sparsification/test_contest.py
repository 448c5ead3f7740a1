"""Plans that compete in real steps: the fastest stays, and all ranks change alike."""

import logging

import pytest
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group
from gossipgrad.planning import Method, plan, single, threshold
from gossipgrad.sparsification import Replan, _planner
from gossipgrad.sparsification._rivals import Rivals, rivals_of
from gossipgrad.sparsification._verdicts import kind_of
from support.contests import (
    CLOSE,
    DENSE_FASTER,
    FIRST,
    SPARSE_PREDICTED,
    kinds_of,
    say,
)
from support.ranks import run_ranks
from support.sparse import backward_of, blocks, costs_that_say, start, train


def said(caplog):
    return [record for record in caplog.records if record.name == "gossipgrad"]


def test_dense_is_used_where_it_is_faster_in_real_steps_and_it_is_said(monkeypatch, caplog):
    say(monkeypatch, DENSE_FASTER)
    with caplog.at_level(logging.INFO, "gossipgrad"):
        ran, stats, _ = kinds_of(30, ranks=3)
    assert blocks(ran) == [("sparse", FIRST + 3), ("dense", 5), ("sparse", 3), ("dense", 12)]
    assert [*stats.contest_seconds.values()] == pytest.approx([3.06, 1.02], rel=0.05)
    assert {group.method for group in stats.groups} == {"dense"}
    assert stats.replans == 0
    info, warning = said(caplog)
    assert info.levelno == logging.INFO
    assert "plans were not as fast as predicted: " in info.getMessage()
    assert ", 3.0" in info.getMessage()
    assert warning.getMessage() == stats.refused
    assert "nothing is compressed: measured in the run, a step takes 1.0" in stats.refused
    assert stats.refused in str(stats)


def test_what_is_refused_by_prediction_is_said_where_dense_plans_compete_alone(monkeypatch, caplog):
    say(monkeypatch, CLOSE, {"sparse": 1e3, "dense": 1e-3})
    monkeypatch.setattr(_planner, "rivals_of", lambda *of: rivals_of(*of)[:1])
    with caplog.at_level(logging.INFO, "gossipgrad"):
        ran, stats, _ = kinds_of(FIRST + 22)
    assert {*ran[FIRST:]} == {"dense"}
    assert stats.contest_seconds.keys() == {"dense", "one dense"}
    assert [record.message for record in said(caplog)] == [stats.refused]
    assert "gradients are predicted to be together" in stats.refused
    _, _, states = kinds_of(FIRST + 2)
    assert [state["session"]["planner"]["refused"] for state in states] == [None] * 2
    stats = kinds_of(1, states=states, replan=Replan(contest=False))[1]
    assert "gradients are predicted to be together" in stats.refused


def test_what_is_as_fast_as_predicted_is_not_talked_about(monkeypatch, caplog):
    say(monkeypatch, {"sparse": 1.0, "mixed": 1.0, "dense": 1.1})
    with caplog.at_level(logging.INFO, "gossipgrad"):
        ran, stats, _ = kinds_of(FIRST + 22)
    rounds = FIRST + 3, 5, 5, 5, 4
    assert blocks(ran) == [*zip(["sparse", "dense"] * 2 + ["sparse"], rounds, strict=True)]
    assert not said(caplog)
    assert stats.refused is None
    assert stats.replans == 0


def test_near_ties_go_to_what_sends_all_and_that_is_said(monkeypatch, caplog):
    say(monkeypatch, {"sparse": 1.0, "mixed": 1.0, "dense": 1.03})
    _, stats, _ = kinds_of(FIRST + 22)
    assert stats.refused is not None
    assert "ms at best with compression, which gains too little (" in stats.refused
    assert [record.getMessage() for record in said(caplog)] == [stats.refused]


def test_of_two_plans_of_a_kind_the_time_is_told_of_the_one_that_won():
    methods = [
        Method("sparse", lambda n: 1.0, lambda n: 1.0),
        Method("dense", lambda n: 0.0, lambda n: 9.0),
    ]
    step = [1, 1, 1], [4, 4, 4]
    plans = [threshold(*step, methods[0], size_bytes=each) for each in (32, 16)]
    plans.append(single(*step, methods[1]))
    rivals = Rivals(Replan())
    rivals.hold(plans)
    times = {plans[0].groups: 1.0, plans[1].groups: 2.0, plans[2].groups: 3.0}
    verdict = None
    while verdict is None:
        taken = times[rivals.running.groups]
        verdict = rivals.after_round(0.1, taken, Group(dist.HashStore(), 0, 1))
    assert verdict.plan is plans[0]
    assert rivals.seconds == {"sparse": 1.0, "one dense": 3.0}


def test_a_rival_that_is_far_slower_has_one_step(monkeypatch):
    say(monkeypatch, {"sparse": 1.0, "mixed": 1.0, "dense": 2.2})
    ran, stats, _ = kinds_of(FIRST + 8)
    assert blocks(ran) == [("sparse", FIRST + 3), ("dense", 1), ("sparse", 4)]
    assert len(stats.contest_seconds) == 2


@pytest.mark.parametrize(
    ("costs", "settings"),
    [
        (SPARSE_PREDICTED, {"replan": Replan(contest=False)}),
        (SPARSE_PREDICTED, {"replan": None}),
        (SPARSE_PREDICTED, {"methods": ("sparse",)}),
        ({"sparse": 1e-3, "dense": 1e3}, {}),
    ],
    ids=["switched off", "no plan after the first", "one method", "predicted to be far slower"],
)
def test_there_is_no_contest_where_there_is_nothing_to_find_out(monkeypatch, costs, settings):
    say(monkeypatch, DENSE_FASTER, costs)
    ran, stats, _ = kinds_of(FIRST + 12, **settings)
    assert {*ran} == {"sparse"}
    assert stats.contest_seconds == {}


def test_rivals_send_all_or_nothing_whole_and_in_one_group_or_more():
    def cost(start, each):
        return lambda size: start + each * size

    sparse = Method("sparse", cost(0.1, 0.1), cost(0.5, 0.1))
    dense, fp16 = (
        Method("dense", cost(0, 0), cost(0.1, 1)),
        Method("fp16", cost(0, 0), cost(0.1, 2)),
    )
    step = [1.0] * 4, [1, 1, 1, 40]
    planned = plan(*step, [sparse, dense, fp16])
    rivals = rivals_of(planned, *step, [sparse, dense, fp16])
    assert kind_of(planned) == "mixed"
    assert [kind_of(rival) for rival in rivals] == ["dense", "one dense", "sparse", "one sparse"]
    assert {group.method for rival in rivals for group in rival.groups} == {"sparse", "dense"}
    assert len({planned.groups, *(rival.groups for rival in rivals)}) == 5
    assert [kind_of(each) for each in rivals_of(rivals[3], *step, [sparse, dense])] == [
        "dense",
        "one dense",
        "sparse",
    ]
    assert rivals_of(plan(*step, [sparse]), *step, [sparse]) == []


def test_other_plans_do_not_compete(monkeypatch):
    say(monkeypatch, DENSE_FASTER)
    told = train(2, 20, plan="greedy", density=0.1, look=lambda s: s.stats().contest_seconds)
    assert [seconds for _, seconds in told] == [{}, {}]


def test_what_has_lost_is_not_taken_again_because_it_is_predicted_to_be_faster(monkeypatch):
    """Nor does it compete again, before what is predicted has changed by more than it was wrong."""
    say(monkeypatch, DENSE_FASTER)
    asked = []
    costs = {0.2: (1e-3, 2e-3), 0.1: (1e-4, 2e-3), 0.05: (1e-3, 3e3)}

    def measured(settings, group, *_, density, **__):
        asked.extend([density] * (group.rank == 0))
        sparse, dense = costs[density]
        return costs_that_say(sparse=sparse, dense=dense)(settings)

    monkeypatch.setattr(_planner, "measure_costs", measured)
    course = gg.sparsification.Warmup(densities=(0.2, 0.1), steps=40, then=0.05)
    ran, stats, _ = kinds_of(120, density=course)
    assert asked == [0.2, 0.1, 0.05]
    first = [("sparse", FIRST + 3), ("dense", 5), ("sparse", 3), ("dense", 80 - FIRST - 11)]
    assert blocks(ran[:80]) == first
    assert [kind for kind, _ in blocks(ran[80:])] == ["dense", "sparse", "dense"]
    assert ran[80:].count("sparse") == 1
    assert stats.replans == 0


def test_a_density_that_changes_meanwhile_begins_a_contest_anew(monkeypatch):
    say(monkeypatch, CLOSE)

    def course(step):
        return 0.2 if step < 9 or 20 <= step < 30 else 0.05

    ran, stats, _ = kinds_of(70, ranks=3, density=course)
    assert blocks(ran)[0] == ("sparse", 13)
    assert len(stats.contest_seconds) == 2
    assert {group.method for group in stats.groups} == {"dense"}


def test_stages_that_are_too_short_for_a_contest_have_none(monkeypatch):
    say(monkeypatch, CLOSE)
    course = gg.sparsification.Warmup(densities=(0.5, 0.2), steps=15, then=0.05)
    ran, stats, _ = kinds_of(60, density=course)
    assert {*ran[:30]} == {"sparse"}
    assert {*ran[-5:]} == {"dense"}
    assert stats.replans == 1


def test_a_state_from_the_middle_of_a_contest_begins_it_anew_on_all_ranks(monkeypatch):
    say(monkeypatch, CLOSE)
    ran, _, states = kinds_of(FIRST + 7)
    assert ran[-1] == "dense"
    for settings, first in ({}, 3), ({"replan": Replan(contest=False)}, 25):
        ran, stats, _ = kinds_of(25, states=states, **settings)
        assert blocks(ran)[0] == ("sparse", first)
        assert ran[-1] == ("dense" if first == 3 else "sparse")
        assert stats.replans == 0


def test_drift_is_of_what_groups_took_that_have_won(monkeypatch):
    """Though it is far from what was predicted; until it changes."""
    say(monkeypatch, DENSE_FASTER)
    asked = []
    truth = [0.5]

    def measured(settings, group, *_, **__):
        asked.extend([1] * (group.rank == 0))
        return costs_that_say(**SPARSE_PREDICTED)(settings)

    monkeypatch.setattr(_planner, "measure_costs", measured)
    monkeypatch.setattr(_planner, "_travelled", lambda aggregation: truth * len(aggregation.groups))
    replan = Replan(every=2)
    assert kinds_of(40, replan=replan)[1].refused is not None
    assert len(asked) == 1
    truth[0] = 0.1

    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal", replan=replan)
        with session:
            for step in range(40):
                group.barrier()
                if step == 24:
                    truth[0] = 5.0
                group.barrier()
                backward_of(model, rank, step)
                optimizer.step()
            return session.stats().replans

    asked.clear()
    assert run_ranks(2, rank_main) == [0, 0]
    assert len(asked) == 2


def test_a_contest_that_is_held_anew_begins_with_the_plan_that_is_expected_to_win():
    """By what is predicted, and what steps took beyond that before."""
    cost = Method("sparse", lambda size: 0.0, lambda size: 1.0)
    dense = Method("dense", lambda size: 0.0, lambda size: 2.0)
    plans = [plan([1.0], [1], [each]) for each in (cost, dense)]
    rivals = Rivals(Replan())
    assert rivals.near(plans) == plans
    rivals.load({**rivals.state(), "extra_seconds": {"one sparse": 2.0, "one dense": 0.5}})
    assert rivals.near(plans) == plans[::-1]
    rivals.load({**rivals.state(), "extra_seconds": {"one sparse": 9.0, "one dense": 0.5}})
    assert rivals.near(plans) == plans[1:]
