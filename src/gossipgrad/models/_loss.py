"""The loss that every model here is trained with."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

AUXILIARY_WEIGHT = 0.3


class AuxiliaryLogits(NamedTuple):
    """What a model with auxiliary heads returns in training; in evaluation, the logits alone."""

    logits: Float[Tensor, "*batch class"]
    """Of the model itself."""
    auxiliary: tuple[Float[Tensor, "*batch class"], ...]
    """Of its auxiliary heads."""


def training_loss(
    model: nn.Module,
    x: Float[Tensor, "batch ..."] | Int[Tensor, "batch ..."],
    y: Int[Tensor, "..."],
) -> Float[Tensor, ""]:
    """Cross entropy of `model(x)`, averaged over all labels; nothing is communicated.

    Auxiliary heads count with a weight of 0.3 each. A model in `DistributedDataParallel` or
    compiled does as well: what it returns decides, not its type.

    Args:
        model: Called once; logits come in its last dimension, or as `AuxiliaryLogits`.
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

    References:
        Szegedy et al., Going deeper with convolutions, 2015, section 5: the weight of 0.3.
    """
    return cross_entropy(model(x), y)


def cross_entropy(
    outputs: Float[Tensor, "... class"] | AuxiliaryLogits, y: Int[Tensor, "..."]
) -> Float[Tensor, ""]:
    """Of what a model has returned, as `training_loss`.

    Raises:
        ValueError: The logits are not one row a label.
    """
    if not isinstance(outputs, AuxiliaryLogits):
        return _cross_entropy(outputs, y)
    loss = _cross_entropy(outputs.logits, y)
    for logits in outputs.auxiliary:
        loss = loss + AUXILIARY_WEIGHT * _cross_entropy(logits, y)
    return loss


def _cross_entropy(logits: Float[Tensor, "... class"], y: Int[Tensor, "..."]) -> Float[Tensor, ""]:
    if logits.shape[:-1] != y.shape:
        raise ValueError(
            f"labels of shape {tuple(y.shape)} need logits of shape {(*y.shape, 'classes')}, but "
            f"the model returned {tuple(logits.shape)}; is it a model for this data?"
        )
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
