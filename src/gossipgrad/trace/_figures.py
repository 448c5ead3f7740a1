"""The figures of a run that stand alone: its headline, its table of ranks, its exchanges."""

from dataclasses import dataclass

from ._exchanges import OUTCOMES, outcome_counts
from ._format import (
    MAX_RANKS_LISTED,
    UNKNOWN,
    byte_count,
    duration,
    is_number,
    number,
    percent,
)
from ._runs import Record, Run
from ._values import (
    accuracy,
    bytes_per_step,
    consensus_distance,
    exposed_and_step_seconds,
    joined_ranks,
    last_of,
    latest,
    lost_ranks,
    of_rank,
    ratio,
    run_seconds,
    samples_per_second,
    steps_made,
    strategy,
    strategy_is,
    throughput,
    train_seconds,
)

# Each has a line of its own at the top of the page.
_MAX_LOST = 16


@dataclass(frozen=True, slots=True)
class Card:
    """One headline figure and the line that says what it is measured against."""

    label: str
    value: str
    note: str


def headline(run: Run) -> list[Card]:
    """The figures to look at first, from the summary or, where it lacks them, the metrics."""
    sent = bytes_per_step(run)
    exposed, step = exposed_and_step_seconds(run)
    share = ratio(exposed, step)
    hidden = f"{duration(exposed)} of a step's {duration(step)} not hidden by compute"
    return [
        Card("Strategy", strategy(run), _strategy_note(run)),
        Card("Accuracy", percent(accuracy(run)), _accuracy_note(run)),
        Card(
            "Consensus distance",
            number(consensus_distance(run)),
            "RMS over ranks of the distance to their mean",
        ),
        Card("Throughput", *_throughput(run)),
        Card("Time", duration(run_seconds(run)), _progress_note(run)),
        Card("Sent per step", byte_count(sent), _all_reduce_note(run, sent)),
        Card("Exposed share", percent(share), "" if share is None else hidden),
    ]


def rank_rows(run: Run) -> list[list[str]]:
    """A row for each rank: its state, its replica's accuracy, how much it did and how fast.

    Of many ranks these are the first; `ranks_left_out` says so.
    """
    states = {
        record.get("rank"): "left" for record in joined_ranks(run) if record.get("end") == "left"
    }
    states |= dict.fromkeys(lost_ranks(run), "lost")
    end = "finished" if run.finished else "unfinished"
    rows = []
    for rank in run.ranks[:MAX_RANKS_LISTED]:
        last = last_of(run.steps, rank)
        rate = samples_per_second(run, rank)
        counted = of_rank(run.summary.get("steps_per_rank"), rank, run.world_size)
        rows.append(
            [
                f"rank {rank}",
                states.get(rank, end),
                percent(of_rank(run.summary.get("accuracy_per_rank"), rank, run.world_size)),
                number(last.get("loss")),
                number(last.get("step") if counted is None else counted),
                number(last.get("samples")),
                number(rate and round(rate, 1)),
                percent(ratio(last.get("exposed_seconds"), train_seconds(run, rank))),
                *(
                    number(of_rank(run.summary.get(name), rank, run.world_size))
                    for name in ("void_rounds_per_rank", "late_rounds_per_rank")
                ),
            ]
        )
    return rows


def ranks_left_out(run: Run) -> str:
    """A sentence on the ranks that have no row; empty where all have."""
    there = len(run.ranks)
    if there <= MAX_RANKS_LISTED:
        return ""
    return (
        f"The first {MAX_RANKS_LISTED} of {there:,} ranks; those of the others are in summary.json "
        "and metrics-rank*.jsonl."
    )


RANK_HEAD = [
    "Rank",
    "State",
    "Accuracy of its replica",
    "Last loss",
    "Steps",
    "Samples",
    "Samples/s",
    "Exposed",
    "Void rounds",
    "Late rounds",
]


def outcome_rows(run: Run) -> list[list[str]]:
    """How the exchanges went: outcome, count, share and meaning."""
    counts = outcome_counts(run)
    total = sum(counts.values())
    names = [*OUTCOMES, *sorted(counts.keys() - OUTCOMES.keys())] if counts else []
    return [
        [
            name.replace("_", " "),
            number(counts.get(name, 0)),
            percent(ratio(counts.get(name, 0), total)),
            OUTCOMES.get(name, ""),
        ]
        for name in names
    ]


OUTCOME_HEAD = ["Outcome", "Exchanges", "Share", "Meaning"]


def notices(run: Run) -> list[str]:
    """What a reader must know before trusting the figures."""
    found = []
    reasons = run.summary.get("lost_because")
    lost = lost_ranks(run)
    for rank in lost[:_MAX_LOST]:
        reason = reasons.get(str(rank)) if isinstance(reasons, dict) else None
        found.append(f"Rank {rank} {reason or 'was lost during the run'}.")
    if len(lost) > _MAX_LOST:
        found.append(f"{len(lost) - _MAX_LOST:,} more ranks were lost; summary.json names them.")
    joined = joined_ranks(run)
    found += [_joined_note(one) for one in joined[:_MAX_LOST]]
    if len(joined) > _MAX_LOST:
        found.append(f"{len(joined) - _MAX_LOST:,} more ranks joined; summary.json names them.")
    if run.summary.get("interrupted"):
        found.append(
            "The run was interrupted before its last step; the figures are those of that moment."
        )
    notes = run.summary.get("notes")
    return [*found, *(map(str, notes) if isinstance(notes, list) else []), *run.problems]


def _joined_note(record: Record) -> str:
    """What became of a rank that joined, in a sentence."""
    ends = {"left": " and left", "lost": " and was lost"}
    end = ends.get(str(record.get("end")), "")
    steps, samples = number(record.get("steps")), number(record.get("samples"))
    return (
        f"Rank {record.get('rank')} joined from rank {record.get('from_rank')}, trained {steps} "
        f"steps on {samples} samples{end}."
    )


def _strategy_note(run: Run) -> str:
    return ", ".join(
        [
            *map(str, strategy_is(run).values()),
            f"{run.world_size} worker{'s' * (run.world_size != 1)}",
        ]
    )


def _accuracy_note(run: Run) -> str:
    record = run.summary.get("accuracy_per_rank")
    values = [
        value
        for value in (of_rank(record, rank, run.world_size) for rank in run.ranks)
        if is_number(value)
    ]
    owner = run.summary.get("model_from_rank")
    alone = run.summary.get("model_is_consensus") is False and owner is not None
    whose = f"of rank {owner}'s replica" if alone else "of the average"
    if not is_number(accuracy(run)):
        whose = "not measured"
    if not values:
        return whose
    return f"{whose}; single replicas {percent(min(values))} to {percent(max(values))}"


def _throughput(run: Run) -> tuple[str, str]:
    rate = throughput(run)
    if rate is None:
        return UNKNOWN, ""
    return (
        f"{number(round(rate) if rate >= 100 else rate)}/s",
        "samples, all workers together",
    )


def _progress_note(run: Run) -> str:
    last_epoch = latest(run.epochs)
    counts = {
        "steps": steps_made(run),
        "epochs": run.summary.get("epochs", last_epoch.get("epoch")),
    }
    return ", ".join(f"{number(n)} {name}" for name, n in counts.items() if is_number(n))


def _all_reduce_note(run: Run, bytes_per_step: object) -> str:
    """Compare with what ring all-reduce of the same gradients would send, where that is known."""
    ring = run.summary.get("all_reduce_bytes_per_step")
    share = ratio(bytes_per_step, ring)
    if share is None:
        return "by each worker"
    return f"by each worker; {share:.0%} of ring all-reduce ({byte_count(ring)})"
