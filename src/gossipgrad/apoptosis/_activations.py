"""Properties of activations, which determine the exact merges of neurons."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "Activation", "check_activation"]


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of one number.

    Attributes:
        function: On tensors.
        lipschitz: The Lipschitz constant.
        is_homogeneous: `s(a z) = a s(z)` for all `a > 0`.
        mirror: `(sign, constant)` with `s(-z) = sign s(z) + constant`; None: there is none.
        is_monotone: Whether it never decreases.
    """

    function: Callable[[Tensor], Tensor]
    lipschitz: float = 1.0
    is_homogeneous: bool = False
    mirror: tuple[float, float] | None = None
    is_monotone: bool = True


ACTIVATIONS = {
    "identity": Activation(lambda z: z, is_homogeneous=True, mirror=(-1.0, 0.0)),
    "relu": Activation(F.relu, is_homogeneous=True),
    "leaky_relu": Activation(F.leaky_relu, is_homogeneous=True),
    "abs": Activation(torch.abs, is_homogeneous=True, mirror=(1.0, 0.0), is_monotone=False),
    "tanh": Activation(torch.tanh, mirror=(-1.0, 0.0)),
    "sigmoid": Activation(torch.sigmoid, lipschitz=0.25, mirror=(-1.0, 1.0)),
    "softplus": Activation(F.softplus),
    "gelu": Activation(F.gelu, lipschitz=1.13, is_monotone=False),
    "silu": Activation(F.silu, lipschitz=1.1, is_monotone=False),
    "relu6": Activation(F.relu6),
    "hardtanh": Activation(F.hardtanh, mirror=(-1.0, 0.0)),
    "softsign": Activation(F.softsign, mirror=(-1.0, 0.0)),
    "elu": Activation(F.elu),
}
"""Activations by the name of torch's function, with its default arguments."""


def check_activation(name: str | None) -> None:
    """Raise `ValueError` if it is unknown."""
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}, or None where merges come from "
            f"data alone, got {name!r}"
        )
