"""The figures of a run that stand alone: its headline, its table of ranks, its exchanges."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from ._format import UNKNOWN, byte_count, duration, is_number, number, percent
from ._runs import Record, Run, find_key

_OUTCOMES = {
    "delivered": "Taken and mixed in, in its round",
    "late": "Not there when asked for; the step went on without it",
    "dead_peer": "The partner had died or left",
    "void": "Called off before anything was sent; counts on neither end",
}


@dataclass(frozen=True, slots=True)
class Card:
    """One headline figure and the line that says what it is measured against."""

    label: str
    value: str
    note: str


def headline(run: Run) -> list[Card]:
    """The figures to look at first, from the summary or, where it lacks them, the metrics."""
    summary = run.summary
    last_epoch = _latest(run.epochs)
    bytes_per_step = summary.get("bytes_sent_per_step")
    accuracy = summary.get("accuracy", last_epoch.get("accuracy"))
    distance = summary.get("consensus_distance", last_epoch.get("consensus_distance"))
    share, share_note = _exposed_share(run)
    return [
        Card("Strategy", strategy(run), _strategy_note(run)),
        Card("Accuracy", percent(accuracy), _accuracy_note(run)),
        Card(
            "Consensus distance", number(distance), "RMS over ranks of the distance to their mean"
        ),
        Card("Throughput", *_throughput(run)),
        Card("Time", duration(run_seconds(run)), _progress_note(run)),
        Card("Sent per step", byte_count(bytes_per_step), _all_reduce_note(run, bytes_per_step)),
        Card("Exposed share", percent(share), share_note),
    ]


def strategy(run: Run) -> str:
    """What the run calls its way of keeping the workers together."""
    return _text(run.summary.get("strategy") or find_key(run.config, "strategy"))


def run_seconds(run: Run) -> float | None:
    """How long the run took, or how far its metrics reach."""
    told = run.summary.get("seconds")
    if is_number(told):
        return float(told)
    return max(
        (
            float(record["seconds"])
            for record in _last_records(run)
            if is_number(record.get("seconds"))
        ),
        default=None,
    )


def rank_rows(run: Run) -> list[list[str]]:
    """A row for each rank: its state, its replica's accuracy, how much it did and how fast."""
    lost = lost_ranks(run)
    end = "finished" if run.finished else "unfinished"
    rows = []
    for rank in run.ranks:
        last = _last(run.steps, rank)
        rate = _samples_per_second(run, rank)
        counted = _of_rank(run.summary.get("steps_per_rank"), rank, run.world_size)
        rows.append(
            [
                f"rank {rank}",
                "lost" if rank in lost else end,
                percent(_of_rank(run.summary.get("accuracy_per_rank"), rank, run.world_size)),
                number(last.get("loss")),
                number(last.get("step") if counted is None else counted),
                number(last.get("samples")),
                number(rate and round(rate, 1)),
                percent(_ratio(last.get("exposed_seconds"), _ratio(last.get("samples"), rate))),
            ]
        )
    return rows


RANK_HEAD = [
    "Rank",
    "State",
    "Accuracy of its replica",
    "Last loss",
    "Steps",
    "Samples",
    "Samples/s",
    "Exposed",
]


def outcome_rows(run: Run) -> list[list[str]]:
    """How the exchanges went: outcome, count, share and meaning, as the summary tells it."""
    told = run.summary.get("outcomes")
    counts = told if isinstance(told, dict) else {}
    total = sum(count for count in counts.values() if is_number(count))
    names = [*_OUTCOMES, *sorted(counts.keys() - _OUTCOMES.keys())] if counts else []
    return [
        [
            name.replace("_", " "),
            number(counts.get(name, 0)),
            percent(_ratio(counts.get(name, 0), total)),
            _OUTCOMES.get(name, ""),
        ]
        for name in names
    ]


OUTCOME_HEAD = ["Outcome", "Exchanges", "Share", "Meaning"]


def notices(run: Run) -> list[str]:
    """What a reader must know before trusting the figures."""
    found = []
    reasons = run.summary.get("lost_because")
    for rank in lost_ranks(run):
        reason = reasons.get(str(rank)) if isinstance(reasons, dict) else None
        found.append(f"Rank {rank} was lost during the run{f': {reason}' if reason else ''}.")
    if run.summary.get("interrupted"):
        found.append(
            "The run was interrupted before its last step; the figures are those of that moment."
        )
    notes = run.summary.get("notes")
    return [*found, *(map(str, notes) if isinstance(notes, list) else []), *run.problems]


def lost_ranks(run: Run) -> list[int]:
    """The ranks that the summary says died or left before the end."""
    told = run.summary.get("lost_ranks")
    return sorted(rank for rank in told if isinstance(rank, int)) if isinstance(told, list) else []


def _strategy_note(run: Run) -> str:
    gossips = strategy(run) in ("gossip", UNKNOWN)  # others have no use for these options
    options = ("topology", "mode", "payload") if gossips else ()
    found = (find_key(run.config, option) for option in options)
    parts = [value for value in found if isinstance(value, str)]
    return ", ".join([*parts, f"{run.world_size} worker{'s' * (run.world_size != 1)}"])


def _accuracy_note(run: Run) -> str:
    told = run.summary.get("accuracy_per_rank")
    values = [
        value
        for value in (_of_rank(told, rank, run.world_size) for rank in run.ranks)
        if is_number(value)
    ]
    owner = run.summary.get("model_from_rank")
    alone = run.summary.get("model_is_consensus") is False and owner is not None
    whose = f"of rank {owner}'s replica" if alone else "of the average"
    if not values:
        return whose
    return f"{whose}; single replicas {percent(min(values))} to {percent(max(values))}"


def _throughput(run: Run) -> tuple[str, str]:
    told = run.summary.get("samples_per_second")
    if not is_number(told):
        rates = [_samples_per_second(run, rank) for rank in run.ranks]
        told = sum(rate for rate in rates if rate is not None) or None
    if told is None:
        return UNKNOWN, ""
    return f"{number(round(told) if told >= 100 else told)}/s", "samples, all workers together"


def _progress_note(run: Run) -> str:
    last = _latest(run.steps)
    last_epoch = _latest(run.epochs)
    counts = {
        "steps": run.summary.get("steps", last.get("step")),
        "epochs": run.summary.get("epochs", last_epoch.get("epoch")),
    }
    return ", ".join(f"{number(n)} {name}" for name, n in counts.items() if is_number(n))


def _all_reduce_note(run: Run, bytes_per_step: object) -> str:
    """Compare with what ring all-reduce of the same gradients would send, where that is known."""
    ring = run.summary.get("all_reduce_bytes_per_step")
    share = _ratio(bytes_per_step, ring)
    if share is None:
        return "by each worker"
    return f"by each worker; {share:.0%} of ring all-reduce ({byte_count(ring)})"


def _exposed_share(run: Run) -> tuple[float | None, str]:
    """The share of a step that communication is waited for, and the two times behind it."""
    step = run.summary.get("step_seconds")
    if not is_number(step):
        every = (record.get("step_seconds") for records in run.steps.values() for record in records)
        step = _mean(every)
    exposed = run.summary.get("exposed_seconds_per_step")
    if not is_number(exposed):
        exposed = _mean(
            _ratio(record.get("exposed_seconds"), record.get("step"))
            for record in _last_records(run)
        )
    share = _ratio(exposed, step)
    if share is None:
        return None, ""
    return share, f"{duration(exposed)} of a step's {duration(step)} not hidden by compute"


def _samples_per_second(run: Run, rank: int) -> float | None:
    """A rank's own rate, without the evaluations where it has ended an epoch."""
    rate = _mean(record.get("samples_per_second") for record in run.epochs.get(rank, []))
    last = _last(run.steps, rank)
    return rate or _ratio(last.get("samples"), last.get("seconds"))


def _last_records(run: Run) -> list[Record]:
    return [records[-1] for records in run.steps.values() if records]


def _latest(records_of_rank: dict[int, list[Record]]) -> Record:
    """The last record of the rank that came furthest."""
    last = [records[-1] for records in records_of_rank.values() if records]
    return max(last, key=lambda record: record.get("step") or 0, default={})


def _of_rank(values: object, rank: int, world_size: int) -> object:
    """A rank's entry of a list over all ranks or of an object keyed by rank."""
    if isinstance(values, list) and len(values) == world_size and rank < world_size:
        return values[rank]
    return values.get(str(rank)) if isinstance(values, dict) else None


def _last(records_of_rank: dict[int, list[Record]], rank: int) -> Record:
    return next(reversed(records_of_rank.get(rank, [])), {})


def _mean(values: Iterable[object]) -> float | None:
    """The mean of the values that are numbers, None when none is."""
    known = [value for value in values if is_number(value)]
    return fmean(known) if known else None


def _ratio(part: object, whole: object) -> float | None:
    return part / whole if is_number(part) and is_number(whole) and whole > 0 else None


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
