"""Exact selection of the largest magnitudes of a tensor.

On the CPU magnitudes are compared as integers, which is exact: the bits of a float without its
sign. In this order both zeros are 0, then come denormals, finite values, inf, and NaN above all. It
needs no arithmetic of floats, and does not depend on whether denormals are flushed.
"""

import math
import threading
from numbers import Integral, Real
from typing import TypeGuard

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["check_count", "check_density", "is_whole", "top_k"]

_METHODS = ("auto", "partition", "threshold")
_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_CHUNK_BYTES = 1 << 20
"""The CPU reads values in pieces of this size, so that magnitudes are still in the cache."""
_PARTITION_ABOVE_DENSITY = 0.25
"""Up to one piece, and above this density, partial sorting was faster or took less memory."""
_SAMPLE = 1 << 16


def top_k(
    values: Float[Tensor, " n"], count: int, *, method: str = "auto"
) -> Int[Tensor, " count"]:
    """The indices of the `count` largest magnitudes, exactly, in ascending order.

    On the CPU equal input gives equal output, whatever the method: among equal magnitudes the
    lowest indices are taken. On other devices it is `torch.topk`, which may take others.

    NaN counts as larger than inf, and inf as larger than all finite values. So values that are not
    finite are selected first, and the receiver sees them; a threshold in floats would be NaN, and
    select nothing.

    To select from a gradient plus the residual of error feedback, add in place first:
    `top_k(residual.add_(gradient), count)`.

    | method | looks at | scratch beside the result |
    |---|---|---|
    | `"partition"` | all magnitudes, partially sorted; CPU | two copies of the values |
    | `"threshold"` | what is above a threshold that a sample proposes; CPU | see below |

    With `"threshold"` the number of those above it proves that none is missing; a threshold that
    turns out too high costs a second pass. Its scratch is 1.5 MiB a thread, kept for the next call,
    and 20 bytes (values of 4) for each one above, usually 1.1 to 4 `count`; whatever the values
    are, there are never more than `2 count` and a MiB of values of these.

    On the CPU one thread does it, whatever torch's number of threads: it is bound by memory. On
    other devices nothing waits for the device.

    Args:
        values: One-dimensional and contiguous, of float16, bfloat16, float32 or float64.
        count: How many, a whole number, 1 to `n`.
        method: Of CPUs; the default is what was fastest for the size and the density.

    Returns:
        int64, on the device of `values`.

    Raises:
        ValueError: `values` is of another type, or not flat and contiguous, `count` is not whole or
            out of range, or there is no such method.

    Example:
        >>> top_k(torch.tensor([0.5, -3.0, 1.0, 2.0, -1.0]), 3)
        tensor([1, 2, 3])
    """
    if method not in _METHODS:
        raise ValueError(
            f"there is no selection method {method!r}: choose among {', '.join(_METHODS)}"
        )
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"values of shape {tuple(values.shape)} and stride {values.stride()} are not flat and "
            "contiguous: select from values.flatten().contiguous()"
        )
    numel = values.numel()
    check_count(count, numel)
    if values.dtype not in _INTEGERS:
        raise ValueError(
            f"values are of type {values.dtype}: magnitudes are compared of "
            f"{', '.join(map(str, _INTEGERS))}; convert them first"
        )
    if values.device.type != "cpu":
        largest = torch.topk(values.detach().abs(), count, sorted=False)
        return largest.indices.sort().values
    bits = values.detach().view(_INTEGERS[values.dtype])
    if method == "auto":
        is_small = numel * values.element_size() <= _CHUNK_BYTES
        is_dense = count > _PARTITION_ABOVE_DENSITY * numel
        method = "partition" if is_small or is_dense else "threshold"
    select = _by_partition if method == "partition" else _by_threshold
    return torch.from_numpy(select(bits.numpy(), count))


def _magnitude_mask(element_bytes: int) -> int:
    """All bits of an integer of that width but the sign."""
    return (1 << 8 * element_bytes - 1) - 1


class _Scratch(threading.local):
    """Memory for the magnitudes of one piece, and for one comparison; each thread has its own.

    It holds 1.5 MiB from its first use until its thread ends.
    """

    def __init__(self) -> None:
        self._magnitudes = np.empty(_CHUNK_BYTES, np.uint8)
        self._is_above = np.empty(_CHUNK_BYTES // 2, np.bool_)

    def magnitudes(self, piece: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """Return the magnitudes of a piece of bits; the next call overwrites them."""
        out = self._magnitudes[: piece.nbytes].view(piece.dtype)
        return np.bitwise_and(piece, _magnitude_mask(piece.itemsize), out=out)

    def above(self, magnitudes: Int[np.ndarray, " m"], bound: int) -> Int[np.ndarray, " found"]:
        """Return the indices of magnitudes above the bound, ascending."""
        is_above = np.greater(magnitudes, bound, out=self._is_above[: magnitudes.size])
        return np.flatnonzero(is_above)


_scratch = _Scratch()


def _largest(magnitudes: Int[np.ndarray, " m"], count: int) -> Int[np.ndarray, " count"]:
    """The indices of the `count` largest, ascending; of equal ones the lowest."""
    kth = np.partition(magnitudes, -count)[-count]
    indices = np.flatnonzero(magnitudes >= kth)
    surplus = indices.size - count
    if surplus:
        tied = np.flatnonzero(magnitudes[indices] == kth)
        indices = np.delete(indices, tied[-surplus:])
    return indices


def _by_partition(bits: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " count"]:
    """Sort all magnitudes partially."""
    if bits.nbytes <= _CHUNK_BYTES:
        return _largest(_scratch.magnitudes(bits), count)
    return _largest(bits & _magnitude_mask(bits.itemsize), count)


def _by_threshold(bits: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " count"]:
    """Collect what is above a sampled threshold, and sort that partially.

    The number collected proves the threshold: with `count` or more above it, the `count` largest
    are among them. With fewer, the sample misled, and a second pass looks at everything.
    """
    indices, magnitudes = _collect(bits, count, _guess(bits, count))
    if indices.size < count:
        indices, magnitudes = _collect(bits, count, -1)
    return indices[_largest(magnitudes, count)]


def _guess(bits: Int[np.ndarray, " n"], count: int) -> int:
    """A bound that a few more than `count` magnitudes are above, as far as a sample tells.

    One of every `stride` values is looked at, at an offset that moves by the golden ratio, so that
    rows of a matrix do not fall into step with it. `count` of all are expected to be `expected` of
    the sample; four standard deviations more are taken.
    """
    size = min(_SAMPLE, bits.size // 8)
    expected = count * size / bits.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank >= size:
        return -1
    stride = bits.size // size
    turn = np.arange(size, dtype=np.int64)
    jitter = (turn * 0x9E3779B1 & 0xFFFFFFFF) * stride >> 32
    sample = bits[turn * stride + jitter] & _magnitude_mask(bits.itemsize)
    return int(np.partition(sample, -rank)[-rank]) - 1


def _collect(
    bits: Int[np.ndarray, " n"], count: int, bound: int
) -> tuple[Int[np.ndarray, " found"], Int[np.ndarray, " found"]]:
    """Indices and magnitudes above the bound, ascending by index: at least all to be chosen.

    Once `2 count` are collected, all but the `count` largest are dropped, and the least of those is
    the new bound: of equal magnitudes the first stay. So memory is bounded whatever the values are,
    and a pass over `n` of them costs O(n).
    """
    length = _CHUNK_BYTES // bits.itemsize
    room = 2 * count + min(length, bits.size)
    indices = np.empty(room, np.int64)  # memory that is not touched is not taken
    magnitudes = np.empty(room, bits.dtype)
    size = 0
    for begin in range(0, bits.size, length):
        if size > 2 * count:
            kept = _largest(magnitudes[:size], count)
            indices[:count], magnitudes[:count] = indices[kept], magnitudes[kept]
            size, bound = count, int(magnitudes[:count].min())
        of_piece = _scratch.magnitudes(bits[begin : begin + length])
        found = _scratch.above(of_piece, bound)
        end = size + found.size
        np.add(found, begin, out=indices[size:end])
        np.take(of_piece, found, out=magnitudes[size:end], mode="clip")
        size = end
    return indices[:size], magnitudes[:size]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer, not a float with an integer value such as 1.0."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(count: object, numel: int) -> None:
    """Raise `ValueError` unless `count` is an integer from 1 to `numel`."""
    if not is_whole(count):
        raise ValueError(
            f"count is {count!r}: give a whole number of values, such as "
            f"max(1, int(density * {numel}))"
        )
    if not 1 <= count <= numel:
        raise ValueError(f"count is {count}: of {numel} values, 1 to {numel} can be sent")


def check_density(density: object, what: str = "density") -> None:
    """Raise `ValueError` unless `density` is above 0 and at most 1; `what` names it."""
    if isinstance(density, bool) or not isinstance(density, Real) or not 0 < float(density) <= 1:
        raise ValueError(
            f"{what} is {density!r}: it is the share that is sent, above 0 and at most 1, such as "
            "0.001"
        )
