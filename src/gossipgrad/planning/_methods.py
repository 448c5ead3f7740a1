"""Methods by what they are made of: selection, a collective, and what is done with what comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ._cost import AffineCost
from ._step import finite
from ._timeline import Method, check_callable, take_arrays

__all__ = ["SortingCost", "dense_all_reduce", "sparse_all_gather"]

Cost = Callable[..., Any]

_NOTHING = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SortingCost:
    """What selection costs in the published model: `gamma_seconds * n * log2(n)` for n elements.

    `torch.topk` on GPUs was fitted by it. Faster selection takes a start-up and a time an element,
    and so is not dearer for groups that are merged.

    Attributes:
        gamma_seconds: 0 or more; 2.19e-10 on an Nvidia P102-100 by the authors of OMGS-SGD.

    Raises:
        ValueError: It is negative or not finite.

    Example:
        >>> SortingCost(gamma_seconds=0.5)(8)
        12.0
    """

    gamma_seconds: float | int
    takes_arrays: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not finite(self.gamma_seconds) >= 0:
            raise ValueError(
                f"gamma_seconds is {self.gamma_seconds!r}: a cost is a finite number, and 0 or more"
            )

    def __call__(self, elements: Any) -> Any:
        """Seconds for so many elements, or for those in an array."""
        # One element needs no sorting, and has the logarithm 0.
        found = self.gamma_seconds * elements * np.log2(np.maximum(elements, 1))
        return found if isinstance(elements, np.ndarray) else float(found)

    @classmethod
    def fit(cls, elements: Sequence[float | int], seconds: Sequence[float | int]) -> "SortingCost":
        """The one nearest to what was measured, in squares of relative errors.

        Args:
            elements: Of each measurement, 2 or more.
            seconds: That it took, above 0.

        Raises:
            ValueError: There is no measurement, the two differ in length, or a value is out of
                range.
        """
        sizes, times = np.asarray(elements, np.float64), np.asarray(seconds, np.float64)
        if sizes.shape != times.shape or not sizes.size:
            raise ValueError(
                f"{sizes.size} sizes and {times.size} times: give a time for each size, and one or "
                "more"
            )
        fits = np.isfinite(sizes) & (sizes >= 2) & np.isfinite(times) & (times > 0)
        if not fits.all():
            at = int(np.flatnonzero(~fits)[0])
            raise ValueError(
                f"{sizes[at]:g} elements in {times[at]:g} seconds: sort 2 or more, which takes time"
            )
        shape = sizes * np.log2(sizes) / times
        return cls(gamma_seconds=float(shape.sum() / (shape @ shape)))


def dense_all_reduce(
    all_reduce: Cost, *, name: str = "dense", element_bytes: int = 4, cast: Cost | None = None
) -> Method:
    """All elements of a group are added up over the ranks, as they are or narrowed on the wire.

    Args:
        all_reduce: Seconds by bytes on the wire, such as `AffineCost.ring_all_reduce` gives.
        name: Of the method.
        element_bytes: Of an element on the wire: 4, or 2 for fp16 and bf16.
        cast: Seconds, by elements, to narrow them before, on the thread of backward, and as much
            again to widen them after, while nothing else travels; None: nothing is cast.

    Raises:
        ValueError: The name is empty, an element has no bytes, or a cost cannot be called.

    Example:
        >>> from gossipgrad.planning import AffineCost
        >>> hop = AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=5e-5)
        >>> half = dense_all_reduce(hop.ring_all_reduce(16), name="fp16", element_bytes=2)
        >>> half.communicate_seconds(1_000_000)
        0.0315
    """
    if not finite(element_bytes) >= 1:
        raise ValueError(
            f"element_bytes is {element_bytes!r}: an element has 1 or more on the wire"
        )
    cast = _NOTHING if cast is None else cast
    check_callable(all_reduce, "all_reduce", "bytes")
    check_callable(cast, "cast", "elements")
    return Method(
        name=name,
        select_seconds=cast,
        communicate_seconds=_Reduced(all_reduce, element_bytes, cast),
    )


def sparse_all_gather(
    all_gather: Cost,
    *,
    density: float,
    world_size: int,
    select: Cost,
    name: str = "sparse",
    pair_bytes: float | int = 8,
    scatter: Cost | None = None,
) -> Method:
    """Of a group a share of the elements goes to all ranks, in one message of values and indices.

    What grows with the ranks is what each receives, and so the time to add it up.

    Args:
        all_gather: Seconds by the bytes that one rank brings, such as `AffineCost.ring_all_gather`
            gives.
        density: The share that is sent, above 0 and at most 1; of any group one element or more.
        world_size: How many ranks there are.
        select: Seconds by elements of the group: finding the largest, and packing them.
        name: Of the method.
        pair_bytes: Of a value with its index: 8 for float32 and int32.
        scatter: Seconds by the pairs that are added up on a rank, those of all ranks; None: that
            costs nothing, as in the published model.

    Raises:
        ValueError: The name is empty, the density no share, there is no rank, or a cost cannot be
            called.

    Example:
        >>> from gossipgrad.planning import AffineCost
        >>> hop = AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=5e-5)
        >>> method = sparse_all_gather(
        ...     hop.ring_all_gather(16), density=0.001, world_size=16,
        ...     select=lambda elements: 2e-4 + 1.5e-9 * elements,
        ... )
        >>> round(method.select_seconds(1_000_000), 9)
        0.0017
        >>> round(method.communicate_seconds(1_000_000), 9)
        0.00171
    """
    if not 0 < finite(density) <= 1:
        raise ValueError(f"density is {density!r}: the share that is sent is above 0 and at most 1")
    if not finite(world_size) >= 1:
        raise ValueError(f"world size {world_size!r} has no ranks: it must be 1 or more")
    if not finite(pair_bytes) > 0:
        raise ValueError(f"pair_bytes is {pair_bytes!r}: a value and its index take some")
    scatter = _NOTHING if scatter is None else scatter
    check_callable(all_gather, "all_gather", "bytes")
    check_callable(scatter, "scatter", "pairs")
    return Method(
        name=name,
        select_seconds=select,
        communicate_seconds=_Gathered(all_gather, density, world_size, pair_bytes, scatter),
    )


@dataclass(frozen=True, slots=True)
class _Reduced:
    all_reduce: Cost
    element_bytes: int
    cast: Cost

    @property
    def takes_arrays(self) -> bool:
        return take_arrays(self.all_reduce, self.cast)

    def __call__(self, elements: Any) -> Any:
        return self.all_reduce(self.element_bytes * elements) + self.cast(elements)


@dataclass(frozen=True, slots=True)
class _Gathered:
    all_gather: Cost
    density: float
    world_size: int
    pair_bytes: float | int
    scatter: Cost

    @property
    def takes_arrays(self) -> bool:
        return take_arrays(self.all_gather, self.scatter)

    def __call__(self, elements: Any) -> Any:
        if isinstance(elements, np.ndarray):
            pairs = np.maximum(np.floor(self.density * elements), 1.0)
        else:
            pairs = max(1, int(self.density * elements))
        return self.all_gather(self.pair_bytes * pairs) + self.scatter(self.world_size * pairs)
