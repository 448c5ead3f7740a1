"""What is carried over of one tensor, from round to round and from session to session."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Held"]


class Held(NamedTuple):
    """What is carried over of one tensor.

    Attributes:
        residual: In its shape, maybe a view of more; None where it is nothing.
        velocity: The same.
        rounds_without: How many rounds went by since a coordinate of it was last chosen.
    """

    residual: Tensor | None = None
    velocity: Tensor | None = None
    rounds_without: int = 0
