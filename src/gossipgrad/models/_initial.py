"""Initial weights that several models share."""

from typing import Literal

from torch import nn


def he_normal_(model: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """Draw the weights of all convolutions for layers that ReLU follows; biases become 0.

    Deviation `sqrt(2 / n)`, n being the weights that an output (fan_in) or an input (fan_out)
    takes part in: the first keeps the size of activations, the second that of gradients.

    References:
        He, Zhang, Ren, Sun, Delving deep into rectifiers, 2015, section 2.2.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
