"""Plans that are looked at again: after drift, and at another density, and ever more rarely."""

from itertools import pairwise

import pytest

import gossipgrad as gg
from gossipgrad.sparsification import Replan, _planner
from gossipgrad.sparsification._drift import DensityWatch, Drift
from support.ranks import run_ranks
from support.sparse import backward_of, costs_that_say, start, train


def test_a_network_that_changes_changes_the_plan_once_and_noise_does_not(monkeypatch):
    """Costs are measured where a look finds drift, and each time the next look is farther off.

    What is predicted is far from what threads take, so looks find drift whatever is measured, and
    each method is the faster one in turn.
    """
    seen = [0, 0]
    truth = {"sparse": 100.0, "dense": 100.0}

    def measured(settings, group, *_, **__):
        noise = 0.02 if seen[group.rank] % 2 else -0.02
        seen[group.rank] += 1
        said = {"sparse": truth["sparse"] * (1 + noise), "dense": truth["dense"] * (1 - noise)}
        return costs_that_say(**said)(settings)

    monkeypatch.setattr(_planner, "measure_costs", measured)

    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal", replan=Replan(every=1, contest=False))
        methods = []
        with session:
            for step in range(60):
                if step == 20:
                    assert seen[rank] >= 3
                    truth["sparse"] = 1000.0
                group.barrier()
                backward_of(model, rank, step)
                optimizer.step()
                methods.append({of.method for of in session.stats().groups})
            stats = session.stats()
        assert methods[19] == {"sparse"}
        assert methods[-1] == {"dense"}
        assert stats.replans == 1
        assert sum(a != b for a, b in pairwise(methods)) == 1

    run_ranks(2, rank_main)
    assert max(seen) <= 6


def test_drift_is_told_from_noise_and_alarms_become_rare():
    drift = Drift(Replan(every=10, drift=0.2, threshold=1.0))
    assert not drift.due(9)
    for number in range(1, 200):
        noise = 0.15 if number % 2 else -0.15
        assert drift.due(10 * number)
        assert not drift.look(10 * number, [1 + noise], [1.0])
    alarms = [drift.look(10 * number, [1.5], [1.0]) for number in range(200, 205)]
    assert alarms == [False, False, False, True, True]
    fast = Drift(Replan(every=10, drift=0.2, threshold=1.0))
    assert [fast.look(10 * n, [0.2], [1.0]) for n in range(1, 3)] == [False, True]
    alarms = 0
    for rounds in range(2_050, 12_000):
        if drift.due(rounds) and drift.look(rounds, [9.0], [1.0]):
            drift.measured_anew(rounds)
            alarms += 1
    assert 5 <= alarms <= 10


def test_a_drift_that_is_loaded_looks_as_often_as_its_settings_say():
    """Also where those of the session that saved it said something else."""
    rare = Drift(Replan(every=1000))
    rare.measured_anew(1000)
    assert rare.look(3000, [1.9], [1.0]) is False
    often = Drift(Replan(every=10))
    often.load(rare.state())
    assert [often.due(rounds) for rounds in (3019, 3020)] == [False, True]
    assert often.state() == rare.state()
    assert often.look(3020, [1.9], [1.0])


@pytest.mark.parametrize(
    "settings",
    [{"replan": None}, {"plan": "mg-wfbp", "methods": ("dense",)}, {"replan": Replan(every=150)}],
    ids=["never", "a rule", "between looks"],
)
def test_what_a_planner_remembers_is_bounded(monkeypatch, settings):
    monkeypatch.setattr(_planner, "_REMEMBERED_ROUNDS", 10)
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(sparse=1e-3, dense=1.0))

    def look(session):
        return len(session._planner._times)

    for _, remembered in train(2, 30, density=0.1, look=look, **settings):
        assert remembered == (10 if settings.get("replan") == Replan(every=150) else 0)


def asked_at(monkeypatch, density, **settings):
    """The densities at which costs are measured in 50 steps, on one rank, and its stats."""
    asked = []

    def measured(settings, group, *args, density, **kwargs):
        if group.rank == 0:
            asked.append(density)
        return costs_that_say(sparse=density, dense=0.5)(settings)

    monkeypatch.setattr(_planner, "measure_costs", measured)
    ((_, stats), _) = train(2, 50, density=density, look=lambda s: s.stats(), **settings)
    return asked, stats


def test_each_stage_of_a_warm_up_is_planned_anew(monkeypatch):
    course = gg.sparsification.Warmup(densities=(1.0, 0.25), steps=15, then=0.01)
    asked, stats = asked_at(monkeypatch, course, replan=Replan(every=1000))
    assert asked == pytest.approx([1.0, 0.25, 0.01])
    assert {group.method for group in stats.groups} == {"sparse"}  # it was dense at first


def test_no_plan_follows_the_first_where_nobody_asks_for_one(monkeypatch):
    course = gg.sparsification.Warmup(densities=(1.0, 0.25), steps=15, then=0.01)
    asked, stats = asked_at(monkeypatch, course, replan=None)
    assert asked == [1.0]
    assert stats.replans == 0
    assert {group.method for group in stats.groups} == {"dense"}


def test_a_density_that_does_not_matter_is_not_measured(monkeypatch):
    asked, _ = asked_at(monkeypatch, lambda step: 0.5**step, plan="mg-wfbp", methods=("dense",))
    assert len(asked) == 1


def test_a_density_that_comes_and_goes_is_measured_once_and_then_left_alone(monkeypatch):
    asked, stats = asked_at(
        monkeypatch,
        lambda step: 1.0 if step % 10 == 0 else 0.01,
        replan=Replan(every=1000, contest=False),
    )
    assert asked == pytest.approx([0.01, 1.0])
    assert stats.replans == 2  # there and back: the next stay would have to be longer
    assert {group.method for group in stats.groups} == {"sparse"}


def test_stays_at_another_density_count_the_longer_the_more_there_were():
    watch = DensityWatch()
    looks = []
    for step in range(10_000):
        if watch.look_due(away=bool(step // 100 % 2)):
            watch.looked()
            looks.append(step)
    assert len(looks) == 7
    assert looks[:3] == [100, 102, 106]
    again = DensityWatch()
    again.load(watch.state())
    assert again.state() == watch.state() != DensityWatch().state()
