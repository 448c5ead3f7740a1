"""A collective that only some ranks call says so, and is never taken for the mean of all."""

import io
import logging
import os
import pdb
import re
import signal
import sys
import threading

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import ScriptedDeathError
from support.deaths import QUICK, run_mortals
from support.sessions import run_sessions
from support.waiting import HANG_SECONDS, until


def run(world_size, use, **settings):
    settings = {"topology": "matching", "leaves_together": False, **settings}
    return run_sessions(world_size, use, heartbeats=QUICK, **settings)


@pytest.mark.parametrize("call", ["consensus_state_dict", "average_", "consensus_distance"])
def test_a_rank_whose_others_end_in_order_without_calling_it_gets_an_error(call):
    """Not its own replica for the mean of all, and nothing that it has learned is lost."""

    def use(me):
        me.train(3)
        if me.rank > 0:
            me.train(5)
            return
        before = me.weights()
        with pytest.raises(gg.GossipError, match=r"ranks 1, 2, .*consensus_state_dict"):
            getattr(me.session, call)()
        assert torch.equal(me.weights(), before)
        me.train(2)

    run(3, use)


def test_those_who_call_it_are_served_though_another_has_ended():
    def use(me):
        me.train(3)
        if me.rank == 1:
            return None
        return me.mean()

    means = run(3, use)
    assert means[1] is None
    assert torch.equal(means[0], means[2])


@pytest.mark.parametrize("when", ["before", "as it waits"])
def test_the_consensus_of_one_that_an_exception_left_alone_is_said_to_be_its_own(when, caplog):
    ready = threading.Event()

    def main(me):
        me.train(3)
        if me.rank == 1:
            assert when == "before" or ready.wait(HANG_SECONDS)
            me.session.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
            raise ScriptedDeathError("not of the test")
        if when == "before":
            me.train_without(1)
        ready.set()
        me.mean()
        me.mean()

    run_mortals(2, main)
    said = [r.message for r in caplog.records if "consensus" in r.message]
    assert len(said) == 1
    assert "rank 1" in said[0]
    assert "ZeroDivisionError" in said[0]


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "in a new generation"])
def test_whoever_does_not_come_is_named(connected, caplog, monkeypatch):
    for name, seconds in (("LATE_SECONDS", 0.3), ("_SHOWS_SECONDS", 0.05)):
        monkeypatch.setattr(f"gossipgrad.comm._rendezvous.{name}", seconds)
    come = threading.Event()

    def use(me):
        me.train(3)
        if not connected:
            if me.rank == 3:
                return
            me.train_until(lambda: 3 not in me.session.membership.living)
        if me.rank == 1:
            me.train_until(come.is_set)
        me.mean()

    def named():
        return [r.message for r in caplog.records if "session.consensus()" in r.message]

    threading.Thread(target=lambda: (until(named), come.set())).start()
    run(4 if not connected else 3, use)
    assert come.is_set()
    assert len(named()) == 1, "of those that wait one says so, once"
    assert all(re.search(r"ranks? ([0-3], )*1\b", text) for text in named()), "others may be late"


def test_the_state_of_the_consensus_comes_to_one_rank_and_leaves_the_weights_alone(recwarn):
    def use(me):
        me.train(3 + me.rank)
        mean, before = me.mean(), me.weights()
        state = me.session.consensus_state_dict(dst=1)
        assert torch.equal(me.weights(), before)
        me.train(1)
        return mean, state

    (mean, first), (_, second) = run(2, use)
    assert first is None
    assert torch.equal(torch.cat([second[name].flatten() for name in second]), mean)
    assert not recwarn.list


def test_the_lowest_that_lives_gets_the_state_of_the_consensus_where_its_rank_is_lost():
    def main(me):
        me.train(3)
        if me.rank == 0:
            me.die()
        me.train_without(0)
        with pytest.raises(ValueError, match="got 3"):
            me.session.consensus_state_dict(dst=3)
        return me.session.consensus_state_dict() is not None

    assert run_mortals(3, main) == [None, True, False]


@pytest.mark.parametrize("sees_it", [True, False], ids=["after the end", "in the same generation"])
@pytest.mark.parametrize("end", ["closes", "fails"])
def test_a_rank_that_comes_when_the_others_have_given_up_gets_an_error_once(sees_it, end):
    """Not its own replica for the mean of all."""
    gave_up = threading.Event()

    def use(me):
        me.train(3)
        if me.rank == 0:
            try:
                with me.session.group.limit(0.3):
                    me.mean()
            except gg.GossipError as error:
                if end == "fails":
                    me.session.__exit__(gg.GossipError, error, None)
                else:
                    me.session.close()
            gave_up.set()
            return
        assert gave_up.wait(HANG_SECONDS)
        if sees_it:
            me.train_until(lambda: me.session.membership.living == (1,))
        before = me.weights()
        with pytest.raises(gg.GossipError, match="rank 0"):
            me.mean()
        assert torch.equal(me.weights(), before)
        assert me.mean().isfinite().all()

    run(2, use)


def test_a_rank_whose_partners_are_all_gone_is_told_that_it_trains_alone(caplog, monkeypatch):
    monkeypatch.setattr("gossipgrad.engine._rounds._MOSTLY_VOID_SECONDS", 0.1)

    def main(me):
        me.train(3)
        if me.rank == 1:
            me.die()
        me.train_until(lambda: "trains alone" in caplog.text)
        return me.session.stats().void_rounds

    with caplog.at_level(logging.WARNING, "gossipgrad.engine._rounds"):
        assert run_mortals(2, main, heartbeats=None)[0] <= 1


@pytest.mark.parametrize("when", ["in a step", "between two"])
def test_a_collective_in_a_signal_handler_is_refused(when):
    """One rank's handler may interrupt a step, and another's not: the answer is the same."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = []

    def handle(*_):
        for call in (session.consensus_state_dict, session.average_, session.state_dict):
            try:
                call()
            except gg.GossipError as error:
                refused.append(str(error))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with gg.gossip(model, optimizer) as session:
            if when == "in a step":
                optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
            else:
                os.kill(os.getpid(), signal.SIGUSR1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            until(lambda: len(refused) == 3)
            assert session.consensus_state_dict() is not None, "the program itself may call it"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_collective_at_the_prompt_of_a_debugger_is_no_call_in_a_signal_handler():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    typed = io.StringIO("found.append(session.consensus_state_dict())\ncontinue\n")
    found, before = [], sys.gettrace()
    with gg.gossip(model, optimizer) as session:
        pdb.Pdb(stdin=typed, stdout=io.StringIO(), nosigint=True, readrc=False).set_trace()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        session.wait()
    sys.settrace(before)
    assert len(found) == 1
