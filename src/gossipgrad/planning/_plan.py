"""A plan of groups of gradients with their methods, and its timeline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ._method import Method, checked_step, cost

__all__ = ["LEAST_SAVING", "Merge", "Plan", "Span", "planned"]

LEAST_SAVING = 0.05
"""Share of a step that compression has to save, since delayed elements cost accuracy."""

_FORMAT = "gossipgrad plan"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Merge:
    """Tensors `start` to `stop - 1`, in the order of backward, that are sent in one message.

    Attributes:
        start: The first tensor.
        stop: The first tensor after the group.
        method: The name of the method.
    """

    start: int
    stop: int
    method: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An interval of a step, in seconds from the start of backward.

    Attributes:
        what: `"backward"` or `"select"`, which take turns, or `"communicate"`, beside them.
        group: Index of its group in the plan.
        start_seconds: When it begins.
        end_seconds: When it ends.
    """

    what: str
    group: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Groups of tensors with their methods and predicted times.

    Attributes:
        groups: Groups in the order of backward: the first begins at tensor 0, each other where the
            one before ends.
        finish_seconds: From the start of backward until the last group has arrived.
        lower_bound_seconds: Proved: no plan of these methods finishes earlier. That
            of `plan` is close to `finish_seconds`; the rules prove no more than that backward
            ends.
        names: Of the tensors, in the order in which groups count them. A session finds its tensors
            by them; without names, the plan counts tensors in the session's own order, the reverse
            of the model's.

    Raises:
        ValueError: The groups are not so; a time is negative or not finite; the bound is above
            what it bounds; there are names, and not one of its own for each tensor.

    Example:
        >>> plan = Plan(
        ...     groups=(Merge(0, 2, "dense"), Merge(2, 3, "sparse")),
        ...     finish_seconds=1.5, lower_bound_seconds=1.0,
        ... )
        >>> plan.gap
        0.5
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    groups: tuple[Merge, ...]
    finish_seconds: float | int
    lower_bound_seconds: float | int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        reached = 0
        for group in self.groups:
            if group.start != reached or group.stop <= group.start:
                raise ValueError(
                    f"a group of tensors {group.start!r} to {group.stop!r} where one must begin at "
                    f"{reached} and end past it: each begins where the one before ends"
                )
            if not group.method:
                raise ValueError(f"the group from tensor {reached} on names no method")
            reached = group.stop
        if not reached:
            raise ValueError("a plan without groups sends nothing: give one or more")
        if not 0 <= self.lower_bound_seconds <= self.finish_seconds < math.inf:
            raise ValueError(
                f"finish_seconds is {self.finish_seconds!r} and lower_bound_seconds "
                f"{self.lower_bound_seconds!r}: they are times, finite and 0 or more, the bound no "
                "larger than what it bounds"
            )
        if self.names and not len(self.names) == len(set(self.names)) == reached:
            raise ValueError(
                f"a plan for {reached} tensors has {len(self.names)} names, {len(set(self.names))} "
                "of them different: give each tensor its own, or none any"
            )

    @property
    def gap(self) -> float:
        """The largest distance to the optimum, relative to the bound; 0 is proved optimal."""
        if self.finish_seconds == self.lower_bound_seconds:
            return 0.0
        if self.lower_bound_seconds == 0:
            return math.inf
        return self.finish_seconds / self.lower_bound_seconds - 1

    def timeline(
        self,
        backward_seconds: Sequence[float | int],
        sizes: Sequence[int],
        methods: Sequence[Method],
    ) -> tuple[Span, ...]:
        """Return the timeline under these times, which may differ from those it was made for.

        Backward of a group, its selection, backward of the next, and so on; meanwhile each group
        travels once it is selected and the one before has arrived. What takes no time is left out.

        Args:
            backward_seconds: Time of each tensor, in the order in which backward finishes them.
            sizes: Their numbers of elements.
            methods: The methods that the plan names; others are ignored.

        Returns:
            The spans, group by group; the last to end ends at `finish_seconds`, if all is as when
            the plan was made.

        Raises:
            ValueError: As `plan`; or the plan is for another number of tensors, or names a method
                that is missing.
        """
        times, counts, known = checked_step(backward_seconds, sizes, methods)
        if (tensors := self.groups[-1].stop) != len(counts):
            raise ValueError(
                f"a plan for {tensors} tensors, but there are {len(counts)}: make a new one"
            )
        unknown = {group.method for group in self.groups} - known.keys()
        if unknown:
            raise ValueError(
                f"a group travels by {min(unknown)!r}, but the methods are {', '.join(known)}: "
                "give those that the plan was made for"
            )
        spans = _spans(self.groups, times, counts, known)
        return tuple(span for span in spans if span.end_seconds > span.start_seconds)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`, the same for equal plans on all ranks."""
        named = {"names": list(self.names)} if self.names else {}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "groups": [[group.start, group.stop, group.method] for group in self.groups],
            "finish_seconds": self.finish_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            **named,
        }

    @classmethod
    def from_json(cls, value: object) -> "Plan":
        """Create the plan from the result of `to_json`.

        Raises:
            ValueError: It is not a plan, or has another version.
        """
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ValueError(f'not a plan: it has no "format": "{_FORMAT}"')
        if value.get("version") != _VERSION:
            raise ValueError(
                f"a plan of version {value.get('version')!r}, this reads version {_VERSION}: make "
                "a new one"
            )
        rest = {key: of for key, of in value.items() if key not in ("format", "version", "groups")}
        rest["names"] = tuple(rest.get("names", ()))
        try:
            return cls(groups=tuple(Merge(*row) for row in value["groups"]), **rest)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a plan with keys {sorted(map(str, value))} that cannot be read ({error!r}): it "
                "has groups, a list of [start, stop, method], and its times"
            ) from error


def planned(
    groups: Sequence[Merge],
    times: list[float],
    counts: list[int],
    known: dict[str, Method],
    lower_bound_seconds: float | None = None,
) -> Plan:
    """Return the plan of these groups; by default the bound is the end of backward."""
    finish = _spans(groups, times, counts, known)[-1].end_seconds
    bound = sum(times) if lower_bound_seconds is None else lower_bound_seconds
    return Plan(groups=tuple(groups), finish_seconds=finish, lower_bound_seconds=min(bound, finish))


def _spans(
    groups: Sequence[Merge], times: list[float], counts: list[int], known: dict[str, Method]
) -> list[Span]:
    """Yield backward, selection and communication of each group."""
    reached = [0.0, *accumulate(times)]
    spans = []
    selected = arrived = 0.0
    for index, group in enumerate(groups):
        method, elements = known[group.method], sum(counts[group.start : group.stop])
        begun, computed = reached[group.start] + selected, reached[group.stop] + selected
        selected += cost(method, "select_seconds", elements)
        ready = reached[group.stop] + selected
        sent = max(arrived, ready)
        arrived = sent + cost(method, "communicate_seconds", elements)
        for what, start, end in (
            ("backward", begun, computed),
            ("select", computed, ready),
            ("communicate", sent, arrived),
        ):
            spans.append(Span(what=what, group=index, start_seconds=start, end_seconds=end))
    return spans
