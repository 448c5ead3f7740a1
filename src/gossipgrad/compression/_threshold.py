"""Selection in one pass: what is above a guess from a sample, and the guess is checked."""

import math

import numpy as np
from jaxtyping import Int

from gossipgrad.compression._magnitude import magnitude_mask
from gossipgrad.compression._partition import CHUNK_BYTES, largest, scratch

__all__ = ["by_threshold"]

SAMPLE = 1 << 16


class _Candidates:
    """The largest of all that was added, in the order in which it came.

    Once `2 count` have come, all but the `count` largest are dropped, and from then on only what is
    above the least of those is wanted: of equal magnitudes those that came first stay. So memory is
    bounded whatever the values are, and a pass over `n` of them costs O(n).
    """

    def __init__(self, count: int, room: int, bound: int, dtype: np.dtype) -> None:
        self.bound = bound
        """What is not above it need not be added."""
        self._count = count
        self._size = 0
        # memory that is not touched is not taken
        self._places = np.empty(2 * count + room, np.int64)
        self._magnitudes = np.empty(2 * count + room, dtype)

    def add(
        self, begin: int, places: Int[np.ndarray, " found"], magnitudes: Int[np.ndarray, " m"]
    ) -> None:
        """Those at some places of a piece that begins at `begin`."""
        if self._size > 2 * self._count:
            self._drop()
        end = self._size + places.size
        np.add(places, begin, out=self._places[self._size : end])
        np.take(magnitudes, places, out=self._magnitudes[self._size : end], mode="clip")
        self._size = end

    def all(self) -> tuple[Int[np.ndarray, " kept"], Int[np.ndarray, " kept"]]:
        """Places and magnitudes."""
        return self._places[: self._size], self._magnitudes[: self._size]

    def _drop(self) -> None:
        places, magnitudes = self.all()
        kept = largest(magnitudes, self._count)
        self._size = self._count
        self._places[: self._size] = places[kept]
        self._magnitudes[: self._size] = magnitudes[kept]
        self.bound = int(self._magnitudes[: self._size].min())


def by_threshold(bits: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " count"]:
    """What is above a sampled threshold, then partial sorting of that.

    The count of what was found proves the threshold: with `count` or more above it, the `count`
    largest are among them. With fewer, the sample misled, and everything is looked at again.
    """
    places, magnitudes = _found(bits, count, _guess(bits, count))
    if places.size < count:
        places, magnitudes = _found(bits, count, -1)
    return places[largest(magnitudes, count)]


def _guess(bits: Int[np.ndarray, " n"], count: int) -> int:
    """A bound that a few more than `count` magnitudes are above, as far as a sample tells.

    One of every `stride` values is looked at, at a place that moves by the golden ratio, so that
    rows of a matrix do not fall into step with it. `count` of all are expected to be `expected` of
    the sample; four standard deviations more are taken.
    """
    size = min(SAMPLE, bits.size // 8)
    expected = count * size / bits.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank >= size:
        return -1
    stride = bits.size // size
    turn = np.arange(size, dtype=np.int64)
    jitter = (turn * 0x9E3779B1 & 0xFFFFFFFF) * stride >> 32
    sample = bits[turn * stride + jitter] & magnitude_mask(bits.itemsize)
    return int(np.partition(sample, -rank)[-rank]) - 1


def _found(
    bits: Int[np.ndarray, " n"], count: int, bound: int
) -> tuple[Int[np.ndarray, " found"], Int[np.ndarray, " found"]]:
    """Places and magnitudes of candidates, ascending by place: at least all that can be chosen."""
    length = CHUNK_BYTES // bits.itemsize
    candidates = _Candidates(count, min(length, bits.size), bound, bits.dtype)
    for begin in range(0, bits.size, length):
        magnitudes = scratch.magnitudes(bits[begin : begin + length])
        candidates.add(begin, scratch.above(magnitudes, candidates.bound), magnitudes)
    return candidates.all()
