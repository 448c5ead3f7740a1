"""Figures of runs in words: headline, ranks, exchanges, notices, and runs beside the first."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    OUTCOMES,
    accuracy,
    bytes_per_step,
    consensus_distance,
    exposed_and_step_seconds,
    joined_ranks,
    last_loss,
    last_of,
    latest,
    lost_ranks,
    of_rank,
    outcome_counts,
    ratio,
    run_seconds,
    samples_per_second,
    shuffle_bytes_per_step,
    steps_made,
    strategy,
    strategy_is,
    throughput,
    train_seconds,
)

# Each has a line of its own at the top of the page.
_MAX_LOST = 16
NOT_USED = "not used"
# Where a run was written, and how it was shown, is no option; the formula follows from others.
_NOT_OPTIONS = frozenset({"out", "overwrite", "quiet", "lr_formula", "strategy_is", "unused"})


class Card(NamedTuple):
    """One headline figure, and a line that explains it."""

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
        replica, steps, void, late = (
            of_rank(run.summary.get(f"{name}_per_rank"), rank, run.world_size)
            for name in ("accuracy", "steps", "void_rounds", "late_rounds")
        )
        rows.append(
            [
                f"rank {rank}",
                states.get(rank, end),
                percent(replica),
                number(last.get("loss")),
                number(last.get("step") if steps is None else steps),
                number(last.get("samples")),
                number(rate and round(rate, 1)),
                percent(ratio(last.get("exposed_seconds"), train_seconds(run, rank))),
                number(void),
                number(late),
            ]
        )
    return rows


def ranks_left_out(run: Run) -> str:
    """A sentence on the ranks that have no row; empty where all have."""
    if len(run.ranks) <= MAX_RANKS_LISTED:
        return ""
    return (
        f"The first {MAX_RANKS_LISTED} of {len(run.ranks):,} ranks; those of the others are in "
        "summary.json and metrics-rank*.jsonl."
    )


RANK_HEAD = ["Rank", "State", "Accuracy of its replica", "Last loss", "Steps", "Samples"]
RANK_HEAD += ["Samples/s", "Exposed", "Void rounds", "Late rounds"]
OUTCOME_HEAD = ["Outcome", "Exchanges", "Share", "Meaning"]


def outcome_rows(run: Run) -> list[list[str]]:
    """A row for each outcome of exchanges: count, share and meaning."""
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


def notices(run: Run) -> list[str]:
    """Sentences that a reader must know before trusting the figures."""
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
    """The work and the end of a rank that joined, in a sentence."""
    end = {"left": " and left", "lost": " and was lost"}.get(str(record.get("end")), "")
    steps, samples = number(record.get("steps")), number(record.get("samples"))
    return (
        f"Rank {record.get('rank')} joined from rank {record.get('from_rank')}, trained {steps} "
        f"steps on {samples} samples{end}."
    )


def _strategy_note(run: Run) -> str:
    workers = f"{run.world_size} worker{'s' * (run.world_size != 1)}"
    return ", ".join([*map(str, strategy_is(run).values()), workers])


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
    return f"{number(round(rate) if rate >= 100 else rate)}/s", "samples, all workers together"


def _progress_note(run: Run) -> str:
    epochs = run.summary.get("epochs", latest(run.epochs).get("epoch"))
    counts = {"steps": steps_made(run), "epochs": epochs}
    return ", ".join(f"{number(n)} {name}" for name, n in counts.items() if is_number(n))


def _all_reduce_note(run: Run, bytes_per_step: object) -> str:
    """Compare with what ring all-reduce of the same gradients would send, where that is known."""
    ring = run.summary.get("all_reduce_bytes_per_step")
    share = ratio(bytes_per_step, ring)
    if share is None:
        return "by each worker"
    return f"by each worker; {share:.0%} of ring all-reduce ({byte_count(ring)})"


def _exposed_share(run: Run) -> object:
    return ratio(*exposed_and_step_seconds(run))


Row = tuple[Any, ...]
_FIGURES: tuple[tuple[str, Callable[[Run], object], Callable[[object], str]], ...] = (
    ("Accuracy", accuracy, percent),
    ("Training loss, last epoch", last_loss, number),
    ("Consensus distance", consensus_distance, number),
    ("Time", run_seconds, duration),
    ("Steps", steps_made, number),
    ("Time of a step", lambda run: exposed_and_step_seconds(run)[1], duration),
    ("Exposed in a step", lambda run: exposed_and_step_seconds(run)[0], duration),
    ("Exposed share", _exposed_share, percent),
    ("Samples per second, all workers", throughput, number),
    ("Sent per step and worker", bytes_per_step, byte_count),
    (
        "Ring all-reduce would send, computed",
        lambda run: run.summary.get("all_reduce_bytes_per_step"),
        byte_count,
    ),
    ("Ring shuffle, sent per step and worker", shuffle_bytes_per_step, byte_count),
)


def figure_rows(runs: list[Run]) -> list[Row]:
    """A row a figure: its name, then for each run the value and its ratio to the first run's.

    Figures that no run has are left out. The first run has no ratio.
    """
    rows: list[Row] = [
        ("Strategy", *((strategy(run), "") for run in runs)),
        ("Workers", *((number(run.world_size), "") for run in runs)),
    ]
    for name, read, write in _FIGURES:
        values = [read(run) for run in runs]
        if any(is_number(value) for value in values):
            cells = [
                (write(value), "" if index == 0 else _ratio_text(value, values[0]))
                for index, value in enumerate(values)
            ]
            rows.append((name, *cells))
    return rows


def _ratio_text(value: object, first: object) -> str:
    """A value by the first run's, as a factor; empty where there is none.

    Example:
        >>> _ratio_text(150, 100), _ratio_text(1, 3), _ratio_text(1, 0), _ratio_text(12_345, 1)
        ('1.50x', '0.333x', '', '12,345x')
    """
    by_first = ratio(value, first)
    if by_first is None:
        return ""
    if by_first >= 1000:
        return f"{by_first:,.0f}x"
    return f"{by_first:#.3g}x"


def option_rows(runs: list[Run]) -> tuple[list[list[str]], list[list[str]]]:
    """A row an option with each run's value: those that differ, and those that are the same.

    An option that a run does not use does not differ, and one that no run uses is left out.
    """
    flat = [_flat(run.config) for run in runs]
    names = dict.fromkeys(name for options in flat for name in options)
    rows = [[name, *(options.get(name, UNKNOWN) for options in flat)] for name in names]
    used = [(row, {*row[1:]} - {NOT_USED}) for row in rows]
    different = [row for row, values in used if len(values) > 1]
    return different, [row for row, values in used if len(values) == 1]


def _flat(tree: Record) -> dict[str, str]:
    """Options by their dotted names, as text; those that the run did not use are marked."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        if name in _NOT_OPTIONS:
            continue
        inner = (
            {f"{name}.{key}": one for key, one in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        found |= {key: "none" if one is None else str(one) for key, one in inner.items()}
    unused = tree.get("unused")
    for name in unused if isinstance(unused, list) else ():
        if name in found:
            found[name] = NOT_USED
    return found
