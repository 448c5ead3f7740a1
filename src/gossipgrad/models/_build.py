"""Models by name."""

import math

from torch import nn

from gossipgrad.data import DatasetInfo

from ._lenet import LeNet
from ._mlp import MLP

NAMES = ("mlp", "lenet")


def build(name: str, dataset_info: DatasetInfo) -> nn.Module:
    """A model of this name for the inputs and classes of a data set, freshly initialised.

    Uses torch's global random generator: ranks that seed it alike get equal replicas.

    Raises:
        ValueError: There is no model of this name, or it does not take such inputs.

    Example:
        >>> from gossipgrad import data
        >>> model = build("lenet", data.info("fashion-mnist"))
        >>> sum(p.numel() for p in model.parameters())
        61706
    """
    if name == "mlp":
        return MLP(math.prod(dataset_info.input_shape), dataset_info.num_classes)
    if name == "lenet":
        if dataset_info.input_shape != (1, 28, 28):
            raise ValueError(
                f"model 'lenet' takes inputs of shape (1, 28, 28), but data "
                f"{dataset_info.name!r} has {dataset_info.input_shape}; use model 'mlp'."
            )
        return LeNet(dataset_info.num_classes)
    raise ValueError(f"model {name!r} is not known; choose one of {', '.join(NAMES)}.")
