"""A second loss inside a collective, and a lease that runs out in the middle of a step."""

import pytest
import torch

import gossipgrad as gg
from support.deaths import run_mortals


@pytest.mark.parametrize("when", ["before it connects", "in the middle"])
def test_a_second_loss_inside_a_collective_costs_no_more_than_the_first(when):
    """Links tell of it while the others wait; for its silence alone nobody is given up."""

    def main(me):
        me.train(6)
        me.session.group.barrier()
        if me.rank == 3:
            me.die()
        group = me.session.group
        if me.rank == 2 and when == "before it connects":
            group.enter = lambda *_: me.die()
        if me.rank == 2 and when == "in the middle":
            me.session._averaging.means = lambda *_: me.die()
        while True:
            try:
                return me.mean()
            except gg.GossipError:
                if me.rank == 2:
                    raise  # its own death

    first, second, *_ = run_mortals(4, main)
    assert torch.equal(first, second)
