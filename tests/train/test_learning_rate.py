from pathlib import Path

import pytest

from gossipgrad.train import TrainConfig


def run_of(*, ranks=1, epochs=4, **options):
    return TrainConfig(epochs=epochs, **options).resolved(nproc=ranks, out=Path("out"))


def rates(config, steps_per_epoch=2):
    steps = range(steps_per_epoch * config.epochs)
    return [
        config.peak_lr * config.lr_factor(step, steps_per_epoch=steps_per_epoch) for step in steps
    ]


@pytest.mark.parametrize(
    ("strategy", "rule", "peak"),
    [
        ("gossip", "none", 0.5),
        ("gossip", "linear", 8.0),
        ("allreduce", "sqrt", 2.0),
        ("local", "linear", 0.5),
    ],
)
def test_rule_scales_with_the_ranks_that_share_a_step(strategy, rule, peak):
    assert run_of(lr=0.5, ranks=16, strategy=strategy, lr_rule=rule).peak_lr == peak
    assert run_of(lr=0.5, strategy=strategy, lr_rule=rule).peak_lr == 0.5


def test_schedules():
    def of(schedule, **options):
        return rates(run_of(lr=2.0, lr_schedule=schedule, **options), 1)

    assert of("constant") == [2.0] * 4
    assert of("cosine") == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
    assert of("linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert of("step", lr_step_epochs=2, lr_gamma=0.5) == [2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "step"])
def test_warm_up_rises_evenly_to_the_peak_and_the_schedule_begins_there(schedule):
    shape = {"lr_schedule": schedule, "warmup_epochs": 2, "lr_step_epochs": 3}
    found = rates(run_of(lr=1.0, ranks=4, lr_rule="linear", **shape))
    assert found[:5] == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.0])
    assert found[4:] == sorted(found[4:], reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_falling_schedules_reach_0_after_the_last_step(schedule):
    run = run_of(lr=1.0, lr_schedule=schedule, warmup_epochs=1)
    for step in (8, 9):  # a run that counts rounds may go a little beyond its end
        assert run.lr_factor(step, steps_per_epoch=2) == pytest.approx(0.0, abs=1e-15)
