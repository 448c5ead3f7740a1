"""Moments that no square is below stay so, however late a delta."""

import pytest
import torch

import gossipgrad as gg
from support.stale import Scripted

FORGETFUL = {
    "Adam": (torch.optim.Adam, {"betas": (0.9, 0.2)}, {"exp_avg_sq"}),
    "AMSGrad": (
        torch.optim.Adam,
        {"betas": (0.9, 0.2), "amsgrad": True},
        {"exp_avg_sq", "max_exp_avg_sq"},
    ),
    "Adamax": (torch.optim.Adamax, {"betas": (0.9, 0.2)}, {"exp_inf"}),
    "NAdam": (torch.optim.NAdam, {"betas": (0.9, 0.2)}, {"exp_avg_sq"}),
    "RAdam": (torch.optim.RAdam, {"betas": (0.9, 0.2)}, {"exp_avg_sq"}),
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.2}, {"square_avg", "acc_delta"}),
    "RMSprop": (torch.optim.RMSprop, {"alpha": 0.2}, {"square_avg"}),
    "Rprop": (torch.optim.Rprop, {}, {"step_size"}),
    "Adafactor": (
        torch.optim.Adafactor,
        {"beta2_decay": -0.05},
        {"variance", "row_var", "col_var"},
    ),
}


def a_row_and_a_column():
    """Matrices of which Adafactor keeps a factor that has their own shape."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Linear(1, 3), torch.nn.Linear(3, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    return model


def gusts(model, rank, step):
    """Gradients that are large for three steps, then small, on even and odd ranks in turn."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = 10.0 if (step // 3) % 2 == rank % 2 else 1e-4
    for parameter in model.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", FORGETFUL)
def test_second_moments_stay_non_negative(name):
    """Moments that fall fast are below what a late delta takes away."""
    make, options, moments = FORGETFUL[name]
    ranks = Scripted(
        4,
        optimizer=lambda parameters: make(parameters, lr=0.01, **options),
        make=a_row_and_a_column,
        mode=gg.Stale(max_staleness=1),
        payload="weights+state",
    )
    generator = torch.Generator().manual_seed(2)
    lowest = dict.fromkeys(moments, 0.0)
    try:
        for _ in range(80):
            rank, sender, receiver = torch.randint(0, 4, (3,), generator=generator).tolist()
            ranks.step(rank, gusts)
            ranks.deliver(sender, receiver)
            for state in ranks.optimizers[rank].state.values():
                for key in moments & state.keys():
                    lowest[key] = min(lowest[key], state[key].min().item())
        assert lowest == dict.fromkeys(moments, 0.0)
        assert sum(session.stats().clamps for session in ranks.sessions) > 0
    finally:
        ranks.close()
