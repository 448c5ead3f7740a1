"""The model of time: backward and selection take turns, and groups travel one after another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ._step import finite

__all__ = [
    "Merge",
    "Method",
    "Moments",
    "Span",
    "by_name",
    "check_callable",
    "check_method",
    "cost",
    "moments",
    "take_arrays",
]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to bring a group of gradients to all ranks, as far as time is concerned.

    Both costs are called with the elements of a group, a whole number, and give seconds, 0 or more.
    They may be any functions of the size alone, with jumps or falling with it. `plan` asks for each
    size once, some 500,000 for 1,000 tensors. One with a true attribute `takes_arrays`, as
    `AffineCost` has, is asked for all at once, in an array of float64, and gives an array.

    Attributes:
        name: What plans call it.
        select_seconds: What the computing thread does for the group once its last gradient is
            there, before backward goes on: picking coordinates, packing, casting.
        communicate_seconds: From when the group is sent until its sum has arrived and is decoded;
            one group at a time.

    Raises:
        ValueError: The name is empty, or a cost cannot be called.
    """

    name: str
    select_seconds: Callable[..., Any]
    communicate_seconds: Callable[..., Any]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a method needs a name: plans tell by it how a group travels")
        for what in ("select_seconds", "communicate_seconds"):
            check_callable(
                getattr(self, what), f"{what} of method {self.name!r}", "the elements of a group"
            )


@dataclass(frozen=True, slots=True)
class Merge:
    """Tensors `start` to `stop - 1`, in the order of backward, that travel in one message.

    Attributes:
        start: The first of them.
        stop: The first that is not among them.
        method: The name of the method by which they travel.
    """

    start: int
    stop: int
    method: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that takes time in a step, in seconds from the start of backward.

    Attributes:
        what: `"backward"` or `"select"`, which take turns, or `"communicate"`, beside them.
        group: Of which group, as its place in the plan.
        start_seconds: When it begins.
        end_seconds: When it ends.
    """

    what: str
    group: int
    start_seconds: float
    end_seconds: float


class Moments(NamedTuple):
    """Of a group, in seconds from the start of backward."""

    begun: float
    """Its part of backward begins."""
    computed: float
    """Its last gradient is there."""
    ready: float
    """It is selected."""
    sent: float
    """The group before it has arrived, too."""
    arrived: float
    """Its sum is on all ranks."""


def moments(
    groups: Sequence[Merge],
    backward_seconds: Sequence[float | int],
    sizes: Sequence[int],
    methods: Sequence[Method],
) -> Iterator[Moments]:
    """What happens to each group when; the last one arrives last.

    Raises:
        ValueError: A cost is no time, or a group names a method that is not there.
    """
    known = by_name(methods)
    reached = [0.0, *accumulate(map(float, backward_seconds))]
    selected = arrived = 0.0
    for group in groups:
        if group.method not in known:
            raise ValueError(
                f"a group travels by {group.method!r}, but the methods are {', '.join(known)}: "
                "give those that the plan was made for"
            )
        method, elements = known[group.method], sum(sizes[group.start : group.stop])
        begun, computed = (reached[place] + selected for place in (group.start, group.stop))
        selected += cost(method, "select_seconds", elements)
        ready = reached[group.stop] + selected
        sent = max(arrived, ready)
        arrived = sent + cost(method, "communicate_seconds", elements)
        yield Moments(begun, computed, ready, sent, arrived)


def cost(method: Method, what: str, elements: int) -> float:
    """Seconds that a method asks for a group of so many elements, checked.

    Raises:
        ValueError: What the method gives is no time.
    """
    given = getattr(method, what)(elements)
    if not (seconds := finite(given)) >= 0:
        raise ValueError(
            f"{what} of method {method.name!r} gives {given!r} for {elements} elements: a cost is "
            "a number of seconds, finite and 0 or more"
        )
    return seconds


def check_callable(given: object, what: str, of: str) -> None:
    """Raises `ValueError` if it cannot be called.

    Args:
        given: A cost.
        what: What it is called.
        of: What it is called with.
    """
    if not callable(given):
        raise ValueError(f"{what} is {given!r}: give a function that takes {of} and gives seconds")


def check_method(method: object) -> None:
    """Raises `ValueError` if it is not one method, by which all groups of a rule travel."""
    if not isinstance(method, Method):
        raise ValueError(
            f"method is {method!r}: give one gossipgrad.planning.Method, or several to plan()"
        )


def take_arrays(*costs: Callable[..., Any]) -> bool:
    """Whether all of these say that they do."""
    return all(getattr(cost, "takes_arrays", False) for cost in costs)


def by_name(methods: Sequence[Method]) -> dict[str, Method]:
    """The methods by their names.

    Raises:
        ValueError: They are not a sequence of methods, there is none, or two have the same name.
    """
    if not isinstance(methods, Sequence):
        raise ValueError(f"methods is {methods!r}: give a list of them, [method] for one")
    for method in methods:
        if not isinstance(method, Method):
            raise ValueError(f"{method!r} is no method: give a gossipgrad.planning.Method for each")
    if not methods:
        raise ValueError("there is no method to send by: give one or more")
    known = {method.name: method for method in methods}
    if len(known) < len(methods):
        names = [method.name for method in methods]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two methods are called {twice!r}: plans tell them apart by name, give each its own"
        )
    return known
