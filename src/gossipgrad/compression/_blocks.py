"""Selection by block maxima, in operations that any device has and that never wait for it."""

import torch
from jaxtyping import Int
from torch import Tensor

from gossipgrad.compression._magnitude import magnitude_mask

__all__ = ["by_blocks"]

_BLOCKS = (64, 16)
_PIECE = 1 << 22
"""Elements whose magnitudes are made at once."""


def by_blocks(bits: Int[Tensor, " n"], count: int) -> Int[Tensor, " count"]:
    """The `count` blocks with the largest maxima, then the largest magnitudes in them.

    It is exact: let t be the least of the chosen maxima. Whatever is above t lies in a block whose
    maximum is, and all of those are chosen. If fewer than `count` are above t, the others equal t;
    as of blocks with equal maxima the lowest are chosen, so are the lowest of these.

    Shapes depend on `n` and `count` alone, so nothing is brought to the host. Scratch is the
    maxima, the magnitudes of 4 Mi elements, and those of the chosen blocks with their places.
    """
    numel = bits.numel()
    block = next((size for size in _BLOCKS if 4 * count * size <= numel), None)
    if block is None:
        return _largest(_magnitudes(bits), count)
    chosen = _largest(_maxima(bits, block), count)
    inside = torch.arange(block, device=bits.device)
    places = (chosen.unsqueeze(1) * block + inside).flatten()  # ascending, as the blocks are
    magnitudes = _magnitudes(bits[places.clamp(max=numel - 1)])
    magnitudes.masked_fill_(places >= numel, -1)  # the last block may not be full
    return places[_largest(magnitudes, count)]


def _magnitudes(bits: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    return bits.bitwise_and(magnitude_mask(bits.itemsize))


def _maxima(bits: Int[Tensor, " n"], block: int) -> Int[Tensor, " blocks"]:
    full = bits.numel() // block * block
    maxima = [
        _magnitudes(piece).view(-1, block).amax(1)
        for piece in bits[:full].split(_PIECE)  # a multiple of every block
    ]
    if full < bits.numel():
        maxima.append(_magnitudes(bits[full:]).amax(0, keepdim=True))
    return torch.cat(maxima)


def _largest(magnitudes: Int[Tensor, " n"], count: int) -> Int[Tensor, " count"]:
    """The places of the `count` largest, ascending; of equal ones the lowest."""
    order = torch.sort(magnitudes, descending=True, stable=True).indices
    return order[:count].sort().values
