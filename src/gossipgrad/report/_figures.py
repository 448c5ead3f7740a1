"""Figures of a run: of its summary or, where it lacks them, of its metrics or its trace."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from ._run import Record, Run
from ._text import UNKNOWN, formatted, is_number

OUTCOMES = {
    "delivered": "taken and mixed in, in its round",
    "late": "not there when asked for; the step continued without it",
    "dead_peer": "the partner had died or left",
    "void": "called off before anything was sent; counts on neither end",
}
LATENESS = ("in its round", "1 round late", "2 rounds late", "3 rounds late", "4 or more")


class Metric(NamedTuple):
    """What an evaluation measures, as the job names and formats it."""

    name: str
    specification: str

    @property
    def is_share(self) -> bool:
        """Whether it is written in percent."""
        return self.specification.endswith("%")

    @property
    def write(self) -> Callable[[object], str]:
        """Writes a value of it."""
        return formatted(self.specification)


def metric(run: Run) -> Metric:
    """The metric that the run recorded; "accuracy" where it recorded none."""
    for record in (run.summary, latest(run.epochs)):
        name, specification = record.get("metric_name"), record.get("metric_format")
        if isinstance(name, str) and name.strip() and isinstance(specification, str):
            return Metric(name[0].upper() + name[1:], specification)
    return Metric("Accuracy", ".2%")


def strategy(run: Run) -> str:
    """The name of the strategy."""
    name = run.summary.get("strategy") or run.config.get("strategy")
    return UNKNOWN if name is None else str(name)


def strategy_is(run: Run) -> Record:
    """The settings of the strategy, such as its topology."""
    recorded = run.config.get("strategy_is")
    return recorded if isinstance(recorded, dict) else {}


def accuracy(run: Run) -> object:
    """The metric of the final model, or the last one measured."""
    return run.summary.get("accuracy", latest(run.epochs).get("accuracy"))


def consensus_distance(run: Run) -> object:
    """The exact one at the end, or the last one measured."""
    return run.summary.get("consensus_distance", latest(run.epochs).get("consensus_distance"))


def last_loss(run: Run) -> float | None:
    """The training loss of the last epoch, the mean over the ranks."""
    return mean(last_of(run.epochs, rank).get("loss") for rank in run.epochs)


def steps_made(run: Run) -> object:
    """How many steps, of the rank that came furthest."""
    return run.summary.get("steps", latest(run.steps).get("step"))


def run_seconds(run: Run) -> float | None:
    """How long the run took, or how far its metrics reach."""
    recorded = _known(run, "seconds")
    seconds = (last_of(run.steps, rank).get("seconds") for rank in run.steps)
    return recorded or max((float(one) for one in seconds if is_number(one)), default=None)


def bytes_per_step(run: Run) -> float | None:
    """Bytes that each worker sends in a step, without the shuffle of samples."""
    return _per_step(run, "bytes_sent_per_step", "bytes_sent")


def shuffle_bytes_per_step(run: Run) -> float | None:
    """Bytes that each worker sends in a step for the ring shuffle of samples."""
    return _per_step(run, "shuffle_bytes_sent_per_step", "shuffle_bytes_sent")


def exposed_seconds(run: Run) -> float | None:
    """How long communication is waited for in a step."""
    return _per_step(run, "exposed_seconds_per_step", "exposed_seconds")


def step_seconds(run: Run) -> float | None:
    """How long a step takes: of all steps, as those that were logged may be slower or faster."""
    return _per_step(run, "step_seconds", "train_seconds")


def exposed_share(run: Run) -> float | None:
    """Of the time in steps, what communication held up."""
    return ratio(exposed_seconds(run), step_seconds(run))


def throughput(run: Run) -> float | None:
    """Samples a second of all workers together."""
    rates = (samples_per_second(run, rank) for rank in run.steps)
    return _known(run, "samples_per_second") or sum(filter(None, rates)) or None


def samples_per_second(run: Run, rank: int) -> float | None:
    """A rank's own rate: all its samples by all its time in steps, without the evaluations."""
    last = last_of(run.steps, rank)
    return ratio(last.get("samples"), last.get("train_seconds"))


def lost_ranks(run: Run) -> list[int]:
    """The ranks that died or left before the end, by the summary."""
    recorded = run.summary.get("lost_ranks")
    ranks = recorded if isinstance(recorded, list) else []
    return sorted(rank for rank in ranks if isinstance(rank, int))


def joined_ranks(run: Run) -> list[Record]:
    """The records of the ranks that joined during the run, by the summary."""
    recorded = run.summary.get("joined")
    return [one for one in recorded if isinstance(one, dict)] if isinstance(recorded, list) else []


def of_rank(run: Run, name: str, rank: int) -> object:
    """A rank's entry of a list over all ranks in the summary."""
    values = run.summary.get(name)
    return values[rank] if isinstance(values, list) and rank < len(values) else None


def latest(records_of_rank: dict[int, list[Record]]) -> Record:
    """The last record of the rank that came furthest."""
    last = [records[-1] for records in records_of_rank.values() if records]
    return max(last, key=lambda one: one["step"] if is_number(one.get("step")) else 0, default={})


def last_of(records_of_rank: dict[int, list[Record]], rank: int) -> Record:
    """The last record of a rank, empty when it has none."""
    return next(reversed(records_of_rank.get(rank, [])), {})


def ratio(part: object, whole: object) -> float | None:
    """One number by another, None where that is no number."""
    return part / whole if is_number(part) and is_number(whole) and whole > 0 else None


def mean(values: Iterable[object]) -> float | None:
    """The mean of the values that are numbers, None when none is."""
    known = [value for value in values if is_number(value)]
    return fmean(known) if known else None


def _known(run: Run, name: str) -> float | None:
    recorded = run.summary.get(name)
    return float(recorded) if is_number(recorded) else None


def _per_step(run: Run, in_summary: str, in_metrics: str) -> float | None:
    recorded = _known(run, in_summary)
    if recorded is not None:
        return recorded
    last = [last_of(run.steps, rank) for rank in run.steps]
    return mean(ratio(one.get(in_metrics), one.get("step")) for one in last)


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
    """Exchanges by outcome as each rank's metrics last had them."""
    found = {rank: _counts(last_of(run.steps, rank).get("outcomes")) for rank in run.steps}
    return {rank: counts for rank, counts in found.items() if counts}


def rounds_late(run: Run) -> dict[int, Counter[str]]:
    """For each rank in the trace, how many exchanges were mixed how many rounds late."""
    # What is mixed before the next snapshot is 0 rounds late.
    snapshots: dict[int, list[tuple[float, int]]] = {}
    for span in run.spans_named("snapshot"):
        if type(round := span.attributes.get("round")) is int:
            snapshots.setdefault(span.rank, []).append((span.end_us, round))
    begun = {
        rank: (
            [end for end, _ in sorted(found)],
            list(accumulate((round for _, round in sorted(found)), max)),
        )
        for rank, found in snapshots.items()
    }
    late: dict[int, Counter[str]] = {}
    for span in run.spans_named("mix"):
        round = span.attributes.get("round")
        ends, rounds = begun.get(span.rank, ([], []))
        # A tenth of a microsecond: times in the trace are rounded.
        index = bisect_right(ends, span.start_us + 0.1)
        if type(round) is int and index:
            by = min(len(LATENESS) - 1, max(0, rounds[index - 1] - round))
            late.setdefault(span.rank, Counter())[LATENESS[by]] += 1
    return dict(sorted(late.items()))


def _counts(counted: object) -> dict[str, int]:
    if not isinstance(counted, dict):
        return {}
    return {str(name): int(count) for name, count in counted.items() if is_number(count)}
