"""The cost of moving bytes: small callables from a size to seconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import numpy as np
from jaxtyping import Float, Int

__all__ = ["AffineCost", "PiecewiseCost"]

Sizes = Float[np.ndarray, "..."] | Int[np.ndarray, "..."]


@dataclass(frozen=True, slots=True)
class AffineCost:
    """A latency and a time per byte: `alpha_seconds + beta_seconds_per_byte * size`.

    Attributes:
        alpha_seconds: Time of an empty message, 0 or more.
        beta_seconds_per_byte: Time of each byte, 0 or more.

    Raises:
        ValueError: Either is negative or not finite.

    Example:
        >>> cost = AffineCost(alpha_seconds=1e-3, beta_seconds_per_byte=8e-9)
        >>> round(cost(1_000_000), 9)
        0.009
        >>> round(cost.ring_all_reduce(4)(1_000_000), 9)
        0.018
    """

    alpha_seconds: float
    beta_seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("alpha_seconds", "beta_seconds_per_byte"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}: a cost is a finite number, and 0 or more")

    @overload
    def __call__(self, size_bytes: float | int) -> float: ...
    @overload
    def __call__(self, size_bytes: Sizes) -> Float[np.ndarray, "..."]: ...
    def __call__(self, size_bytes: Any) -> Any:
        """Return the seconds for a message of that size, or of sizes in an array."""
        return self.alpha_seconds + self.beta_seconds_per_byte * size_bytes

    @classmethod
    def from_rate(cls, *, rate_bits_per_second: float, latency_seconds: float) -> "AffineCost":
        """Return the cost of a link by its rate per direction and its latency.

        Raises:
            ValueError: The rate is not positive, or the latency negative.

        Example:
            >>> AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=5e-5)
            AffineCost(alpha_seconds=5e-05, beta_seconds_per_byte=8e-09)
        """
        if not 0 < rate_bits_per_second < math.inf:
            raise ValueError(
                f"a rate of {rate_bits_per_second!r} bits a second: give a finite number above 0"
            )
        return cls(alpha_seconds=latency_seconds, beta_seconds_per_byte=8 / rate_bits_per_second)

    @classmethod
    def fit(cls, size_bytes: Sequence[float | int], seconds: Sequence[float | int]) -> "AffineCost":
        """Fit an affine cost to measurements, by squares of relative errors.

        Relative errors weigh a small message as much as a large one: absolute ones would determine
        the latency by the noise of the largest. Neither coefficient becomes negative: if the best
        line has one below 0, the result is the best line with that one at 0.

        Args:
            size_bytes: Size of each measurement, 0 or more; at least two different ones.
            seconds: That it took, above 0.

        Raises:
            ValueError: The two differ in length, a value is out of range, or all sizes are equal.

        Example:
            >>> cost = AffineCost.fit([1000, 2000, 4000], [1.5, 2.0, 3.0])
            >>> round(cost.alpha_seconds, 6), round(cost.beta_seconds_per_byte, 9)
            (1.0, 0.0005)
        """
        sizes, times = _measured(size_bytes, seconds)
        scale = float(sizes.max())
        constant, linear = 1 / times, (sizes / scale) / times
        (alpha, beta), *_ = np.linalg.lstsq(
            np.stack([constant, linear], axis=1), np.ones_like(times), rcond=None
        )
        if alpha < 0:
            alpha, beta = 0.0, linear.sum() / (linear @ linear)
        elif beta < 0:
            alpha, beta = constant.sum() / (constant @ constant), 0.0
        return cls(alpha_seconds=float(alpha), beta_seconds_per_byte=float(beta / scale))

    def ring_all_reduce(self, world_size: int) -> "AffineCost":
        """Return the cost of a ring all-reduce, if this is the cost of one hop.

        `2 (p - 1)` hops of a p-th of the bytes, one after another; all ranks end together.

        Raises:
            ValueError: There is no rank.
        """
        return self._hops(world_size, rounds=2, parts=world_size)

    def ring_all_gather(self, world_size: int) -> "AffineCost":
        """Return the cost of a ring all-gather, called with the bytes of one rank.

        `p - 1` hops of all of them.

        Raises:
            ValueError: There is no rank.
        """
        return self._hops(world_size, rounds=1, parts=1)

    def hop_of_ring(self, world_size: int) -> "AffineCost":
        """Return the cost of one hop, if this is that of a ring all-reduce over `world_size` ranks.

        The inverse of `ring_all_reduce`: so that a measurement with few ranks predicts many.

        Raises:
            ValueError: With one rank there are no hops.
        """
        if world_size < 2:
            raise ValueError(f"a ring of {world_size} ranks has no hops: measure with 2 or more")
        hops = 2 * (world_size - 1)
        return AffineCost(
            alpha_seconds=self.alpha_seconds / hops,
            beta_seconds_per_byte=self.beta_seconds_per_byte * world_size / hops,
        )

    def _hops(self, world_size: int, *, rounds: int, parts: int) -> "AffineCost":
        """Return the cost of rounds of a ring, with one of `parts` of the bytes per hop."""
        if world_size < 1:
            raise ValueError(f"world size {world_size} has no ranks: it must be 1 or more")
        hops = rounds * (world_size - 1)
        return AffineCost(
            alpha_seconds=hops * self.alpha_seconds,
            beta_seconds_per_byte=hops / parts * self.beta_seconds_per_byte,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PiecewiseCost:
    """A piecewise linear cost, by its values at some sizes.

    For curves with a knee, where one line would be wrong at both ends. Below the first size it is
    constant; past the last it continues with the last slope.

    Attributes:
        sizes: Sizes in the cost's unit, bytes or elements: ascending, 0 or more, at least two.
        seconds: Seconds at each size, 0 or more and never decreasing.

    Raises:
        ValueError: A value violates this.

    Example:
        >>> cost = PiecewiseCost(sizes=(0.0, 1000.0, 2000.0), seconds=(1.0, 1.0, 3.0))
        >>> cost(500), cost(1500), cost(3000)
        (1.0, 2.0, 5.0)
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) != len(seconds) or len(sizes) < 2:
            raise ValueError(
                f"{len(sizes)} sizes and {len(seconds)} times: a curve has two points or more"
            )
        if not all(0 <= value < math.inf for value in (*sizes, *seconds)):
            raise ValueError("sizes and times of a curve are finite numbers, and 0 or more")
        if any(later <= earlier for earlier, later in pairwise(sizes)):
            raise ValueError("the sizes of a curve rise: give each once, in order")
        if any(later < earlier for earlier, later in pairwise(seconds)):
            raise ValueError(
                "the times of a curve never fall with size: PiecewiseCost.fit() evens out noise"
            )

    @overload
    def __call__(self, size: float | int) -> float: ...
    @overload
    def __call__(self, size: Sizes) -> Float[np.ndarray, "..."]: ...
    def __call__(self, size: Any) -> Any:
        """Return the seconds for that size, or for sizes in an array."""
        sizes, seconds = self.sizes, self.seconds
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        past = np.maximum(np.asarray(size, dtype=np.float64) - sizes[-1], 0.0)
        found = np.interp(size, sizes, seconds) + slope * past
        return found if isinstance(size, np.ndarray) else float(found)

    @classmethod
    def fit(cls, sizes: Sequence[float | int], seconds: Sequence[float | int]) -> "PiecewiseCost":
        """Fit a curve through the medians at each size, raised where it would decrease.

        Args:
            sizes: Size of each measurement, 0 or more; at least two different ones.
            seconds: That it took, above 0.

        Raises:
            ValueError: As `AffineCost.fit`.
        """
        measured, times = _measured(sizes, seconds)
        knots = np.unique(measured)
        medians = [float(np.median(times[measured == knot])) for knot in knots]
        return cls(
            sizes=tuple(float(knot) for knot in knots),
            seconds=tuple(float(value) for value in np.maximum.accumulate(medians)),
        )


def _measured(
    measured_sizes: Sequence[float | int], seconds: Sequence[float | int]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    sizes, times = np.asarray(measured_sizes, np.float64), np.asarray(seconds, np.float64)
    if sizes.shape != times.shape or sizes.ndim != 1:
        raise ValueError(f"{sizes.size} sizes and {times.size} times: give a time for each size")
    if not (np.isfinite(sizes).all() and np.isfinite(times).all()):
        raise ValueError("a measurement is not finite")
    if (sizes < 0).any() or (times <= 0).any():
        raise ValueError("sizes are 0 or more, and what was measured took some time")
    if np.unique(sizes).size < 2:
        raise ValueError(
            "start-up and time a byte cannot be separated by one size: measure two or more"
        )
    return sizes, times
