"""Which plan a session follows."""

from collections.abc import Sequence

from gossipgrad.planning import Group as Merge
from gossipgrad.planning import Plan
from gossipgrad.sparsification._settings import Settings, check_plan_fits

__all__ = ["Planner", "merged_by"]


class Planner:
    """The plan of a session, agreed on by all ranks."""

    def __init__(self, settings: Settings, sizes_bytes: Sequence[int]) -> None:
        self.plan: Plan | None = settings.plan if isinstance(settings.plan, Plan) else None
        self._settings = settings
        self.merges = merged_by(settings, sizes_bytes)

    def before_round(self, aggregation: object) -> None: ...
    def after_round(self, aggregation: object) -> None: ...


def merged_by(settings: Settings, sizes_bytes: Sequence[int]) -> tuple[Merge, ...]:
    """The groups that a session begins with: those asked for, or until there is a measured plan."""
    rule, method = settings.plan, settings.methods[0]
    count = len(sizes_bytes)
    if isinstance(rule, Plan):
        check_plan_fits(rule, count, settings.methods)
        return tuple(rule.groups)
    if isinstance(rule, int):
        return _filled(sizes_bytes, rule, method)
    if rule in ("layerwise", "wfbp"):
        return tuple(Merge(i, i + 1, method) for i in range(count))
    return (Merge(0, count, method),)


def _filled(sizes_bytes: Sequence[int], threshold_bytes: int, method: str) -> tuple[Merge, ...]:
    """Groups that end with the tensor that makes them as large as the threshold."""
    merges: list[Merge] = []
    start = held_bytes = 0
    for place, size_bytes in enumerate(sizes_bytes):
        held_bytes += size_bytes
        if held_bytes >= threshold_bytes or place == len(sizes_bytes) - 1:
            merges.append(Merge(start, place + 1, method))
            start, held_bytes = place + 1, 0
    return tuple(merges)
