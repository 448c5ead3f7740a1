"""Which parameters a model and its optimizers have, by name."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

__all__ = ["all_parameters", "parameters_of", "trained_parameters"]


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """All parameters of its groups, in their order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def all_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The model's parameters, and those that only an optimizer holds, by name; tied ones once."""
    named = dict(model.named_parameters())
    known = {id(p) for p in named.values()}
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"optimizer {number}, parameter {place}"] = parameter
    return named


def trained_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, nn.Parameter]:
    """The parameters that the optimizers train, by name, in the model's order.

    Frozen parameters stay out: they are equal on all ranks after the start.
    """
    owned = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    named = all_parameters(model, optimizers)
    return {name: p for name, p in named.items() if id(p) in owned and p.requires_grad}
