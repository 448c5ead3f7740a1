"""Plans that a session knows by name: by which rule, and whether that needs times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gossipgrad.planning import (
    Group,
    Method,
    Plan,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    threshold,
    wfbp,
)

__all__ = ["RULES", "alternatives", "merges_without_times", "planned"]


@dataclass(frozen=True, slots=True)
class _Rule:
    make: Callable[..., Plan]
    """Of the times of backward, the sizes and a method; `plan` of all methods."""
    measured: bool


RULES = {
    "optimal": _Rule(plan, measured=True),
    "greedy": _Rule(omgs_greedy, measured=True),
    "mg-wfbp": _Rule(mg_wfbp, measured=True),
    "layerwise": _Rule(wfbp, measured=False),
    "wfbp": _Rule(wfbp, measured=False),
    "single": _Rule(single, measured=False),
}
_COMPARED = ("layerwise", "single", "mg-wfbp", "greedy")


def planned(
    rule: str, backward: Sequence[float], sizes: Sequence[int], methods: Sequence[Method]
) -> Plan:
    """The plan by that name: `"optimal"` of all methods, others of the first."""
    return RULES[rule].make(backward, sizes, methods if rule == "optimal" else methods[0])


def merges_without_times(
    rule: str | int, sizes_bytes: Sequence[int], method: str
) -> tuple[Group, ...]:
    """The groups by a rule or a threshold in bytes; one where the rule needs times."""
    if isinstance(rule, int):
        make = partial(threshold, size_bytes=rule, element_bytes=1)
    else:
        make = single if RULES[rule].measured else RULES[rule].make
    free = Method(method, lambda size: 0.0, lambda size: 0.0)
    return make([0.0] * len(sizes_bytes), sizes_bytes, free).groups


def alternatives(
    backward: Sequence[float], sizes: Sequence[int], methods: Sequence[Method]
) -> dict[str, float]:
    """Seconds of the rules, by name and method."""
    return {
        f"{name}, {method.name}": RULES[name].make(backward, sizes, method).finish_seconds
        for method in methods
        for name in _COMPARED
    }
