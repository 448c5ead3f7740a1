"""Replicas that are two small tensors, and what tests ask of them, in fp64."""

import torch
from torch import Tensor, nn


class Vectors(nn.Module):
    """Two parameters of unlike shape, drawn from the seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(7, generator=generator).to(dtype))


def replicas(p: int, dtype: torch.dtype = torch.float32, same: bool = False) -> list[nn.Module]:
    return [Vectors(0 if same else rank, dtype) for rank in range(p)]


def sgd(models: list[nn.Module], lr: float = 0.1, **options: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=lr, **options) for model in models]


def fill_gradients(models: list[nn.Module], seed: int | None) -> None:
    """Random gradients, other ones on each rank; zeros where the seed is None."""
    for rank, model in enumerate(models):
        generator = torch.Generator().manual_seed((seed or 0) * 100 + rank)
        for w in model.parameters():
            g = torch.randn(w.shape, generator=generator).to(w.dtype)
            w.grad = torch.zeros_like(w) if seed is None else g


def flat(model: nn.Module) -> Tensor:
    return torch.cat([w.detach().double().flatten() for w in model.parameters()])


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([w.grad.double().flatten() for w in model.parameters()])


def mean(models: list[nn.Module]) -> Tensor:
    return torch.stack([flat(model) for model in models]).mean(0)


def buffer(optimizer: torch.optim.Optimizer, w: Tensor, key: str = "momentum_buffer") -> Tensor:
    return optimizer.state[w][key].clone()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)
