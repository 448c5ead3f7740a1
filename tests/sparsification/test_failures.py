"""Ranks that die, leave, raise or disagree: nobody hangs, and nothing trained is lost."""

import threading

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.sparsification import _planner
from support.ranks import run_ranks
from support.replicas import network, sgd
from support.sparse import assume_costs, on_ranks, same_weights
from support.unchecked import types_unchecked
from support.waiting import HANG_SECONDS


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_rank_that_is_gone_breaks_the_step_of_the_others_and_nothing_else(momentum):
    def use(me):
        me.train(3)
        if me.rank == 2:
            return
        weights, kept = me.weights(), [me.carried(kind) for kind in ("residuals", "velocities")]
        with pytest.raises(gg.GossipError, match=r"session\.state_dict"):
            me.backward()
        own = me.gradients()
        with pytest.raises(gg.GossipError):
            me.optimizer.step()
        assert same_weights([me.weights(), weights])
        after = [me.carried(kind) for kind in ("residuals", "velocities")]
        assert len(after[1]) == (0 if momentum is None else 4)
        torch.testing.assert_close(after, kept, rtol=1e-4, atol=1e-6)
        me.session.close()
        me.backward()
        assert same_weights([me.gradients(), own])

    on_ranks(use, world_size=3, momentum_correction=momentum, together=False)


def fails_in_backward(me):
    def fail(grad):
        raise ZeroDivisionError

    me.model[0].weight.register_hook(fail)
    me.backward()


@pytest.mark.parametrize("where", ["in backward", "in the round of a step"])
def test_an_exception_on_one_rank_is_told_to_the_others_at_once(where):
    told = threading.Event()

    def make():
        is_sparse = where != "in backward" and threading.current_thread().name == "rank 0"
        return network() if where == "in backward" else nn.Embedding(5, 3, sparse=is_sparse)

    def use(me):
        if where == "in backward":
            me.train()
            kept = me.carried()
            with pytest.raises(gg.GossipError if me.rank else ZeroDivisionError):
                me.backward() if me.rank else fails_in_backward(me)
            torch.testing.assert_close(me.carried(), kept)
        else:
            with me.session.no_sync():
                me.model(torch.tensor([1, 2])).sum().backward()
            with pytest.raises(gg.GossipError):
                me.optimizer.step()
        if me.rank:
            told.set()
        with pytest.raises(gg.GossipError):
            me.optimizer.step()
        assert told.wait(HANG_SECONDS)  # leaving would tell it, too

    on_ranks(use, "single", make=make, together=False)


def test_sparse_gradients_are_refused_with_the_way_out():
    def use(me):
        with pytest.raises(gg.GossipError, match="sparse=False"):
            me.model(torch.tensor([1, 2])).sum().backward()

    on_ranks(use, "single", make=lambda: nn.Embedding(5, 3, sparse=True), together=False)


@pytest.mark.parametrize(("work", "failing"), [("measure_methods", 1), ("_computed", 0)])
def test_an_exception_between_rounds_ends_them_on_all_ranks(monkeypatch, work, failing):
    if work == "_computed":
        assume_costs(monkeypatch, sparse=1e-3, dense=1e-2)
    real = getattr(_planner, work)

    def fails_there(*args, **kwargs):
        thread = threading.current_thread().name
        if thread in (f"rank {failing}", "gossipgrad plan_0"):
            raise MemoryError("it does not fit")
        return real(*args, **kwargs)

    monkeypatch.setattr(_planner, work, fails_there)

    def use(me):
        with pytest.raises(MemoryError if me.rank == failing else gg.GossipError):
            me.train(20)
        for call in (me.optimizer.step, me.backward):
            with pytest.raises(gg.GossipError):
                call()
        assert all(p.isfinite().all() for p in me.session.state_dict()["model"].values())

    on_ranks(use, "optimal", together=False)


def freeze(me):
    me.model[0].requires_grad_(False)


def leave(me):
    me.session.close()


@pytest.mark.parametrize(
    ("change", "error"), [(freeze, gg.AgreementError), (leave, gg.GossipError)]
)
def test_replicas_that_cannot_be_made_equal_do_not_train_on_alone(change, error):
    def use(me):
        me.train()
        if me.rank:
            change(me)
        weights = me.weights()
        with pytest.raises(error):
            me.session.broadcast_()
        if me.rank and change is leave:
            return
        assert me.carried().keys() == {name for name, _ in me.model.named_parameters()}
        consensus = me.session.consensus().__enter__
        for call in (me.backward, me.optimizer.step, me.session.broadcast_, consensus):
            with pytest.raises(gg.GossipError):
                call()
        assert same_weights([me.weights(), weights])
        me.session.close()
        me.train()

    on_ranks(use, together=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.0},
        {"density": {"*": 0.1}},
        {"density": lambda step: 0.1},
        {"plan": "best"},
        {"plan": 0},
        {"methods": ("sparse", "sparse")},
        {"methods": ()},
        {"value_dtype": torch.int8},
        {"momentum_correction": 1.0},
        {"momentum_correction": 0.9},  # beside the optimizer's own
        {"clip_norm": 0},
        {"scaler": 3},
        {"recorder": 3},
    ],
)
def test_wrong_settings_are_refused_by_name(settings):
    model = network()
    named = {"momentum_correction": "momentum"}
    (name,) = settings
    with (
        types_unchecked(),
        pytest.raises(ValueError, match=named.get(name, "span" if name == "recorder" else name)),
    ):
        gg.sparsify(model, sgd(list(model.parameters())), **settings)


@pytest.mark.parametrize("density", [0.001, gg.sparsification.Warmup(then=0.005)])
def test_a_density_that_costs_accuracy_is_warned_of(density):
    with pytest.warns(UserWarning, match="density") as warned:
        on_ranks(lambda me: None, "single", density=density)
    assert len(warned) == 2  # one a rank


def test_a_gradient_that_no_optimizer_of_a_session_has_is_warned_of_once():
    def rank_main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        with gg.sparsify(model, optimizer, process_group=group, plan="single") as session:
            for _ in range(3):
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
            session.group.barrier()

    with pytest.warns(UserWarning, match=r"'0\.weight' .*requires_grad_\(False\)") as told:
        run_ranks(2, rank_main)
    assert len(told) == 2  # one a rank
