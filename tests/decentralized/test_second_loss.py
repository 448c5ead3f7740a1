"""A second loss inside a collective, and a lease that runs out in the middle of a step."""

import threading
import time

import pytest
import torch

import gossipgrad as gg
from support.deaths import QUICK, fall_silent, run_mortals


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


def test_what_is_posted_waits_for_no_store():
    """A lease runs out while the store hangs: a part is void at once, and nobody is held up."""
    together = threading.Barrier(2)

    def main(me):
        me.train(3)
        fall_silent(me.session)  # its thread asks nothing any more
        watch, channel = me.session._members.watch, me.session._rounds.channel
        watch._stopped = False
        watch._confirmed_seconds -= 1000.0
        sent, start = channel.bytes_sent, time.monotonic()
        exchange = channel.post(
            10**6,
            0,
            torch.zeros(channel.plan[0].numel, dtype=channel.plan[0].dtype),
            send_to=1 - me.rank,
            recv_from=1 - me.rank,
        )
        seconds = time.monotonic() - start
        assert exchange.outcome is not None
        assert not exchange.open
        assert channel.bytes_sent == sent
        watch._stopped = True
        together.wait(60)
        return seconds

    beats = gg.Heartbeats(interval_seconds=0.03, lease_seconds=15.0, silent_seconds=60.0)
    assert max(run_mortals(2, main, heartbeats=beats)) < 10.0
