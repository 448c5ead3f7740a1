"""Figures of a run: of its summary or, where it lacks them, of its metrics or its trace."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise
from statistics import fmean

from ._format import UNKNOWN, is_number
from ._runs import Record, Run, find_key

OUTCOMES = {
    "delivered": "Taken and mixed in, in its round",
    "late": "Not there when asked for; the step went on without it",
    "dead_peer": "The partner had died or left",
    "void": "Called off before anything was sent; counts on neither end",
}
# Staleness beyond this is one class.
_MAX_ROUNDS_LATE = 4
LATENESS = [*map(str, range(_MAX_ROUNDS_LATE)), f"{_MAX_ROUNDS_LATE} or more"]


def strategy(run: Run) -> str:
    """The name of the strategy."""
    name = run.summary.get("strategy") or find_key(run.config, "strategy")
    return UNKNOWN if name is None else str(name)


def strategy_is(run: Run) -> Record:
    """The settings of the strategy, such as its topology."""
    recorded = run.config.get("strategy_is")
    return recorded if isinstance(recorded, dict) else {}


def accuracy(run: Run) -> object:
    """Of the final model, or the last one measured."""
    return run.summary.get("accuracy", latest(run.epochs).get("accuracy"))


def consensus_distance(run: Run) -> object:
    """The exact one at the end, or the last one measured."""
    return run.summary.get("consensus_distance", latest(run.epochs).get("consensus_distance"))


def last_loss(run: Run) -> float | None:
    """The training loss of the last epoch, the mean over the ranks."""
    return _mean(records[-1].get("loss") for records in run.epochs.values() if records)


def steps_made(run: Run) -> object:
    """How many steps, of the rank that came furthest."""
    return run.summary.get("steps", latest(run.steps).get("step"))


def run_seconds(run: Run) -> float | None:
    """How long the run took, or how far its metrics reach."""
    recorded = run.summary.get("seconds")
    known = [last.get("seconds") for last in _last_records(run)]
    if is_number(recorded):
        return float(recorded)
    return max((float(seconds) for seconds in known if is_number(seconds)), default=None)


def bytes_per_step(run: Run) -> float | None:
    """Bytes that each worker sends in a step, without the shuffle of samples."""
    return _per_step(run, "bytes_sent_per_step", "bytes_sent")


def shuffle_bytes_per_step(run: Run) -> float | None:
    """Bytes that each worker sends in a step for the ring shuffle of samples."""
    return _per_step(run, "shuffle_bytes_sent_per_step", "shuffle_bytes_sent")


def _per_step(run: Run, in_summary: str, in_metrics: str) -> float | None:
    recorded = _number(run.summary.get(in_summary))
    if recorded is not None:
        return recorded
    return _mean(ratio(last.get(in_metrics), last.get("step")) for last in _last_records(run))


def throughput(run: Run) -> float | None:
    """Samples a second of all workers together."""
    recorded = _number(run.summary.get("samples_per_second"))
    if recorded is not None:
        return recorded
    rates = [samples_per_second(run, rank) for rank in run.ranks]
    return sum(rate for rate in rates if rate is not None) or None


def exposed_and_step_seconds(run: Run) -> tuple[float | None, float | None]:
    """How long communication is waited for in a step, and how long a step takes."""
    step = run.summary.get("step_seconds")
    if not is_number(step):
        # Not the mean of the steps that were logged: those between them may be slower or faster.
        step = _mean(
            ratio(train_seconds(run, rank), last_of(run.steps, rank).get("step"))
            for rank in run.steps
        )
    exposed = run.summary.get("exposed_seconds_per_step")
    if not is_number(exposed):
        exposed = _mean(
            ratio(record.get("exposed_seconds"), record.get("step"))
            for record in _last_records(run)
        )
    return exposed, step


def samples_per_second(run: Run, rank: int) -> float | None:
    """A rank's own rate: all its samples by all its time in steps, without the evaluations."""
    last = last_of(run.steps, rank)
    return (
        ratio(last.get("samples"), last.get("train_seconds"))
        or _rate_of_epochs(run, rank)
        or ratio(last.get("samples"), last.get("seconds"))
    )


def train_seconds(run: Run, rank: int) -> float | None:
    """How long a rank was in steps, up to its last step record."""
    last = last_of(run.steps, rank)
    recorded = _number(last.get("train_seconds"))
    if recorded is not None:
        return recorded
    return ratio(last.get("samples"), _rate_of_epochs(run, rank))


def lost_ranks(run: Run) -> list[int]:
    """The ranks that died or left before the end, by the summary."""
    recorded = run.summary.get("lost_ranks")
    ranks = recorded if isinstance(recorded, list) else []
    return sorted(rank for rank in ranks if isinstance(rank, int))


def joined_ranks(run: Run) -> list[Record]:
    """The records of the ranks that joined during the run, by the summary."""
    recorded = run.summary.get("joined")
    return [one for one in recorded if isinstance(one, dict)] if isinstance(recorded, list) else []


def latest(records_of_rank: dict[int, list[Record]]) -> Record:
    """The last record of the rank that came furthest."""
    last = [records[-1] for records in records_of_rank.values() if records]
    return max(last, key=_step_of, default={})


def last_of(records_of_rank: dict[int, list[Record]], rank: int) -> Record:
    """The last record of a rank, empty when it has none."""
    return next(reversed(records_of_rank.get(rank, [])), {})


def of_rank(values: object, rank: int, world_size: int) -> object:
    """A rank's entry of a list over all ranks or of an object keyed by rank."""
    if isinstance(values, list) and world_size <= len(values) > rank:
        return values[rank]
    return values.get(str(rank)) if isinstance(values, dict) else None


def ratio(part: object, whole: object) -> float | None:
    """One number by another, None where that is no number."""
    return part / whole if is_number(part) and is_number(whole) and whole > 0 else None


def _rate_of_epochs(run: Run, rank: int) -> float | None:
    """The rates of a rank's epochs, each for as long as its epoch took."""
    steps = seconds_by_samples = 0.0
    for before, record in pairwise([{}, *run.epochs.get(rank, [])]):
        made, rate = _step_of(record) - _step_of(before), record.get("samples_per_second")
        if made > 0 and is_number(rate) and rate > 0:
            steps += made
            seconds_by_samples += made / rate
    return ratio(steps, seconds_by_samples)


def _last_records(run: Run) -> list[Record]:
    return [records[-1] for records in run.steps.values() if records]


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _step_of(record: Record) -> float:
    return _number(record.get("step")) or 0.0


def _mean(values: Iterable[object]) -> float | None:
    """The mean of the values that are numbers, None when none is."""
    known = [value for value in values if is_number(value)]
    return fmean(known) if known else None


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
        rank: {LATENESS[late]: counts[late] for late in sorted(counts)}
        for rank, counts in sorted(found.items())
    }


def _counts(counted: object) -> dict[str, int]:
    if not isinstance(counted, dict):
        return {}
    return {str(name): int(count) for name, count in counted.items() if is_number(count)}
