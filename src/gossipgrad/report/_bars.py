"""Bars: values that add up, side by side for ranks or runs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Literal, NamedTuple

from ._format import MAX_RANKS_LISTED, byte_count, is_number, number, percent
from ._html import Drawing
from ._runs import Run
from ._values import (
    LATENESS,
    OUTCOMES,
    bytes_per_step,
    outcome_counts,
    outcomes_by_rank,
    ratio,
    rounds_late,
    samples_per_second,
    shuffle_bytes_per_step,
)

_MAX_ROWS = 12


class Bar(NamedTuple):
    """One row.

    Attributes:
        label: The rank or run.
        parts: A value for each kind; none where nothing is known.
        note: Text beside it, by default the whole value.
        is_reference: Whether it was computed for comparison and not measured.
    """

    label: str
    parts: Mapping[str, float]
    note: str = ""
    is_reference: bool = False


def bars(runs: list[Run]) -> list[Drawing]:
    """The bars that the runs have values for."""
    drawn = [_traffic(runs), _rates(runs), _outcomes(runs), _lateness(runs)]
    return [each for each in drawn if any(bar["parts"] for bar in each.payload["bars"])]


def _draw(
    key: str,
    title: str,
    description: str,
    kinds: dict[str, str],
    drawn: Sequence[Bar],
    rest: Sequence[Bar] = (),
    *,
    y_format: Literal["bytes", "number"] = "number",
    of_whole: bool = False,
) -> Drawing:
    """Stacked bars on a common scale, or each as the parts of its whole.

    Args:
        key: Its id for the script.
        title: Of the figure.
        description: Of the figure.
        kinds: The parts: their names in words, by the name that styles them.
        drawn: The rows that are drawn.
        rest: Rows that are in the table alone.
        y_format: How values are written.
        of_whole: Whether each is shown as the parts of its whole.
    """
    write = byte_count if y_format == "bytes" else number
    bars = [
        {"label": bar.label, "parts": dict(bar.parts), "note": bar.note}
        | {"reference": bar.is_reference}
        for bar in drawn
    ]
    return Drawing(
        title=title,
        description=description,
        payload={"id": key, "format": y_format, "ofWhole": of_whole, "kinds": kinds, "bars": bars},
        head=["", *kinds.values()],
        rows=[
            [
                bar.label,
                *(write(bar.parts.get(kind, 0) if bar.parts else None) for kind in kinds),
            ]
            for bar in [*drawn, *rest][:MAX_RANKS_LISTED]
        ],
    )


def _traffic(runs: list[Run]) -> Drawing:
    rows: list[Bar] = []
    references: dict[float, list[str]] = {}
    for run in runs:
        sent, ring = bytes_per_step(run), run.summary.get("all_reduce_bytes_per_step")
        is_computed = str(run.summary.get("bytes_sent_are", "")).startswith("computed")
        parts = {} if sent is None else {"exchanges": sent}
        if shuffled := shuffle_bytes_per_step(run):
            parts["shuffle"] = shuffled
        if is_number(ring):
            references.setdefault(float(ring), []).append(run.name)
        by_ring = ratio(sent, ring)
        share = "" if by_ring is None else f", {by_ring:.0%}"
        label = _run_label(runs, run, "sent") + " (computed)" * is_computed
        rows.append(Bar(label, parts, byte_count(sum(parts.values())) + share if parts else ""))
    for ring, names in references.items():
        of_which = f" for {', '.join(names)}" if len(references) > 1 else ""
        label = f"ring all-reduce{of_which}"
        rows.append(Bar(label, {"reference": ring}, byte_count(ring), is_reference=True))
    kinds = {"exchanges": "parameters or gradients", "shuffle": "ring shuffle of samples"}
    kinds |= {"reference": "ring all-reduce, computed"}
    used = {kind for row in rows for kind in row.parts}
    return _draw(
        "traffic",
        "Sent in a step",
        "Bytes that each worker sends, beside ring all-reduce of the same model's gradients. "
        "That one is computed, 2 (p - 1) / p of the gradient bytes, and not measured; the "
        "shares are of it.",
        {kind: name for kind, name in kinds.items() if kind in used},
        rows,
        y_format="bytes",
    )


def _rates(runs: list[Run]) -> Drawing:
    rows = []
    for run in runs:
        for rank in run.ranks:
            rate = samples_per_second(run, rank)
            label = f"rank {rank}" if len(runs) == 1 else f"{run.name}, rank {rank}"
            note = "" if rate is None else f"{number(round(rate, 1))}/s"
            rows.append(Bar(label, {} if rate is None else {"rate": rate}, note))
    drawn, rest, cut = _worst(rows, lambda bar: -bar.parts.get("rate", inf), "slowest")
    description = "Over all steps, evaluations left out." + cut
    title = "Samples per second of each worker"
    return _draw("rates", title, description, {"rate": "samples/s"}, drawn, rest)


def _outcomes(runs: list[Run]) -> Drawing:
    of_all, of_ranks = [], []
    names = dict.fromkeys(OUTCOMES)
    for run in runs:
        counts = outcome_counts(run)
        ranks = outcomes_by_rank(run) if len(runs) == 1 else {}
        names |= dict.fromkeys(name for each in (counts, *ranks.values()) for name in each)
        if counts or len(runs) == 1:
            of_all.append(_share_bar(_run_label(runs, run, "all workers"), counts, "delivered"))
        if ranks:
            of_ranks += [_share_bar(f"rank {r}", ranks.get(r, {}), "delivered") for r in run.ranks]
    drawn, rest, cut = _worst(of_ranks, lambda bar: _share_not(bar, "delivered"), "least delivered")
    description = "Exchanges of all workers by outcome, counted by bucket."
    if len(runs) == 1:
        description = (
            "Exchanges by outcome, counted by bucket. All workers: at the end of the run; single "
            "ranks: as of the last line of their metrics."
        )
    kinds = {name: name.replace("_", " ") for name in names}
    title, rows = "How exchanges ended", [*of_all, *drawn]
    return _draw("outcomes", title, description + cut, kinds, rows, rest, of_whole=True)


def _lateness(runs: list[Run]) -> Drawing:
    rows, in_time = [], LATENESS[0]
    for run in runs:
        found = rounds_late(run)
        if len(runs) > 1 and found:
            total = sum(map(Counter, found.values()), Counter())
            rows.append(_share_bar(run.name, total, in_time))
        elif found:
            rows += [_share_bar(f"rank {r}", found.get(r, {}), in_time) for r in run.ranks]
    drawn, rest, cut = _worst(rows, lambda bar: _share_not(bar, in_time), "latest")
    used = {late for row in rows for late in row.parts}
    words = {late: f"{late} rounds late" for late in LATENESS}
    words |= {in_time: "in its round", LATENESS[1]: "1 round late"}
    return _draw(
        "lateness",
        "Staleness",
        "Exchanges in the trace by how many rounds after their own they were mixed in." + cut,
        {late: words[late] for late in LATENESS if late in used},
        drawn,
        rest,
        of_whole=True,
    )


def _worst(
    rows: list[Bar], badness: Callable[[Bar], float], word: str
) -> tuple[list[Bar], list[Bar], str]:
    """The rows to draw, the others, and a sentence that says so; all in their order."""
    if len(rows) <= _MAX_ROWS:
        return rows, [], ""
    chosen = {id(row) for row in sorted(rows, key=badness, reverse=True)[:_MAX_ROWS]}
    drawn = [row for row in rows if id(row) in chosen]
    rest = [row for row in rows if id(row) not in chosen]
    others = "the others, too"
    if len(rows) > MAX_RANKS_LISTED:
        others = f"these and others, {MAX_RANKS_LISTED} in all"
    cut = f" The {_MAX_ROWS} {word} of {len(rows):,} are drawn; the table has {others}."
    return drawn, rest, cut


def _share_not(bar: Bar, good: str) -> float:
    total = sum(bar.parts.values())
    return 1.0 - bar.parts.get(good, 0.0) / total if total else -inf


def _share_bar(label: str, counts: Mapping[str, int], good: str) -> Bar:
    total = sum(counts.values())
    if not total:
        return Bar(label, {})
    note = f"{percent(counts.get(good, 0) / total)} of {total:,}"
    return Bar(label, {kind: float(count) for kind, count in counts.items()}, note)


def _run_label(runs: list[Run], run: Run, alone: str) -> str:
    return alone if len(runs) == 1 else run.name
