"""Residuals outlive rounds and tensors that are odd."""

import pytest
import torch
from torch import nn

from gossipgrad.planning import Merge
from support.sparse import on_ranks, same_weights


def test_what_is_carried_over_outlives_a_whole_round_that_is_not_finite():
    """A scaler skips such a step; nothing of the residuals may have been spent on it."""

    def overflow(me):
        hook = me.model[2].bias.register_hook(lambda g: g * float("inf")) if me.rank else None
        me.backward()
        if hook is not None:
            hook.remove()

    def use(me):
        me.train(3)
        me.session._aggregation.regroup([Merge(0, 4, "dense")])  # no public name mixes them at will
        before = me.carried()
        overflow(me)
        assert me.session.stats().nonfinite_rounds == 1
        after = me.carried()
        assert before.keys() == after.keys() != set()
        assert all(torch.equal(before[name], after[name]) for name in before)
        me.backward()
        assert not any(each.any() for each in me.carried().values())

    on_ranks(use, "single", density=0.02)


@pytest.mark.parametrize(
    "settings",
    [{"plan": "layerwise"}, {"plan": "single"}],
    ids=["layerwise", "single"],
)
def test_parameters_without_elements_are_left_alone(settings):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3))
        with torch.no_grad():
            model[0].weight.fill_(0.1)
            model[0].bias.zero_()
        model.empty = nn.Parameter(torch.zeros(0))
        return model

    def use(me):
        for _ in range(2):
            (me.model[0](torch.ones(2, 6) + me.rank).sum() + me.model.empty.sum()).backward()
            me.optimizer.step()
        assert sum(of.tensors for of in me.session.stats().groups) == 2
        return me.weights()

    assert same_weights(on_ranks(use, make=make, **settings))
