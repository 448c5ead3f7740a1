"""Which layers of a model are its heads."""

from torch import nn


def heads(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules of a model that turn features into logits; local.

    A model names them by a property, `head_modules`: auxiliary heads as a whole, since evaluation
    has no use for them, and none that shares the weights of an embedding. A model without the
    property is taken to have its last linear layer for a head.

    Args:
        model: Any.

    Returns:
        Its heads; empty if it has none of its own.

    Example:
        >>> import torch
        >>> heads(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)))
        (Linear(in_features=3, out_features=3, bias=True),)
    """
    named = getattr(model, "head_modules", None)
    if isinstance(named, tuple):
        return named
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return tuple(linear[-1:])
