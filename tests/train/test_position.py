"""Where a run is, when ranks come and go and when they do not."""

import pytest
from torch import nn

from gossipgrad.train._learning_rate import LearningRate
from gossipgrad.train._setup import RunPosition
from gossipgrad.train.strategies._local import Local
from support.shares import Run
from support.shares import let_go as let_go


class Steps(Local):
    """Counts the steps of this rank, or rounds that are `ahead` of them."""

    def __init__(self, ahead=0):
        super().__init__(nn.Linear(1, 1))
        self.ahead = ahead

    def position(self, steps):
        return steps + self.ahead


def go_through(position, one, epoch, steps, between=lambda: None):
    """Makes the steps of an epoch as the loop does; the positions behind them."""
    position.begin_epoch(epoch)
    positions = []
    while not position.is_over(steps):
        if not one.step(epoch):
            break
        steps += 1
        positions.append(position.at(steps))
        between()
    position.end_epoch(steps)
    return positions


def test_undisturbed_it_is_the_step():
    run = Run(60, 2)  # 15 batches a rank
    one = run.ranks[0]
    position = RunPosition(Steps(), one.batches)
    assert go_through(position, one, 0, 0) == [*range(1, 16)]
    assert go_through(position, one, 1, 15) == [*range(16, 31)]
    assert position.at(30) == 30
    assert (position.batch(2, 0), position.batch(1, 7)) == (0, 7)


def test_in_mode_stale_it_is_the_round_and_an_epoch_ends_by_it():
    run = Run(60, 2)
    position = RunPosition(Steps(ahead=5), run.ranks[0].batches)
    assert go_through(position, run.ranks[0], 0, 0) == [*range(6, 16)]


def test_in_a_disturbed_epoch_it_is_the_share_that_is_done_and_the_next_goes_on_from_its_end():
    run = Run(60, 2)
    one = run.ranks[0]
    position = RunPosition(Steps(), one.batches)
    run.change(0)  # alone: every two batches are as much as one of both
    positions = go_through(position, one, 0, 0)
    assert positions == [step // 2 for step in range(1, 31)]
    assert position.at(30) == 15
    assert position.batch(1, 0) == 0
    assert go_through(position, one, 1, 30)[-1] == 30
    assert run.times(1) == dict.fromkeys(range(60), 1)


def test_a_resumed_run_goes_on_from_its_place():
    run = Run(60, 2)
    position = RunPosition(Steps(), run.ranks[0].batches, {"steps": 40, "position": 15})
    assert position.at(40) == 15
    assert go_through(position, run.ranks[0], 1, 40) == [*range(16, 31)]
    assert RunPosition(Steps(), run.ranks[0].batches, {"steps": 40}).at(40) == 40


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (0, 1, 2, 3)])
def test_the_learning_rate_has_fallen_to_nothing_whoever_came_or_went(ranks):
    run = Run(120, 2)
    run.in_turn(0, 1, epoch=0)
    if ranks != (0, 1):
        run.change(*ranks)
    one = run.ranks[0]
    position = RunPosition(Steps(), one.batches, {"steps": 30, "position": 30})
    others = [rank for rank in ranks if rank]
    positions = go_through(
        position, one, 1, 30, between=lambda: [run.ranks[rank].step(1) for rank in others]
    )
    rate = LearningRate(base=0.1)
    factors = [rate.factor(position, steps_per_epoch=30, epochs=2) for position in positions]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 0.44
    assert factors[-1] < 0.06
