"""How the exchanges of each rank ended, and how many rounds late they were mixed in."""

from bisect import bisect_right
from collections import Counter
from itertools import accumulate

from ._format import is_number
from ._runs import Run

OUTCOMES = {
    "delivered": "Taken and mixed in, in its round",
    "late": "Not there when asked for; the step went on without it",
    "dead_peer": "The partner had died or left",
    "void": "Called off before anything was sent; counts on neither end",
}
# Staleness beyond this is one class.
_MAX_ROUNDS_LATE = 4


def outcome_counts(run: Run) -> dict[str, int]:
    """Exchanges of all ranks by outcome: of the summary, or of what else there is."""
    counted = _counts(run.summary.get("outcomes"))
    if counted or run.summary:
        return counted
    total: Counter[str] = Counter()
    for counts in outcomes_by_rank(run).values():
        total.update(counts)
    return dict(total)


def outcomes_by_rank(run: Run) -> dict[int, dict[str, int]]:
    """Exchanges by outcome as each rank's metrics last had them; of the trace where they do not."""
    found = {}
    for rank, records in run.steps.items():
        counted = (_counts(record.get("outcomes")) for record in reversed(records))
        if counts := next(filter(None, counted), None):
            found[rank] = counts
    if found:
        return found
    traced: dict[int, Counter[str]] = {}
    for span in run.trace.named("exchange"):
        # An exchange of a collective has no outcome: it comes about or the run fails.
        if isinstance(outcome := span.attributes.get("outcome"), str):
            traced.setdefault(span.rank, Counter())[outcome] += 1
    return {rank: dict(counts) for rank, counts in sorted(traced.items())}


def rounds_late(run: Run) -> dict[int, dict[str, int]]:
    """For each rank in the trace, how many exchanges were mixed how many rounds late.

    A round begins with its snapshot; what is mixed before the next snapshot is 0 rounds late.
    """
    snapshots: dict[int, list[tuple[float, int]]] = {}
    for span in run.trace.named("snapshot"):
        if type(round := span.attributes.get("round")) is int:
            snapshots.setdefault(span.rank, []).append((span.end_us, round))
    begun = {
        rank: (
            [end for end, _ in sorted(found)],
            list(accumulate((round for _, round in sorted(found)), max)),
        )
        for rank, found in snapshots.items()
    }
    found: dict[int, Counter[int]] = {}
    for span in run.trace.named("mix"):
        round = span.attributes.get("round")
        ends, rounds = begun.get(span.rank, ([], []))
        # A tenth of a microsecond: times in the trace are rounded.
        at = bisect_right(ends, span.start_us + 0.1)
        if type(round) is int and at:
            late = min(_MAX_ROUNDS_LATE, max(0, rounds[at - 1] - round))
            found.setdefault(span.rank, Counter())[late] += 1
    return {
        rank: {_class_name(late): counts[late] for late in sorted(counts)}
        for rank, counts in sorted(found.items())
    }


LATENESS = [
    *(str(late) for late in range(_MAX_ROUNDS_LATE)),
    f"{_MAX_ROUNDS_LATE} or more",
]


def _class_name(late: int) -> str:
    return LATENESS[late]


def _counts(counted: object) -> dict[str, int]:
    if not isinstance(counted, dict):
        return {}
    return {str(name): int(count) for name, count in counted.items() if is_number(count)}
