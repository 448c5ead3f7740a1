import pytest

from gossipgrad.train._learning_rate import LearningRate


def rates(rate, steps_per_epoch=2, epochs=4):
    steps = range(steps_per_epoch * epochs)
    return [
        rate.peak * rate.factor(step, steps_per_epoch=steps_per_epoch, epochs=epochs)
        for step in steps
    ]


@pytest.mark.parametrize(("rule", "peak"), [("none", 0.5), ("linear", 8.0), ("sqrt", 2.0)])
def test_rule_scales_with_the_number_of_ranks(rule, peak):
    assert LearningRate(base=0.5, sharing_ranks=16, rule=rule).peak == peak
    assert LearningRate(base=0.5, sharing_ranks=1, rule=rule).peak == 0.5


def test_schedules():
    def of(schedule, **options):
        return rates(LearningRate(base=2.0, schedule=schedule, **options), 1)

    assert of("constant") == [2.0] * 4
    assert of("cosine") == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
    assert of("linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert of("step", step_epochs=2, gamma=0.5) == [2.0, 2.0, 1.0, 1.0]


def test_steps_of_the_rate_are_whole_epochs():
    rate = LearningRate(base=1.0, schedule="step", step_epochs=2, gamma=0.5)
    assert rates(rate, steps_per_epoch=3, epochs=5) == [1.0] * 6 + [0.5] * 6 + [0.25] * 3


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "step"])
def test_warm_up_rises_evenly_to_the_peak_and_the_schedule_begins_there(schedule):
    rate = LearningRate(
        base=1.0, sharing_ranks=4, rule="linear", schedule=schedule, warmup_epochs=2, step_epochs=3
    )
    found = rates(rate)
    assert found[:5] == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.0])
    assert found[4:] == sorted(found[4:], reverse=True)


def test_falling_schedules_reach_0_after_the_last_step():
    for schedule in ("cosine", "linear"):
        rate = LearningRate(base=1.0, schedule=schedule, warmup_epochs=1)
        for step in (8, 9):  # a run that counts rounds may go a little beyond its end
            assert rate.factor(step, steps_per_epoch=2, epochs=4) == pytest.approx(0.0, abs=1e-15)
