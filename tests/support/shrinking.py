"""Random tensors, and plans of networks that have seen some."""

import torch
from torch import Tensor, nn

import gossipgrad as gg
from gossipgrad.apoptosis import ShrinkPlan


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(
    model: nn.Module,
    example: Tensor,
    batches: list[Tensor],
    *,
    budget: float,
    optimizer: torch.optim.Optimizer | None = None,
    **settings,
) -> ShrinkPlan:
    """The plan of a session that has seen these batches, and is closed."""
    made = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"round_to": 1, **settings}
    with gg.shrink(model, made, example_input=example, **settings) as session:
        session.look()
        mode = model.training
        model.train()
        buffers = [(b, b.clone()) for b in model.buffers()]
        with torch.no_grad():
            for batch in batches:
                model(batch)
            for buffer, value in buffers:
                buffer.copy_(value)
        model.train(mode)
        return session.plan(budget)
