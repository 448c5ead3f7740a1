"""A task for networks of 6 inputs and 3 outputs: the sines of the first three inputs."""

import torch

__all__ = ["train"]


def train(model, optimizer, steps):
    """Trains for some steps; the weights afterwards."""
    for step in steps:
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]
