"""A second loss inside a collective, and a lease that runs out in the middle of a step."""

import time

import pytest
import torch

import gossipgrad as gg
from support.deaths import QUICK, run_mortals


@pytest.mark.parametrize("when", ["before it connects", "in the middle"])
def test_a_second_loss_inside_a_collective_costs_no_more_than_the_first(when):
    """Links tell of it while the others wait; by silence alone it would take 20 s."""

    def main(me):
        me.train(6)
        me.session.group.barrier()
        if me.rank == 3:
            me.die()
        group = me.session.group
        if me.rank == 2 and when == "before it connects":
            group.enter = lambda *_: me.die()
        if me.rank == 2 and when == "in the middle":
            me.session._averaging.consensus = lambda *_: me.die()
        start = time.monotonic()
        while True:
            try:
                mean = me.mean()
                break
            except gg.GossipError:
                if me.rank == 2:
                    raise  # its own death
        return mean, time.monotonic() - start

    first, second, *_ = run_mortals(4, main)
    assert torch.equal(first[0], second[0])
    assert max(first[1], second[1]) < QUICK.silent_seconds / 2
