"""Selection by partial sorting, which ends every method on the CPU."""

import threading

import numpy as np
from jaxtyping import Int

from gossipgrad.compression._magnitude import magnitude_mask

__all__ = ["CHUNK_BYTES", "Scratch", "by_partition", "largest"]

CHUNK_BYTES = 1 << 20
"""Values are read in pieces of this size: what is made of one is still in the cache when read."""


class Scratch(threading.local):
    """Memory for the magnitudes of one piece, and for one comparison; of each thread its own.

    It holds 1.5 MiB from its first use until its thread ends.
    """

    def __init__(self) -> None:
        self._magnitudes = np.empty(CHUNK_BYTES, np.uint8)
        self._mask = np.empty(CHUNK_BYTES // 2, np.bool_)

    def magnitudes(self, piece: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """Those of a piece of bits; overwritten by the next."""
        out = self._magnitudes[: piece.nbytes].view(piece.dtype)
        return np.bitwise_and(piece, magnitude_mask(piece.itemsize), out=out)

    def above(self, magnitudes: Int[np.ndarray, " m"], bound: int) -> Int[np.ndarray, " found"]:
        """The places of magnitudes above the bound, ascending."""
        mask = np.greater(magnitudes, bound, out=self._mask[: magnitudes.size])
        return np.flatnonzero(mask)


scratch = Scratch()


def largest(magnitudes: Int[np.ndarray, " m"], count: int) -> Int[np.ndarray, " count"]:
    """The places of the `count` largest, ascending; of equal ones the lowest."""
    kth = np.partition(magnitudes, -count)[-count]
    places = np.flatnonzero(magnitudes >= kth)
    surplus = places.size - count
    if surplus:
        tied = np.flatnonzero(magnitudes[places] == kth)
        places = np.delete(places, tied[-surplus:])
    return places


def by_partition(bits: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " count"]:
    """Partial sorting of all magnitudes."""
    if bits.nbytes <= CHUNK_BYTES:
        return largest(scratch.magnitudes(bits), count)
    return largest(bits & magnitude_mask(bits.itemsize), count)
