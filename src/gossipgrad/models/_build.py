"""Models by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from ._gpt import GPT
from ._images import MLP, CIFARNet, LeNet, ResNet20


class Inputs(Protocol):
    """What a model is built for; a `gossipgrad.data.DatasetInfo` is one."""

    @property
    def name(self) -> str:
        """Of the data, for messages."""
        ...

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample: channels, height and width of an image; the length of a text."""
        ...

    @property
    def num_classes(self) -> int:
        """How many classes, or the size of the vocabulary."""
        ...

    @property
    def kind(self) -> str:
        """`images` or `text`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """How a model is made, and for which inputs."""

    make: Callable[[Inputs], nn.Module]
    fits: Callable[[Inputs], bool]
    takes: str
    data: str


def _is_image(info: Inputs) -> bool:
    return info.kind == "images"


_ENTRIES = {
    "mlp": _Entry(
        make=lambda info: MLP(math.prod(info.input_shape), info.num_classes),
        fits=_is_image,
        takes="images of any size",
        data="digits",
    ),
    "mlp-wide": _Entry(
        make=lambda info: MLP(math.prod(info.input_shape), info.num_classes, hidden_size=1024),
        fits=_is_image,
        takes="images of any size",
        data="fashion-mnist",
    ),
    "lenet": _Entry(
        make=lambda info: LeNet(info.num_classes),
        fits=lambda info: _is_image(info) and info.input_shape == (1, 28, 28),
        takes="inputs of shape (1, 28, 28)",
        data="fashion-mnist",
    ),
    "cifarnet": _Entry(
        make=lambda info: CIFARNet(info.num_classes, info.input_shape[0]),
        fits=lambda info: _is_image(info) and info.input_shape[1:] == (32, 32),
        takes="images of 32x32",
        data="cifar10",
    ),
    "resnet20": _Entry(
        make=lambda info: ResNet20(info.num_classes, info.input_shape[0]),
        fits=lambda info: _is_image(info) and min(info.input_shape[1:]) >= 4,
        takes="images of at least 4x4",
        data="cifar10",
    ),
    "gpt": _Entry(
        make=lambda info: GPT(info.num_classes, context=info.input_shape[0]),
        fits=lambda info: info.kind == "text",
        takes="text",
        data="shakespeare",
    ),
}
NAMES = tuple(_ENTRIES)


def build(name: str, inputs: Inputs) -> nn.Module:
    """A model of this name for the inputs and classes of a data set, freshly initialised.

    Uses torch's global random generator: ranks that seed it alike get equal replicas.

    Args:
        name: One of `NAMES`.
        inputs: The shape of inputs and the number of classes, as a `DatasetInfo` has them.

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
    if not entry.fits(inputs):
        fitting = [repr(other) for other in NAMES if _ENTRIES[other].fits(inputs)]
        raise ValueError(
            f"model {name!r} takes {entry.takes}, but data {inputs.name!r} has "
            f"{'text' if inputs.kind == 'text' else inputs.input_shape}; use model "
            f"{' or '.join(fitting)}, or data such as {entry.data!r}."
        )
    return entry.make(inputs)
