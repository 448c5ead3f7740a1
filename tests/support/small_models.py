"""The models, made small, with batches for them."""

import torch
from torch import Tensor, nn

from gossipgrad.models import GPT, MLP, CIFARNet, LeNet, ResNet20

__all__ = ["INPUTS", "make_batch", "make_model"]

# Of each: how it is made, for ten classes, and the shape of a batch of four.
_MAKERS = {
    "mlp": lambda: MLP(64, 10),
    "lenet": lambda: LeNet(10),
    "cifarnet": lambda: CIFARNet(10),
    "resnet20": lambda: ResNet20(10),
    "gpt": lambda: GPT(10, context=16, layers=2, width=32),
}
INPUTS = {
    "mlp": (4, 1, 8, 8),
    "lenet": (4, 1, 28, 28),
    "cifarnet": (4, 3, 32, 32),
    "resnet20": (4, 3, 16, 16),
    "gpt": (4, 16),
}


def make_model(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return _MAKERS[name]()


def make_batch(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = INPUTS[name]
    if name == "gpt":
        x, y = torch.randint(10, (2, *shape), generator=generator)
        return x, y
    x = torch.randn(shape, generator=generator)
    return x, torch.randint(10, shape[:1], generator=generator)
