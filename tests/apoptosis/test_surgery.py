"""The arithmetic of surgery on a model and its optimizers' state."""

import pytest
import torch

from gossipgrad.apoptosis import Entries, Resize, Surgery, operate
from support.replicas import flat, network, sgd

STAYS = torch.tensor([0, 2, 3, 6, 7])  # of the eight hidden units
FOLD = 0.25 * torch.ones(5, 3)
UNITS = Entries(8, torch.arange(8)[:, None])
NARROWER = Surgery(
    {
        "0.weight": [Resize(0, UNITS, STAYS)],
        "0.bias": [Resize(0, UNITS, STAYS)],
        "2.weight": [Resize(1, UNITS, STAYS, fold=FOLD)],
    },
)


def test_a_surgery_that_does_not_fit_changes_nothing():
    model = network()
    before = flat(model)
    for wrong in (
        Surgery({"9.weight": [Resize(0, UNITS, STAYS)]}),
        Surgery({"2.weight": [Resize(0, UNITS, STAYS)]}),
    ):
        with pytest.raises(ValueError, match="surgery"):
            operate(model, [sgd(list(model.parameters()))], wrong)
    assert torch.equal(flat(model), before)


def test_two_kinds_of_neurons_leave_one_dimension():
    """Of 8 inputs, the first 4 and the others are kinds of their own, interleaved in one."""
    model = torch.nn.Linear(8, 2, bias=False)
    before = model.weight.detach().clone()
    even = Entries(8, torch.tensor([[0], [2], [4]]))
    odd = Entries(8, torch.tensor([[1, 3], [5, 7]]))
    share = torch.tensor([[0.5], [0.0]])
    resizes = [
        Resize(1, even, torch.tensor([0, 2]), fold=share),
        Resize(1, odd, torch.tensor([1])),
    ]
    operate(model, [], Surgery({"weight": resizes}))
    expected = before[:, [0, 4, 5, 6, 7]]
    expected[:, 0] += 0.5 * before[:, 2]
    torch.testing.assert_close(model.weight.detach(), expected)
    assert model.in_features == 5


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
