"""Methods of sending a group of gradients, with costs of selection and communication."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ._cost import AffineCost

__all__ = ["Method", "checked_step", "cost", "costs", "dense_all_reduce", "sparse_all_gather"]

Cost = Callable[..., Any]

_NOTHING = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of sending a group of gradients to all ranks, by its costs.

    Both costs are called with the elements of a group, or of many in an array of float64, and give
    seconds, 0 or more: one for each, or a single one for all. They may be any functions of the size
    alone, with jumps or falling with it. `numpy.vectorize` makes such a function of one that takes
    a single size.

    Attributes:
        name: Its name in plans.
        select_seconds: Time on the computing thread after the group's last gradient, before
            backward continues: selecting coordinates, packing, casting.
        communicate_seconds: Time from sending the group until its sum is decoded; one group at a
            time.

    Raises:
        ValueError: The name is empty, or a cost cannot be called.
    """

    name: str
    select_seconds: Cost
    communicate_seconds: Cost

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a method needs a name: plans name it for each group")
        for what in ("select_seconds", "communicate_seconds"):
            _check_callable(getattr(self, what), f"{what} of method {self.name!r}")


def dense_all_reduce(
    all_reduce: Cost, *, name: str = "dense", element_bytes: int = 4, cast: Cost | None = None
) -> Method:
    """Return the method that sums all elements over the ranks, unchanged or narrowed on the wire.

    Args:
        all_reduce: Seconds by bytes on the wire, such as `AffineCost.ring_all_reduce` gives.
        name: Name of the method.
        element_bytes: Bytes per element on the wire: 4, or 2 for fp16 and bf16.
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
    if element_bytes < 1:
        raise ValueError(
            f"element_bytes is {element_bytes!r}: an element has 1 or more on the wire"
        )
    narrow = _NOTHING if cast is None else cast
    _check_callable(all_reduce, "all_reduce")
    _check_callable(narrow, "cast")

    def communicate(elements: Any) -> Any:
        return all_reduce(element_bytes * elements) + narrow(elements)

    return Method(name=name, select_seconds=narrow, communicate_seconds=communicate)


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
    """Return the method that sends a share of a group's elements, as values and indices.

    The received bytes and the time to sum them grow with the number of ranks.

    Args:
        all_gather: Seconds by the bytes of one rank, such as `AffineCost.ring_all_gather` gives.
        density: The share that is sent, above 0 and at most 1; of any group one element or more.
        world_size: Number of ranks.
        select: Seconds by elements of the group: finding the largest, and packing them.
        name: Name of the method.
        pair_bytes: Bytes of a value with its index: 8 for float32 and int32.
        scatter: Seconds by the number of pairs of all ranks that a rank sums; None: no cost, as in
            the published model.

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
        >>> round(float(method.communicate_seconds(1_000_000)), 9)
        0.00171
    """
    if not 0 < density <= 1:
        raise ValueError(f"density is {density!r}: the share that is sent is above 0 and at most 1")
    if world_size < 1:
        raise ValueError(f"world size {world_size!r} has no ranks: it must be 1 or more")
    if not pair_bytes > 0:
        raise ValueError(f"pair_bytes is {pair_bytes!r}: a value and its index take some")
    add = _NOTHING if scatter is None else scatter
    _check_callable(all_gather, "all_gather")
    _check_callable(add, "scatter")

    def communicate(elements: Any) -> Any:
        pairs = np.maximum(np.floor(density * elements), 1.0)
        return all_gather(pair_bytes * pairs) + add(world_size * pairs)

    return Method(name=name, select_seconds=select, communicate_seconds=communicate)


def cost(method: Method, what: str, elements: int) -> float:
    """Return the checked seconds of a method for one group of this many elements."""
    seconds = float(getattr(method, what)(elements))
    if not 0 <= seconds < math.inf:
        raise _no_time(method, what, seconds, elements)
    return seconds


def costs(method: Method, what: str, sizes: Int[np.ndarray, " size"]) -> Float[np.ndarray, " size"]:
    """Seconds that a method asks for groups of these sizes, checked."""
    # As floats: products of whole numbers would overflow in an array.
    try:
        value = np.asarray(getattr(method, what)(sizes.astype(np.float64)), np.float64)
        found = np.broadcast_to(value, sizes.shape)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{what} of method {method.name!r} does not give seconds for an array of elements "
            f"({error}): numpy.vectorize makes such a function of one that takes a single size"
        ) from error
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if wrong.size:
        raise _no_time(method, what, float(found[wrong[0]]), int(sizes[wrong[0]]))
    return found


def _no_time(method: Method, what: str, seconds: float, elements: int) -> ValueError:
    return ValueError(
        f"{what} of method {method.name!r} gives {seconds} for {elements} elements: a cost is a "
        "number of seconds, finite and 0 or more"
    )


def checked_step(
    backward_seconds: Sequence[float | int], sizes: Sequence[int], methods: Sequence[Method]
) -> tuple[list[float], list[int], dict[str, Method]]:
    """Times and elements of some tensors as Python's numbers, and methods by their names."""
    if len(backward_seconds) != len(sizes) or not len(sizes):
        raise ValueError(
            f"{len(backward_seconds)} times and {len(sizes)} sizes: give one of each a tensor, in "
            "the order of backward, for one tensor or more"
        )
    for tensor, (seconds, elements) in enumerate(zip(backward_seconds, sizes, strict=True)):
        if not 0 <= seconds < math.inf:
            raise ValueError(
                f"backward of tensor {tensor} takes {seconds!r} seconds: give a time, finite and 0 "
                "or more"
            )
        if not 1 <= elements < math.inf or elements % 1:
            raise ValueError(
                f"tensor {tensor} has {elements!r} elements: give a whole number, 1 or more, and "
                "leave out tensors without any"
            )
    if not isinstance(methods, Sequence) or not all(isinstance(m, Method) for m in methods):
        raise ValueError(
            f"a group travels by a gossipgrad.planning.Method, got {methods!r}: a rule takes one, "
            "plan() and timeline() take a list of them"
        )
    known = {method.name: method for method in methods}
    if not known or len(known) < len(methods):
        names = [method.name for method in methods]
        raise ValueError(f"methods are called {names}: give one or more, each with its own name")
    return [float(t) for t in backward_seconds], [int(n) for n in sizes], known


def _check_callable(value: object, what: str) -> None:
    if not callable(value):
        raise ValueError(f"{what} is {value!r}: give a function from sizes to seconds")
