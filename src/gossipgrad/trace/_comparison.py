"""Several runs in tables: their figures against the first, and the options that differ."""

from collections.abc import Callable

from ._format import UNKNOWN, byte_count, duration, is_number, number, percent
from ._runs import Record, Run
from ._values import (
    accuracy,
    bytes_per_step,
    consensus_distance,
    exposed_and_step_seconds,
    last_loss,
    ratio,
    run_seconds,
    shuffle_bytes_per_step,
    steps_made,
    strategy,
    throughput,
)

NOT_USED = "not used"
# Where a run was written, and how it was shown, is not what it was; the formula follows from it.
_NOT_OPTIONS = frozenset({"out", "overwrite", "quiet", "lr_formula", "strategy_is", "unused"})

_Figure = tuple[str, Callable[[Run], object], Callable[[object], str]]


def _exposed_share(run: Run) -> object:
    return ratio(*exposed_and_step_seconds(run))


_FIGURES: tuple[_Figure, ...] = (
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


def figure_rows(runs: list[Run]) -> list[list[tuple[str, str]]]:
    """A row a figure: its name, then for each run the value and the ratio to the first run's.

    Figures that no run has are left out. The first run has no ratio.
    """
    rows = [
        [("Strategy", ""), *((strategy(run), "") for run in runs)],
        [("Workers", ""), *((number(run.world_size), "") for run in runs)],
    ]
    for name, read, write in _FIGURES:
        values = [read(run) for run in runs]
        if any(is_number(value) for value in values):
            cells = [
                (write(value), "" if index == 0 else ratio_text(value, values[0]))
                for index, value in enumerate(values)
            ]
            rows.append([(name, ""), *cells])
    return rows


def ratio_text(value: object, first: object) -> str:
    """A value by the first run's, as a factor; nothing where there is none.

    Example:
        >>> ratio_text(150, 100), ratio_text(1, 3), ratio_text(1, 0), ratio_text(12_345, 1)
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

    What a run does not use differs from nothing, and what none uses is left out.
    """
    flat = [_flat(run.config) for run in runs]
    names = dict.fromkeys(name for options in flat for name in options)
    rows = [[name, *(options.get(name, UNKNOWN) for options in flat)] for name in names]
    used = [(row, {*row[1:]} - {NOT_USED}) for row in rows]
    different = [row for row, values in used if len(values) > 1]
    return different, [row for row, values in used if len(values) == 1]


def _flat(tree: Record) -> dict[str, str]:
    """Options by their dotted names, as text; what a run says it does not use is marked."""
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
