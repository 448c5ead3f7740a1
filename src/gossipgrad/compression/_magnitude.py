"""Magnitudes as integers: a total order in which NaN, inf and denormals have their places."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["bits_of", "magnitude_mask"]

_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def bits_of(values: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The same memory, read as integers as wide as the floats.

    Without its sign bit (`& magnitude_mask(element_bytes)`) such an integer orders floats by
    magnitude: both zeros are 0, then denormals, finite values, inf, and NaN above all. It is exact,
    needs no arithmetic of floats, and does not depend on whether denormals are flushed.

    Raises:
        ValueError: The values are not of a floating type that has such integers.
    """
    if values.dtype not in _INTEGERS:
        raise ValueError(
            f"values are of type {values.dtype}: magnitudes are compared of "
            f"{', '.join(map(str, _INTEGERS))}; convert them first"
        )
    return values.detach().view(_INTEGERS[values.dtype])


def magnitude_mask(element_bytes: int) -> int:
    """All bits of an integer of that width but the sign."""
    return (1 << 8 * element_bytes - 1) - 1
