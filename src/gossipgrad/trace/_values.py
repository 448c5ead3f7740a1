"""The figures of a run as numbers: of its summary or, where it lacks them, of its metrics."""

from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean

from ._format import UNKNOWN, is_number
from ._runs import Record, Run, find_key


def strategy(run: Run) -> str:
    """What the run calls its way of keeping the workers together."""
    return _text(run.summary.get("strategy") or find_key(run.config, "strategy"))


def strategy_is(run: Run) -> Record:
    """What the run says of its strategy, such as who meets whom."""
    recorded = run.config.get("strategy_is")
    return recorded if isinstance(recorded, dict) else {}


def accuracy(run: Run) -> object:
    """That of the model that the run left, or the last one measured."""
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
    if is_number(recorded):
        return float(recorded)
    return max(
        (
            float(record["seconds"])
            for record in _last_records(run)
            if is_number(record.get("seconds"))
        ),
        default=None,
    )


def bytes_per_step(run: Run) -> float | None:
    """What each worker sends in a step, without the shuffle of samples."""
    recorded = run.summary.get("bytes_sent_per_step")
    if is_number(recorded):
        return float(recorded)
    return _mean(ratio(last.get("bytes_sent"), last.get("step")) for last in _last_records(run))


def shuffle_bytes_per_step(run: Run) -> float | None:
    """What each worker sends in a step for the ring shuffle of samples."""
    recorded = run.summary.get("shuffle_bytes_sent_per_step")
    if is_number(recorded):
        return float(recorded)
    return _mean(
        ratio(last.get("shuffle_bytes_sent"), last.get("step")) for last in _last_records(run)
    )


def throughput(run: Run) -> float | None:
    """Samples a second of all workers together."""
    recorded = run.summary.get("samples_per_second")
    if is_number(recorded):
        return float(recorded)
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
    recorded = last.get("train_seconds")
    if is_number(recorded):
        return float(recorded)
    return ratio(last.get("samples"), _rate_of_epochs(run, rank))


def lost_ranks(run: Run) -> list[int]:
    """The ranks that the summary says died or left before the end."""
    recorded = run.summary.get("lost_ranks")
    return (
        sorted(rank for rank in recorded if isinstance(rank, int))
        if isinstance(recorded, list)
        else []
    )


def joined_ranks(run: Run) -> list[Record]:
    """What the summary says of the ranks that joined under way."""
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


def _step_of(record: Record) -> float:
    step = record.get("step")
    return float(step) if is_number(step) else 0.0


def _mean(values: Iterable[object]) -> float | None:
    """The mean of the values that are numbers, None when none is."""
    known = [value for value in values if is_number(value)]
    return fmean(known) if known else None


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
