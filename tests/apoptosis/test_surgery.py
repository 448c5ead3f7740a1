"""The arithmetic of surgery on a model and its optimizers' state."""

import pytest
import torch

from gossipgrad.apoptosis import Resize, Surgery, operate
from support.replicas import flat, network, sgd

STAYS = torch.tensor([0, 2, 3, 6, 7])  # of the eight hidden units
FOLD = 0.25 * torch.ones(5, 3)
NARROWER = Surgery(
    {
        "0.weight": [Resize(0, STAYS)],
        "0.bias": [Resize(0, STAYS)],
        "2.weight": [Resize(1, STAYS, weight_fold=FOLD, gradient_fold=FOLD)],
    },
    {"0": {"out_features": 5}, "2": {"in_features": 5}},
)


def test_a_surgery_that_does_not_fit_changes_nothing():
    model = network()
    before = flat(model)
    for wrong in (
        Surgery({"9.weight": [Resize(0, STAYS)]}),
        Surgery({"2.weight": [Resize(0, STAYS)]}),
        Surgery({"0.bias": [Resize(0, STAYS)]}, {"9": {"out_features": 5}}),
    ):
        with pytest.raises(ValueError, match="surgery"):
            operate(model, [sgd(list(model.parameters()))], wrong)
    assert torch.equal(flat(model), before)


def test_factors_of_optimizer_state_shrink_and_what_cannot_is_refused():
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    state["square"] = torch.ones(8, 8)
    with pytest.raises(ValueError, match="square"):
        operate(model, [optimizer], NARROWER)
    assert [len(p) for p in model.parameters()] == [8, 8, 3, 3]
    del state["square"]
    operate(model, [optimizer], NARROWER)
    assert state["row_var"].shape == (5, 1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
