"""A mask that all ranks compute alike, so that values are sent without indices."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, UInt64
from torch import Tensor

from gossipgrad.topology import splitmix64

from ._top_k import check_density, is_whole

__all__ = ["SharedMask"]

_MASKS = 0x6D61736B73000000
"""Separates the numbers drawn from a seed from those of schedules, which use it too."""
_HALF = np.uint64(32)
_PIECE = 1 << 14
"""Number of stripes whose hashes are computed together, to fit the cache."""


@dataclass(frozen=True, slots=True)
class SharedMask:
    r"""A selection that every rank computes alike, so that values are sent without indices.

    With $m = \lceil 1/\text{density} \rceil$, rounds $cm$ to $cm + m - 1$ are cycle $c$, and
    coordinates $bm$ to $bm + m - 1$ are stripe $b$. Round $cm + j$ takes of each stripe the
    coordinate at $(h(seed, c, b) + j) \bmod m$, $h$ being a hash, 0 to $m - 1$. So

    * within a cycle every coordinate is taken exactly once, whatever the hash;
    * over the hash every coordinate is taken in every round with probability $1/m$, and stripes are
      independent of each other and from cycle to cycle. Waits are below $2m$ rounds, and no
      coordinate stays in step with the period of a schedule, which would let it meet some of the
      partners alone;
    * a round takes the same share, but for one coordinate, of any run of them: no tensor is
      starved;
    * indices ascend. One hash a stripe is all the work, O(n / m).

    All arithmetic is that of 64-bit integers: the same on every platform.

    Attributes:
        density: The share of a round, above 0 and at most 1. It is rounded down to one in a whole
            number: 0.3 sends one in 4.

    Raises:
        ValueError: `density` is out of range.

    Example:
        >>> mask = SharedMask(0.25)
        >>> [mask.indices(12, seed=0, round=round).tolist() for round in range(4)]
        [[2, 6, 9], [3, 7, 10], [0, 4, 11], [1, 5, 8]]
    """

    density: float | int

    def __post_init__(self) -> None:
        check_density(self.density)
        try:
            _ = self.cycle_rounds
        except OverflowError as error:
            raise ValueError(
                f"density is {self.density!r}: a cycle would have more rounds than a float can "
                "hold, give a share that some round sends, such as 0.001"
            ) from error

    @property
    def cycle_rounds(self) -> int:
        """Number of rounds in which every coordinate is sent once."""
        return math.ceil(1 / self.density * (1 - 1e-12))  # 1 / (1 / 49) is above 49

    def largest_count(self, numel: int) -> int:
        """Return the most values of `numel` that a round sends; some rounds send one less."""
        return -(-numel // self._stripe(numel))

    def indices(
        self, numel: int, *, seed: int, round: int, device: torch.device | str = "cpu"
    ) -> Int[Tensor, " count"]:
        """Return the coordinates of a round, ascending, int64; at least one.

        A tensor of fewer than `cycle_rounds` elements sends one of them in every round.

        Args:
            numel: Number of elements of the tensor, 1 or more.
            seed: The same on all ranks, 0 to 2^64 - 1.
            round: 0 to 2^64 - 1; the same on both ends of an exchange.
            device: The device of the result.

        Raises:
            ValueError: A number is not whole, or out of range.
        """
        whole = all(map(is_whole, (numel, round, seed)))
        if not whole or numel < 1 or not (0 <= round < 1 << 64 and 0 <= seed < 1 << 64):
            raise ValueError(
                f"there is no mask for {numel!r} elements in round {round!r} of seed {seed!r}: "
                "give whole numbers, 1 or more elements, and a round and a seed of 0 to 2^64 - 1"
            )
        stripe = self._stripe(numel)
        cycle, turn = divmod(round, stripe)
        firsts = np.arange(0, numel, stripe)
        for begin in range(0, firsts.size, _PIECE):
            piece = firsts[begin : begin + _PIECE]
            hashes = _hashes(seed, cycle, begin, piece.size)
            inside = (hashes >> _HALF) * np.uint64(stripe) >> _HALF  # 0 to stripe - 1
            inside += np.uint64(turn)
            inside = np.minimum(inside, inside - np.uint64(stripe))  # modulo: below 0 is huge
            piece += inside.view(np.int64)
        if firsts[-1] >= numel:  # the last stripe may not be full
            firsts = firsts[:-1]
        return torch.from_numpy(firsts).to(device)

    def _stripe(self, numel: int) -> int:
        return min(self.cycle_rounds, numel)


def _hashes(seed: int, cycle: int, begin: int, count: int) -> UInt64[np.ndarray, " count"]:
    """Return the hashes of `count` stripes from `begin` on."""
    state = splitmix64(np.array([seed ^ _MASKS], np.uint64))
    state = splitmix64(state ^ np.uint64(cycle))
    return splitmix64(state ^ np.arange(begin, begin + count, dtype=np.uint64))
