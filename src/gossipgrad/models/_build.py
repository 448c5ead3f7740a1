"""Models by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from gossipgrad.data import DatasetInfo

from ._cifarnet import CIFARNet
from ._googlenet import GoogLeNet
from ._gpt import GPT
from ._lenet import LeNet
from ._mlp import MLP
from ._resnet20 import ResNet20
from ._resnet50 import ResNet50


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """How a model is made for a data set, and for which."""

    make: Callable[[DatasetInfo], nn.Module]
    fits: Callable[[DatasetInfo], bool]
    takes: str
    data: str


def _images_of_at_least(size: int) -> Callable[[DatasetInfo], bool]:
    return lambda info: info.kind == "images" and min(info.input_shape[1:]) >= size


_ENTRIES = {
    "mlp": _Entry(
        make=lambda info: MLP(math.prod(info.input_shape), info.num_classes),
        fits=lambda info: info.kind == "images",
        takes="images of any size",
        data="digits",
    ),
    "mlp-wide": _Entry(
        make=lambda info: MLP(math.prod(info.input_shape), info.num_classes, hidden_size=1024),
        fits=lambda info: info.kind == "images",
        takes="images of any size",
        data="fashion-mnist",
    ),
    "lenet": _Entry(
        make=lambda info: LeNet(info.num_classes),
        fits=lambda info: info.kind == "images" and info.input_shape == (1, 28, 28),
        takes="inputs of shape (1, 28, 28)",
        data="fashion-mnist",
    ),
    "cifarnet": _Entry(
        make=lambda info: CIFARNet(info.num_classes, info.input_shape[0]),
        fits=lambda info: info.kind == "images" and info.input_shape[1:] == (32, 32),
        takes="images of 32x32",
        data="cifar10",
    ),
    "resnet20": _Entry(
        make=lambda info: ResNet20(info.num_classes, info.input_shape[0]),
        fits=_images_of_at_least(4),
        takes="images of at least 4x4",
        data="cifar10",
    ),
    "resnet50": _Entry(
        make=lambda info: ResNet50(info.num_classes, info.input_shape[0]),
        fits=_images_of_at_least(32),
        takes="images of at least 32x32",
        data="imagefolder",
    ),
    "googlenet": _Entry(
        make=lambda info: GoogLeNet(info.num_classes, info.input_shape[0]),
        fits=_images_of_at_least(32),
        takes="images of at least 32x32",
        data="imagefolder",
    ),
    "gpt": _Entry(
        make=lambda info: GPT(info.num_classes, context=info.input_shape[0]),
        fits=lambda info: info.kind == "text",
        takes="text",
        data="shakespeare",
    ),
}
NAMES = tuple(_ENTRIES)


def build(name: str, dataset_info: DatasetInfo) -> nn.Module:
    """A model of this name for the inputs and classes of a data set, freshly initialised.

    Uses torch's global random generator: ranks that seed it alike get equal replicas.

    Args:
        name: One of `NAMES`.
        dataset_info: Gives the shape of inputs and the number of classes.

    Raises:
        ValueError: There is no model of this name, or it does not take such inputs.

    Example:
        >>> from gossipgrad import data
        >>> model = build("lenet", data.info("fashion-mnist"))
        >>> sum(p.numel() for p in model.parameters())
        61706
    """
    if name not in _ENTRIES:
        raise ValueError(f"model {name!r} is not known; choose one of {', '.join(NAMES)}.")
    entry = _ENTRIES[name]
    if not entry.fits(dataset_info):
        is_text = dataset_info.kind == "text"
        fitting = [repr(other) for other in NAMES if _ENTRIES[other].fits(dataset_info)]
        raise ValueError(
            f"model {name!r} takes {entry.takes}, but data {dataset_info.name!r} has "
            f"{'text' if is_text else dataset_info.input_shape}; use model {' or '.join(fitting)}, "
            f"or data such as {entry.data!r}."
        )
    return entry.make(dataset_info)
