"""Which tensors of models and optimizers travel, and in which pieces."""

import pytest
import torch
from torch import nn

from gossipgrad.comm import trained_parameters
from gossipgrad.engine import state_entries, weight_entries
from support.replicas import set_gradients

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}, set()),
    "Adam": (torch.optim.Adam, {}, {"exp_avg", "exp_avg_sq"}),
    "AMSGrad": (torch.optim.Adam, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "AdamW": (torch.optim.AdamW, {"fused": True}, {"exp_avg", "exp_avg_sq"}),
    "Adagrad": (torch.optim.Adagrad, {}, {"sum"}),
    "Adadelta": (torch.optim.Adadelta, {}, {"square_avg", "acc_delta"}),
    "Adamax": (torch.optim.Adamax, {}, {"exp_avg", "exp_inf"}),
    "NAdam": (torch.optim.NAdam, {}, {"exp_avg", "exp_avg_sq"}),
    "RAdam": (torch.optim.RAdam, {}, {"exp_avg", "exp_avg_sq"}),
    "RMSprop": (
        torch.optim.RMSprop,
        {"momentum": 0.9, "centered": True},
        {"square_avg", "momentum_buffer", "grad_avg"},
    ),
    "Rprop": (torch.optim.Rprop, {}, {"prev", "step_size"}),
    "ASGD": (torch.optim.ASGD, {}, {"ax"}),
    "Adafactor": (torch.optim.Adafactor, {}, set()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_found_before_the_first_step_and_equals_what_is_kept_after(name):
    make, settings, keys = OPTIMIZERS[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = make(model.parameters(), **settings)
    entries = state_entries(trained_parameters(model, [optimizer]), [optimizer])
    if name != "Adafactor":  # it keeps a whole variance for vectors, and factors for matrices
        names = [f"{name}: {key}" for name, _ in model.named_parameters() for key in keys]
        assert sorted(entry.spec.name for entry in entries) == sorted(names)
    assert not optimizer.state or name == "Adagrad"  # which makes its own at once
    set_gradients(model, 0, 0)
    optimizer.step()
    for entry in entries:
        held = entry.tensor()
        assert held is not None
        assert tuple(held.shape) == entry.spec.shape
        assert held.dtype == entry.spec.dtype
    kept = sum(
        isinstance(v, torch.Tensor) and v.shape == p.shape and v.is_floating_point() and k != "step"
        for p, state in optimizer.state.items()
        for k, v in state.items()
    )
    assert kept == len(entries)


@pytest.mark.parametrize(
    ("shape", "limit_bytes", "heights"),
    [
        ((10, 4), 64, [4, 4, 2]),
        ((10, 4), 160, [10]),
        ((3, 100), 64, [1, 1, 1]),
        ((100,), 64, [16] * 6 + [4]),
        ((0, 4), 64, [0]),
        ((), 2, [()]),
    ],
)
def test_large_tensors_travel_in_pieces_of_whole_rows(shape, limit_bytes, heights):
    model = nn.ParameterList([nn.Parameter(torch.randn(shape))])
    (entry,) = weight_entries(dict(model.named_parameters()))
    pieces = entry.pieces(limit_bytes)
    assert [piece.spec.shape[0] if piece.spec.shape else () for piece in pieces] == heights
    held = [piece.tensor() for piece in pieces]
    assert all(v.shape == p.spec.shape for v, p in zip(held, pieces, strict=True))
    if shape:
        assert torch.equal(torch.cat(held), model[0])
        assert held[0].untyped_storage().data_ptr() == model[0].untyped_storage().data_ptr()
