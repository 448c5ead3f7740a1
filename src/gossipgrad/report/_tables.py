"""Figures of runs in words: cards, notices, ranks, exchanges, and runs beside the first."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ._curves import shared_metric
from ._figures import (
    LATENESS,
    OUTCOMES,
    accuracy,
    bytes_per_step,
    consensus_distance,
    exposed_seconds,
    exposed_share,
    joined_ranks,
    last_loss,
    last_of,
    latest,
    lost_ranks,
    metric,
    of_rank,
    outcome_counts,
    outcomes_by_rank,
    ratio,
    rounds_late,
    run_seconds,
    samples_per_second,
    shuffle_bytes_per_step,
    step_seconds,
    steps_made,
    strategy,
    strategy_is,
    throughput,
)
from ._run import Record, Run
from ._text import (
    MAX_RANKS_LISTED,
    UNKNOWN,
    Markup,
    byte_count,
    duration,
    element,
    is_number,
    join,
    number,
    percent,
    table,
)

# Each has a line of its own at the top of the page.
_MAX_LOST = 16
NOT_USED = "not used"
# Where a run was written, and how it was shown, is no option; the formula follows from others.
_NOT_OPTIONS = frozenset(
    {"out", "overwrite", "quiet", "run_name", "lr_formula", "strategy_is", "unused"}
)


class Card(NamedTuple):
    """One headline figure, and a line that explains it."""

    label: str
    value: str
    note: str


def headline(run: Run) -> list[Card]:
    """The figures to look at first, from the summary or, where it lacks them, the metrics."""
    measured, rate = metric(run), throughput(run)
    exposed = f"{duration(exposed_seconds(run))} of a step's {duration(step_seconds(run))}"
    return [
        Card("Strategy", strategy(run), _strategy_note(run)),
        Card(measured.name, measured.write(accuracy(run)), _metric_note(run)),
        Card(
            "Consensus distance",
            number(consensus_distance(run)),
            "RMS over ranks of the distance to their mean",
        ),
        Card(
            "Throughput",
            UNKNOWN if rate is None else f"{number(round(rate) if rate >= 100 else rate)}/s",
            "" if rate is None else "samples, all workers together",
        ),
        Card("Time", duration(run_seconds(run)), _progress_note(run)),
        Card("Sent per step", byte_count(bytes_per_step(run)), _sent_note(run)),
        Card(
            "Exposed share",
            percent(exposed_share(run)),
            "" if exposed_share(run) is None else f"{exposed} not hidden by compute",
        ),
    ]


def notices(run: Run) -> list[str]:
    """Sentences that a reader must know before trusting the figures."""
    found = []
    reasons = run.summary.get("lost_because")
    lost, joined = lost_ranks(run), joined_ranks(run)
    for rank in lost[:_MAX_LOST]:
        reason = reasons.get(str(rank)) if isinstance(reasons, dict) else None
        found.append(f"Rank {rank} {reason or 'was lost during the run'}.")
    if len(lost) > _MAX_LOST:
        found.append(f"{len(lost) - _MAX_LOST:,} more ranks were lost; summary.json names them.")
    for one in joined[:_MAX_LOST]:
        end = {"left": " and left", "lost": " and was lost"}.get(str(one.get("end")), "")
        found.append(
            f"Rank {one.get('rank')} joined from rank {one.get('from_rank')}, trained "
            f"{number(one.get('steps'))} steps on {number(one.get('samples'))} samples{end}."
        )
    if len(joined) > _MAX_LOST:
        found.append(f"{len(joined) - _MAX_LOST:,} more ranks joined; summary.json names them.")
    if run.summary.get("interrupted"):
        found.append(
            "The run was interrupted before its last step; the figures are those of that moment."
        )
    notes = run.summary.get("notes")
    return [*found, *(map(str, notes) if isinstance(notes, list) else []), *run.problems]


def rank_table(run: Run, caption: str) -> Markup:
    """A row for each rank: its state, the metric of its replica, how much it did and how fast."""
    states = {one.get("rank"): "left" for one in joined_ranks(run) if one.get("end") == "left"}
    states |= dict.fromkeys(lost_ranks(run), "lost")
    end, measured = "finished" if run.is_finished else "unfinished", metric(run)
    head = ["Rank", "State", f"{measured.name} of its replica", "Last loss", "Steps", "Samples"]
    head += ["Samples/s", "Exposed", "Void rounds", "Late rounds"]
    rows = []
    for rank in run.ranks[:MAX_RANKS_LISTED]:
        last, rate = last_of(run.steps, rank), samples_per_second(run, rank)
        replica, steps, void, late = (
            of_rank(run, f"{name}_per_rank", rank)
            for name in ("accuracy", "steps", "void_rounds", "late_rounds")
        )
        rows.append(
            [
                f"rank {rank}",
                states.get(rank, end),
                measured.write(replica),
                number(last.get("loss")),
                number(last.get("step") if steps is None else steps),
                number(last.get("samples")),
                number(rate and round(rate, 1)),
                percent(ratio(last.get("exposed_seconds"), last.get("train_seconds"))),
                number(void),
                number(late),
            ]
        )
    left_out = len(run.ranks) > MAX_RANKS_LISTED and (
        f"The first {MAX_RANKS_LISTED} of {len(run.ranks):,} ranks; those of the others are in "
        "summary.json and metrics-rank*.jsonl."
    )
    return join([table(caption, head, rows), *([element("p", left_out)] if left_out else [])])


def exchange_table(run: Run, caption: str) -> Markup:
    """How the exchanges of all workers and of each ended, and how late they were; empty of none."""
    counts, by_rank, late = outcome_counts(run), outcomes_by_rank(run), rounds_late(run)
    if not (counts or by_rank or late):
        return Markup()
    ended = dict.fromkeys(name for each in (OUTCOMES, counts, *by_rank.values()) for name in each)
    delays = [name for name in LATENESS if any(name in each for each in late.values())]

    def row(name: str, counts: dict[str, int], late: dict[str, int]) -> list[str]:
        share = percent(ratio(counts.get("delivered", 0), sum(counts.values())))
        return [
            name,
            share,
            *(number(counts.get(one, 0) if counts else None) for one in ended),
            *(number(late.get(one, 0) if late else None) for one in delays),
        ]

    of_all = {name: sum(each.get(name, 0) for each in late.values()) for name in delays}
    rows = [row("all workers", counts, of_all)]
    if by_rank or late:
        rows += [
            row(f"rank {rank}", by_rank.get(rank, {}), late.get(rank, {}))
            for rank in run.ranks[:MAX_RANKS_LISTED]
        ]
    text = "Counted by bucket: of all workers at the end of the run, of a rank as of the last line "
    text += "of its metrics. "
    text += ". ".join(
        f"{name.replace('_', ' ').capitalize()}: {OUTCOMES[name]}" for name in OUTCOMES
    )
    if delays:
        text += ". Columns of rounds: exchanges in the trace, by when they were mixed in"
    head = ["", "Share delivered", *(name.replace("_", " ").capitalize() for name in ended)]
    head += [f"Mixed {name}" for name in delays]
    return join([table(caption, head, rows), element("p", f"{text}.")])


def _strategy_note(run: Run) -> str:
    return ", ".join([*map(str, strategy_is(run).values()), run.workers])


def _metric_note(run: Run) -> str:
    values = [of_rank(run, "accuracy_per_rank", rank) for rank in run.ranks]
    known = [value for value in values if is_number(value)]
    owner, write = run.summary.get("model_from_rank"), metric(run).write
    is_alone = run.summary.get("model_is_consensus") is False and owner is not None
    whose = f"of rank {owner}'s replica" if is_alone else "of the average"
    if not is_number(accuracy(run)):
        whose = "not measured"
    if not known:
        return whose
    return f"{whose}; single replicas {write(min(known))} to {write(max(known))}"


def _progress_note(run: Run) -> str:
    epochs = run.summary.get("epochs", latest(run.epochs).get("epoch"))
    counts = {"steps": steps_made(run), "epochs": epochs}
    return ", ".join(f"{number(n)} {name}" for name, n in counts.items() if is_number(n))


def _sent_note(run: Run) -> str:
    """Compare with what ring all-reduce of the same gradients would send, where that is known."""
    ring, shuffled = run.summary.get("all_reduce_bytes_per_step"), shuffle_bytes_per_step(run)
    share = ratio(bytes_per_step(run), ring)
    is_computed = str(run.summary.get("bytes_sent_are", "")).startswith("computed")
    text = "by each worker" + ", computed" * is_computed
    if share is not None:
        text += f"; {share:.0%} of ring all-reduce ({byte_count(ring)})"
    return text + (f"; ring shuffle {byte_count(shuffled)}" if shuffled else "")


def _delivered_share(run: Run) -> float | None:
    counts = outcome_counts(run)
    return ratio(counts.get("delivered", 0), sum(counts.values()))


Row = tuple[Any, ...]
_FIGURES: tuple[tuple[str, Callable[[Run], object], Callable[[object], str]], ...] = (
    ("Training loss, last epoch", last_loss, number),
    ("Consensus distance", consensus_distance, number),
    ("Time", run_seconds, duration),
    ("Steps", steps_made, number),
    ("Time of a step", step_seconds, duration),
    ("Exposed in a step", exposed_seconds, duration),
    ("Exposed share", exposed_share, percent),
    ("Samples per second, all workers", throughput, number),
    ("Sent per step and worker", bytes_per_step, byte_count),
    (
        "Ring all-reduce would send, computed",
        lambda run: run.summary.get("all_reduce_bytes_per_step"),
        byte_count,
    ),
    ("Ring shuffle, sent per step and worker", shuffle_bytes_per_step, byte_count),
    ("Exchanges delivered", _delivered_share, percent),
)


def figure_rows(runs: list[Run]) -> list[Row]:
    """A row a figure: its name, then for each run the value and its ratio to the first run's."""
    rows: list[Row] = [
        ("Strategy", *((strategy(run), "") for run in runs)),
        ("Workers", *((number(run.world_size), "") for run in runs)),
    ]
    shared = shared_metric(runs)
    for name, read, write in ((shared.name, accuracy, shared.write), *_FIGURES):
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
    return f"{by_first:,.0f}x" if by_first >= 1000 else f"{by_first:#.3g}x"


def option_rows(runs: list[Run]) -> tuple[list[list[str]], list[list[str]]]:
    """A row an option with each run's value: those that differ, and those that are the same."""
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
        if name not in _NOT_OPTIONS:
            inner = {name: value}
            if isinstance(value, dict):
                inner = {f"{name}.{key}": one for key, one in value.items()}
            found |= {key: "none" if one is None else str(one) for key, one in inner.items()}
    unused = tree.get("unused")
    for name in unused if isinstance(unused, list) else ():
        if name in found:
            found[name] = NOT_USED
    return found
