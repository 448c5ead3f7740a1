"""A plan: which gradients travel together, and by which method."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._step import checked_step, finite
from ._timeline import Merge, Method, Span, moments

__all__ = ["LEAST_SAVING", "Plan", "planned"]

LEAST_SAVING = 0.05
"""Share of a step that compression has to save, as what is left for later costs accuracy."""

_FORMAT = "gossipgrad plan"
_VERSION = 1
_KEYS = frozenset({"format", "version", "groups", "finish_seconds", "lower_bound_seconds"})
_OPTIONAL = frozenset({"names"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Groups of tensors, each with its method, and how long they were predicted to take.

    Attributes:
        groups: In the order of backward: the first begins at tensor 0, each other where the one
            before ends.
        finish_seconds: From the start of backward until the last group has arrived.
        lower_bound_seconds: No plan of the methods that were given finishes earlier: proved. That
            of `plan` is close to `finish_seconds`; the rules prove no more than that backward
            comes to its end.
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
        if not self.groups:
            raise ValueError("a plan without groups sends nothing: give one or more")
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
        for what in ("finish_seconds", "lower_bound_seconds"):
            value = getattr(self, what)
            if type(value) is bool or not (isinstance(value, float | int) and finite(value) >= 0):
                raise ValueError(f"{what} is {value!r}: it is a time, finite and 0 or more")
        if self.lower_bound_seconds > self.finish_seconds:
            raise ValueError(
                f"lower_bound_seconds {self.lower_bound_seconds} is above finish_seconds "
                f"{self.finish_seconds}, which it bounds"
            )
        if self.names:
            self._check_names(reached)

    def _check_names(self, tensors: int) -> None:
        if not isinstance(self.names, tuple):
            raise ValueError(f"names is {self.names!r}: give a tuple, a name for each tensor")
        if len(self.names) != tensors:
            raise ValueError(
                f"a plan for {tensors} tensors has {len(self.names)} names: give each tensor its "
                "own, or none any"
            )
        known = set()
        for place, name in enumerate(self.names):
            if not isinstance(name, str):
                raise ValueError(f"the name of tensor {place} is {name!r}: names are strings")
            if name in known:
                raise ValueError(f"two tensors are named {name!r}: give each its own name")
            known.add(name)

    @property
    def gap(self) -> float:
        """How far it may be from the optimum, relative to the bound; 0 is proved optimal."""
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
        """What happens when, under these times, which may be others than it was made for.

        Backward of a group, its selection, backward of the next, and so on; meanwhile each group
        travels once it is selected and the one before has arrived. What takes no time is left out.

        Args:
            backward_seconds: Of each tensor, in the order in which backward finishes them.
            sizes: Their elements.
            methods: Those that the plan names, and others if you like.

        Returns:
            The spans, group by group; the last to end ends at `finish_seconds`, if all is as when
            the plan was made.

        Raises:
            ValueError: As `plan`; or the plan is for another number of tensors, or names a method
                that is not given.
        """
        backward_seconds, sizes = checked_step(backward_seconds, sizes)
        if (tensors := self.groups[-1].stop) != len(sizes):
            raise ValueError(f"a plan for {tensors} tensors was given {len(sizes)}: make one anew")
        found = []
        for place, at in enumerate(moments(self.groups, backward_seconds, sizes, methods)):
            found += [
                Span(what="backward", group=place, start_seconds=at.begun, end_seconds=at.computed),
                Span(what="select", group=place, start_seconds=at.computed, end_seconds=at.ready),
                Span(
                    what="communicate", group=place, start_seconds=at.sent, end_seconds=at.arrived
                ),
            ]
        return tuple(span for span in found if span.end_seconds > span.start_seconds)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads; plain values, the same for equal plans on all ranks."""
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
        """The plan that `to_json` gave.

        Raises:
            ValueError: It is no plan, or one of another version.
        """
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ValueError(f'not a plan: it has no "format": "{_FORMAT}"')
        if value.get("version") != _VERSION:
            raise ValueError(
                f"a plan of version {value.get('version')!r}, this reads version {_VERSION}: make "
                "it anew"
            )
        if not _KEYS <= value.keys() <= _KEYS | _OPTIONAL:
            missing = sorted(_KEYS - value.keys())
            unknown = sorted(map(str, value.keys() - _KEYS - _OPTIONAL))
            raise ValueError(f"a plan with keys missing {missing} and unknown {unknown}")
        rows = value["groups"]
        if not isinstance(rows, list) or not all(
            isinstance(row, list | tuple) and [type(part) for part in row] == [int, int, str]
            for row in rows
        ):
            raise ValueError(
                "groups must be a list of [start, stop, method], two whole numbers and a name"
            )
        names = value.get("names", [])
        if not isinstance(names, list | tuple):
            raise ValueError(f"names is {names!r}: it is a list, a name for each tensor")
        return cls(
            groups=tuple(Merge(*row) for row in rows),
            finish_seconds=value["finish_seconds"],
            lower_bound_seconds=value["lower_bound_seconds"],
            names=tuple(names),
        )


def planned(
    groups: Sequence[Merge],
    backward_seconds: Sequence[float | int],
    sizes: Sequence[int],
    methods: Sequence[Method],
    lower_bound_seconds: float | None = None,
) -> Plan:
    """The plan of these groups; without a bound, with the one that backward must end."""
    *_, last = moments(groups, backward_seconds, sizes, methods)
    bound = sum(backward_seconds) if lower_bound_seconds is None else lower_bound_seconds
    return Plan(
        groups=tuple(groups),
        finish_seconds=last.arrived,
        lower_bound_seconds=min(bound, last.arrived),
    )
