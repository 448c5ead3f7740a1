"""A step that fails, or is interrupted: nothing trained is lost, and no partner waits."""

import contextlib

import pytest
import torch

import gossipgrad as gg
from gossipgrad.engine import Bucket
from support.replicas import backward
from support.sessions import run_sessions

BOTH = {"payload": "gradients+weights", "gradients": backward}


@pytest.mark.parametrize("where", ["in backward", "after backward", "in the update"])
def test_a_batch_that_is_dropped_costs_no_later_step(where):
    """Out of memory, or a bad batch: zero_grad() and step() go on; no partner waits."""

    def use(me):
        def fail(*_):
            if fails and me.steps in (3, 5, 6):
                raise MemoryError

        fails = me.rank == 0
        if where == "in backward":
            me.model[0].weight.register_hook(fail)
        if where == "in the update":
            me.optimizer.register_step_pre_hook(fail)
        for _ in range(9):
            if where == "after backward" and me.rank == 0 and me.steps == 3:
                backward(me.model, 0, 3)
                me.optimizer.zero_grad()
                me.optimizer.step()
                me.steps += 1
                continue
            try:
                me.train()
            except MemoryError:
                if where == "in backward":
                    me.optimizer.zero_grad()
                    me.optimizer.step()
        me.session.consensus_distance()  # rank 0 may have had fewer rounds
        return me.outcomes

    for outcomes in run_sessions(4, use, **BOTH):
        assert outcomes["delivered"] >= 9
        assert where == "in the update" or outcomes["late"] == outcomes["void"] == 0


def test_an_interrupt_while_the_consensus_is_shown_is_undone(monkeypatch):
    shown = Bucket.show

    def half(*arguments):
        shown(*arguments)
        raise KeyboardInterrupt

    def use(me):
        me.train()
        before = me.weights()
        me.group.barrier()
        monkeypatch.setattr(Bucket, "show", half)
        with contextlib.suppress(KeyboardInterrupt):
            me.mean()
        assert torch.equal(me.weights(), before)

    run_sessions(2, use, leaves_together=False)


def test_a_closure_with_gradients_in_the_payload_is_refused():
    def use(me):
        for arguments, options in (([lambda: 0.0], {}), ([], {"closure": lambda: 0.0})):
            with pytest.raises(gg.GossipError, match="closure"):
                me.optimizer.step(*arguments, **options)
        me.optimizer.step(None)

    run_sessions(2, use, **BOTH)
