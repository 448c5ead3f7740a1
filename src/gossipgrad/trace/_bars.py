"""Bars: what adds up, side by side for ranks or runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from ._exchanges import LATENESS, OUTCOMES, outcome_counts, outcomes_by_rank, rounds_late
from ._format import MAX_RANKS_LISTED, byte_count, is_number, number, percent
from ._runs import Run
from ._values import bytes_per_step, ratio, samples_per_second, shuffle_bytes_per_step

_MAX_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row: its parts in their order; none where nothing is known.

    Attributes:
        label: Of whom or what.
        parts: A value for each kind.
        note: What is written beside it, the whole value by itself.
        is_reference: Whether it was computed for comparison and not measured.
    """

    label: str
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    is_reference: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Rows of stacked bars on a common scale, or each as the parts of its whole.

    Attributes:
        kinds: What the parts are: their names in words, by the name that styles them.
        bars: The rows that are drawn.
        rest: Rows that are in the table alone.
    """

    id: str
    title: str
    description: str
    y_format: Literal["bytes", "number"]
    of_whole: bool
    kinds: dict[str, str]
    bars: list[Bar]
    rest: list[Bar] = field(default_factory=list)

    def payload(self) -> dict[str, Any]:
        """The bars as the page's script takes them."""
        return {
            "id": self.id,
            "format": self.y_format,
            "ofWhole": self.of_whole,
            "kinds": self.kinds,
            "bars": [
                {
                    "label": bar.label,
                    "parts": dict(bar.parts),
                    "note": bar.note,
                    "reference": bar.is_reference,
                }
                for bar in self.bars
            ],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows with the same values."""
        write = byte_count if self.y_format == "bytes" else number
        return ["", *self.kinds.values()], [
            [
                bar.label,
                *(write(bar.parts.get(kind, 0) if bar.parts else None) for kind in self.kinds),
            ]
            for bar in [*self.bars, *self.rest][:MAX_RANKS_LISTED]
        ]


def bars(runs: list[Run]) -> list[Bars]:
    """The bars that the runs have values for."""
    drawn = [_traffic(runs), _rates(runs), _outcomes(runs), _lateness(runs)]
    return [each for each in drawn if any(bar.parts for bar in each.bars)]


def _traffic(runs: list[Run]) -> Bars:
    rows: list[Bar] = []
    references: dict[float, list[str]] = {}
    for run in runs:
        sent, ring = bytes_per_step(run), run.summary.get("all_reduce_bytes_per_step")
        shuffled = shuffle_bytes_per_step(run)
        computed = str(run.summary.get("bytes_sent_are", "")).startswith("computed")
        parts = {} if sent is None else {"exchanges": sent}
        if shuffled:
            parts["shuffle"] = shuffled
        if is_number(ring):
            references.setdefault(float(ring), []).append(run.name)
        by_ring = ratio(sent, ring)
        share = "" if by_ring is None else f", {by_ring:.0%}"
        rows.append(
            Bar(
                label=_run_label(runs, run, "sent") + (" (computed)" if computed else ""),
                parts=parts,
                note=byte_count(sum(parts.values())) + share if parts else "",
            )
        )
    for ring, names in references.items():
        of_which = f" for {', '.join(names)}" if len(references) > 1 else ""
        rows.append(
            Bar(
                label=f"ring all-reduce{of_which}",
                parts={"reference": ring},
                note=byte_count(ring),
                is_reference=True,
            )
        )
    kinds = {"exchanges": "parameters or gradients", "shuffle": "ring shuffle of samples"}
    kinds |= {"reference": "ring all-reduce, computed"}
    used = {kind for row in rows for kind in row.parts}
    return Bars(
        id="traffic",
        title="Sent in a step",
        description=(
            "Bytes that each worker sends, beside ring all-reduce of the same model's gradients. "
            "That one is computed, 2 (p - 1) / p of the gradient bytes, and not measured; the "
            "shares are of it."
        ),
        y_format="bytes",
        of_whole=False,
        kinds={kind: name for kind, name in kinds.items() if kind in used},
        bars=rows,
    )


def _rates(runs: list[Run]) -> Bars:
    rows = []
    for run in runs:
        for rank in run.ranks:
            rate = samples_per_second(run, rank)
            rows.append(
                Bar(
                    label=_rank_label(runs, run, rank),
                    parts={} if rate is None else {"rate": rate},
                    note="" if rate is None else f"{number(round(rate, 1))}/s",
                )
            )
    shown, rest, cut = _worst(rows, lambda bar: -bar.parts.get("rate", inf), "slowest")
    return Bars(
        id="rates",
        title="Samples per second of each worker",
        description="Over all steps, evaluations left out." + cut,
        y_format="number",
        of_whole=False,
        kinds={"rate": "samples/s"},
        bars=shown,
        rest=rest,
    )


def _outcomes(runs: list[Run]) -> Bars:
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
    shown, rest, cut = _worst(of_ranks, lambda bar: _share_not(bar, "delivered"), "least delivered")
    description = "Exchanges of all workers by outcome, counted by bucket."
    if len(runs) == 1:
        description = (
            "Exchanges by outcome, counted by bucket. All workers: at the end of the run; single "
            "ranks: as of the last line of their metrics."
        )
    return Bars(
        id="outcomes",
        title="How exchanges ended",
        description=description + cut,
        y_format="number",
        of_whole=True,
        kinds={name: name.replace("_", " ") for name in names},
        bars=[*of_all, *shown],
        rest=rest,
    )


def _lateness(runs: list[Run]) -> Bars:
    rows = []
    for run in runs:
        found = rounds_late(run)
        if len(runs) > 1 and found:
            total: dict[str, int] = {}
            for counts in found.values():
                for late, count in counts.items():
                    total[late] = total.get(late, 0) + count
            rows.append(_share_bar(run.name, total, LATENESS[0]))
        elif found:
            rows += [_share_bar(f"rank {r}", found.get(r, {}), LATENESS[0]) for r in run.ranks]
    shown, rest, cut = _worst(rows, lambda bar: _share_not(bar, LATENESS[0]), "latest")
    used = {late for row in rows for late in row.parts}
    words = {late: f"{late} rounds late" for late in LATENESS}
    words |= {LATENESS[0]: "in its round", LATENESS[1]: "1 round late"}
    return Bars(
        id="lateness",
        title="Staleness",
        description=(
            "Exchanges in the trace by how many rounds after their own they were mixed in." + cut
        ),
        y_format="number",
        of_whole=True,
        kinds={late: words[late] for late in LATENESS if late in used},
        bars=shown,
        rest=rest,
    )


def _worst(
    rows: list[Bar], badness: Callable[[Bar], float], word: str
) -> tuple[list[Bar], list[Bar], str]:
    """The rows to draw, the others, and a sentence that says so; in their order all the while."""
    if len(rows) <= _MAX_ROWS:
        return rows, [], ""
    chosen = {id(row) for row in sorted(rows, key=badness, reverse=True)[:_MAX_ROWS]}
    shown = [row for row in rows if id(row) in chosen]
    rest = [row for row in rows if id(row) not in chosen]
    others = "the others, too"
    if len(rows) > MAX_RANKS_LISTED:
        others = f"these and others, {MAX_RANKS_LISTED} in all"
    cut = f" The {_MAX_ROWS} {word} of {len(rows):,} are drawn; the table has {others}."
    return shown, rest, cut


def _share_not(bar: Bar, good: str) -> float:
    total = sum(bar.parts.values())
    return 1.0 - bar.parts.get(good, 0.0) / total if total else -inf


def _share_bar(label: str, counts: Mapping[str, int], good: str) -> Bar:
    total = sum(counts.values())
    note = f"{percent(counts.get(good, 0) / total)} of {total:,}" if total else ""
    return Bar(
        label=label, parts={k: float(n) for k, n in counts.items()} if total else {}, note=note
    )


def _run_label(runs: list[Run], run: Run, alone: str) -> str:
    return alone if len(runs) == 1 else run.name


def _rank_label(runs: list[Run], run: Run, rank: int) -> str:
    return f"rank {rank}" if len(runs) == 1 else f"{run.name}, rank {rank}"
