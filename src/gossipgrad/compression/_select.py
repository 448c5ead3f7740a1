"""The door of selection: checks, and the choice of a method by what was measured."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gossipgrad.compression._blocks import by_blocks
from gossipgrad.compression._magnitude import bits_of
from gossipgrad.compression._partition import CHUNK_BYTES, by_partition
from gossipgrad.compression._threshold import by_threshold
from gossipgrad.compression._whole import check_count

__all__ = ["METHODS", "top_k"]

METHODS = ("auto", "partition", "threshold", "blocks")


def top_k(
    values: Float[Tensor, " n"], count: int, *, method: str = "auto"
) -> Int[Tensor, " count"]:
    """The places of the `count` largest magnitudes, exactly, in ascending order.

    Equal input gives equal output, whatever the method, device and number of threads: among equal
    magnitudes the lowest places are taken.

    NaN counts as larger than inf, and inf as larger than all finite values (NaNs among each other
    by their bits). So what is not finite is selected first and passed on, and whoever receives it
    can see it; a threshold in floats would be NaN, and select nothing.

    To select from a gradient plus what error feedback carried over, add in place first:
    `top_k(residual.add_(gradient), count)`.

    | method | looks at | scratch beside the result |
    |---|---|---|
    | `"partition"` | all magnitudes, partially sorted; CPU | two copies of the values |
    | `"threshold"` | what is above a threshold that a sample proposes; CPU | see below |
    | `"blocks"` | blocks with the largest maxima; any device | half the values, up to six times |

    With `"threshold"` the number of those above it proves that none is missing; a threshold that
    turns out too high costs a second pass. Its scratch is 1.5 MiB a thread, kept for the next call,
    and 20 bytes (values of 4) for each one above, usually 1.1 to 4 `count`; whatever the values
    are, there are never more than `2 count` and a MiB of values of these.

    On the CPU one thread does it, whatever torch's number of threads: it is bound by memory. On
    other devices nothing waits for the device.

    Args:
        values: One-dimensional and contiguous, of float16, bfloat16, float32 or float64.
        count: How many, a whole number, 1 to `n`.
        method: The default chooses by what `benchmarks/selection.py` measured.

    Returns:
        int64, on the device of `values`.

    Raises:
        ValueError: `values` is of another type, or not flat and contiguous, `count` is not whole or
            out of range, or there is no such method, or not on this device.

    References:
        The blocks are the delegates of Gaihre et al., "Dr. Top-k: delegate-centric Top-k on GPUs",
        SC 2021.

    Example:
        >>> top_k(torch.tensor([0.5, -3.0, 1.0, 2.0, -1.0]), 3)
        tensor([1, 2, 3])
    """
    if method not in METHODS:
        raise ValueError(
            f"there is no selection method {method!r}: choose among {', '.join(METHODS)}"
        )
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"values of shape {tuple(values.shape)} and stride {values.stride()} are not flat and "
            "contiguous: select from values.flatten().contiguous()"
        )
    numel = values.numel()
    check_count(count, numel)
    if not 1 <= count <= numel:
        raise ValueError(f"count is {count}: of {numel} values, 1 to {numel} can be selected")
    bits = bits_of(values)
    if values.device.type != "cpu":
        if method not in ("auto", "blocks"):
            raise ValueError(
                f"method {method!r} is for values on the CPU, these are on {values.device}: "
                "use 'blocks' or 'auto'"
            )
        return by_blocks(bits, count)
    if method == "blocks":
        return by_blocks(bits, count)
    if method == "auto":
        method = _measured_choice(numel, count, values.element_size())
    select = by_partition if method == "partition" else by_threshold
    return torch.from_numpy(select(bits.numpy(), count))


_PARTITION_BELOW_BYTES = CHUNK_BYTES
_PARTITION_ABOVE_DENSITY = 0.25
"""Where partial sorting was faster, or took less memory, in benchmarks/results/selection.json."""


def _measured_choice(numel: int, count: int, element_bytes: int) -> str:
    if numel * element_bytes <= _PARTITION_BELOW_BYTES or count > _PARTITION_ABOVE_DENSITY * numel:
        return "partition"
    return "threshold"
