"""Groups of several methods and tensors: what they carry over, and what none may lose."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import Merge
from support.ranks import run_ranks
from support.sparse import backward_of, same_weights, start


@pytest.mark.parametrize("cuts", [False, True], ids=["one group", "a group without any"])
def test_what_is_carried_over_outlives_a_dense_round_that_is_not_finite(cuts):
    """A scaler skips such a step; nothing of the residuals may have been spent on it."""

    def overflow(model, rank, step):
        hook = model[2].bias.register_hook(lambda g: g * float("inf")) if rank else None
        backward_of(model, rank, step)
        if hook is not None:
            hook.remove()

    def rank_main(rank, group):
        model, optimizer, session = start(group, "single", density=0.02)
        with session:
            if cuts:  # the first group has nothing to carry over, and is where it happens
                session._aggregation.regroup((Merge(0, 1, "dense"), Merge(1, 4, "sparse")))
            for step in range(3):
                backward_of(model, rank, step)
                optimizer.step()
            before = session.state_dict()["session"]["residuals"]
            first = [Merge(0, 1, "dense")] if cuts else []
            session._aggregation.regroup((*first, Merge(len(first), 4, "dense")))
            overflow(model, rank, 3)
            assert session.stats().nonfinite_rounds == 1
            after = session.state_dict()["session"]["residuals"]
            assert before.keys() == after.keys() != set()
            assert all(torch.equal(before[name], after[name]) for name in before)
            backward_of(model, rank, 4)
            assert not session.state_dict()["session"]["residuals"]
            overflow(model, rank, 5)
            assert session.stats().nonfinite_rounds == 2

    run_ranks(2, rank_main)


@pytest.mark.filterwarnings("ignore:density=:UserWarning")
def test_momentum_is_corrected_where_narrow_gradients_add_up_to_more_than_their_type_holds():
    def rank_main(rank, group):
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(100_000, dtype=torch.float16))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        settings = {"plan": "single", "density": 1e-4, "momentum_correction": 0.5}
        with gg.sparsify(model, optimizer, process_group=group, **settings) as session:
            for _ in range(3):
                model.p.grad = torch.ones_like(model.p)
                optimizer.step()
            return session.state_dict()["session"]["residuals"]["p"].max()

    for largest in run_ranks(2, rank_main):
        assert largest == 1 + 1.5 + 1.75


@pytest.mark.parametrize(
    "settings",
    [{"plan": "layerwise"}, {"plan": "single", "select": "per_tensor"}, {"plan": "single"}],
    ids=["layerwise", "per_tensor", "single"],
)
def test_parameters_without_elements_are_left_alone(settings):
    def rank_main(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3))
        model.empty = nn.Parameter(torch.zeros(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.sparsify(model, optimizer, process_group=group, density=0.2, **settings) as session:
            for _ in range(2):
                (model[0](torch.ones(2, 6) + rank).sum() + model.empty.sum()).backward()
                optimizer.step()
            assert sum(of.tensors for of in session.stats().groups) == 2
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))
