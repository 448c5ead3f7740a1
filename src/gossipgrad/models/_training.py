"""What training asks of a model: its loss, and which of its layers are heads."""

from jaxtyping import Float, Int
from torch import Tensor, nn


def training_loss(
    model: nn.Module,
    x: Float[Tensor, "batch ..."] | Int[Tensor, "batch ..."],
    y: Int[Tensor, "..."],
) -> Float[Tensor, ""]:
    """Cross entropy of `model(x)`, averaged over all labels; nothing is communicated.

    Args:
        model: Called once; logits are in its last dimension.
        x: A batch, as the model takes it.
        y: The class of each sample, (batch,), or of each position, (batch, position).

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: The logits are not one row a label.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 10)
        >>> with torch.no_grad():
        ...     _ = (model.weight.zero_(), model.bias.zero_())
        >>> loss = training_loss(model, torch.randn(2, 4), torch.tensor([3, 7]))
        >>> round(loss.item(), 4)  # ln 10: all classes are alike to it
        2.3026
    """
    return cross_entropy(model(x), y)


def cross_entropy(logits: Float[Tensor, "... class"], y: Int[Tensor, "..."]) -> Float[Tensor, ""]:
    """Of the logits that a model has returned, as `training_loss`.

    Raises:
        ValueError: The logits are not one row a label.
    """
    if logits.shape[:-1] != y.shape:
        raise ValueError(
            f"labels of shape {tuple(y.shape)} need logits of shape {(*y.shape, 'classes')}, but "
            f"the model returned {tuple(logits.shape)}; is it a model for this data?"
        )
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


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
