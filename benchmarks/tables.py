"""The tables of README and docs/ that hold what was measured: the one writer of all pages.

A page has them between `<!-- table: NAME -->` and `<!-- end -->`.

    python -m benchmarks.tables

fills every page from `benchmarks/results`; a test compares them.
"""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = Path(__file__).parent / "results"
_MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without its last newline.

    Example:
        >>> print(table(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("| --- ", "|---") for line in lines)


def filled(text: str) -> str:
    """A page with all its tables made anew.

    Raises:
        KeyError: It names a table that there is not.
    """
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def names(text: str) -> list[str]:
    """The tables that a page has."""
    return [found[2] for found in _MARKED.finditer(text)]


def results(name: str) -> Any:
    """What a benchmark has written."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _table(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def keep(make: Callable[[], str]) -> Callable[[], str]:
        TABLES[name] = make
        return make

    return keep


def _spread(
    values: Sequence[float],
    form: str,
    unit: str = "",
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> str:
    """The middle of values, with the least and the largest."""
    low, high = (form.format(end(values)) for end in (min, max))
    text = form.format(middle(values)) + unit
    return text if low == high else f"{text} ({low} to {high})"


# -- README ----------------------------------------------------------------------------------------


@_table("headline")
def headline() -> str:
    (lenet,) = [
        row
        for row in results("accuracy")["rows"]
        if row["task"] == "Fashion-MNIST, LeNet" and row["world_size"] == 8
    ]
    behind = lenet["difference_to_allreduce_points"]["gossip"]
    cells = _network_cells()
    ddp, gossip = (f"{1e3 * cells[name, 8, 1e8][0]:.0f} ms" for name in ("ddp", "gossip"))
    shares = results("time_to_accuracy")["rows"][0]["shares_of_ddp_time"].values()
    asleep = {
        cell["contestant"]: f"{1e3 * max(cell['longest_step_seconds']):,.0f} ms"
        for cell in results("stall")["cells"]
        if cell["scenario"] == "sleeps"
    }
    return table(
        ["", "all-reduce (DDP)", "gossip", "where"],
        [
            [
                "accuracy after equal epochs",
                *(
                    f"{100 * statistics.fmean(lenet['accuracy'][name]):.2f} %"
                    for name in ("allreduce", "gossip")
                ),
                "LeNet on Fashion-MNIST, SGD, 8 workers, 10 epochs, 5 seeds: "
                f"{behind['mean']:+.2f} +- {behind['half_width_95']:.2f} points",
            ],
            [
                "time of a step",
                ddp,
                gossip,
                "compute of a ResNet-50 on a GPU replayed at 3 x 292 ms; 8 workers in network "
                "namespaces, links that stand for 10 Gbit/s",
            ],
            [
                "time to DDP's accuracy",
                "1",
                _spread([share for share in shares if share], "{:.2f}"),
                "LeNet on Fashion-MNIST, 4 workers, 50 Mbit/s, 3 seeds",
            ],
            [
                "longest step while another worker sleeps 6 s",
                asleep["DDP"],
                f'{asleep["gossip, stale"]} with `mode="stale"`',
                "4 workers, steps of 20 ms, the worst of 3 runs",
            ],
        ],
    )


# -- performance -----------------------------------------------------------------------------------


def _accuracy(name: str) -> str:
    rows = []
    for row in results(name)["rows"]:
        behind = row["difference_to_allreduce_points"]["gossip"]
        accuracies = [statistics.fmean(row["accuracy"][way]) for way in ("allreduce", "gossip")]
        rows.append(
            [
                row["task"],
                str(row["world_size"]),
                *(f"{100 * accuracy:.2f} %" for accuracy in accuracies),
                f"{behind['mean']:+.2f} +- {behind['half_width_95']:.2f}",
            ]
        )
    return table(["task", "workers", "all-reduce", "gossip", "difference, points"], rows)


@_table("accuracy")
def accuracy() -> str:
    return _accuracy("accuracy")


@_table("workloads")
def workloads() -> str:
    return _accuracy("workloads")


def _network_cells() -> dict[tuple[str, int, float], tuple[float, bool]]:
    """Median step in seconds, and whether it is marked, by contestant, workers and rate.

    `gossip, sync` is of the later run, in which it hid behind the next forward pass.
    """
    cells = [c for c in results("network") if c["contestant"] != "gossip, sync"]
    cells += [c for c in results("network_sync") if c["contestant"] == "gossip, sync"]
    return {
        (cell["contestant"], cell["world_size"], cell["rate_bits_per_second"]): (
            cell["step_seconds_median"],
            cell["marked"],
        )
        for cell in cells
        if cell["profile"] == "resnet50" and not cell["error"]
    }


@_table("network")
def network() -> str:
    shown = {
        name: name
        for name in (
            *("no communication", "gossip", "gossip, bf16 wire", "gossip, sync"),
            *("Decent-DP, one-peer exponential", "Decent-DP, ring"),
        )
    }
    shown |= {f"DDP{hook}": f"ddp{hook}" for hook in (", fp16 hook", "", ", PowerSGD")}
    shown |= {"all-reduce layer by layer": "agd", "local SGD, period 8": "local SGD, period 8"}
    places = [(workers, rate) for rate in (1e8, 1e9) for workers in (4, 8, 16)]
    cells = _network_cells()
    rows = []
    for name, contestant in shown.items():
        found = [cells.get((contestant, *place)) for place in places]
        rows.append(
            [
                name,
                *("-" if cell is None else f"{1e3 * cell[0]:.0f}{'*' * cell[1]}" for cell in found),
            ]
        )
    heads = [f"{workers}, {100 if rate == 1e8 else 1000} Mbit/s" for workers, rate in places]
    return table(["workers, links", *heads], rows)


@_table("time to accuracy")
def time_to_accuracy() -> str:
    rows = []
    for row in results("time_to_accuracy")["rows"]:
        shares = list(row["shares_of_ddp_time"].values())
        rows.append(
            [
                f"{row['task']}, {row['world_size']} at {_rate(row)}",
                *(_ended(runs) for runs in row["runs"].values()),
                _spread([share for share in shares if share is not None], "{:.2f}"),
            ]
        )
    ways = ["DDP", "gossip, as many epochs", "a quarter more", "twice as many"]
    return table(["real training", *ways, "gossip's time, of DDP's"], rows)


def _rate(row: dict[str, Any]) -> str:
    return f"{row['rate_bits_per_second'] / 1e6:g} Mbit/s"


def _ended(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return "not run"
    marks = "*" * any(run["marked"] for run in runs)
    reached = statistics.fmean([100 * run["accuracy"] for run in runs])
    seconds = statistics.median(run["train_seconds"] for run in runs)
    seeds = "" if len(runs) == 3 else f" ({len(runs)} seed{'s' * (len(runs) > 1)})"
    return f"{reached:.1f} %, {seconds:.0f} s{marks}{seeds}"


@_table("stall")
def stall() -> str:
    cells = {(c["contestant"], c["scenario"]): c for c in results("stall")["cells"]}
    rows = []
    for name, contestant in {
        "gossip, mode `stale`": "gossip, stale",
        "gossip, mode `overlap`": "gossip, overlap",
        "Decent-DP": "Decent-DP, one-peer exponential",
        "DDP": "DDP",
    }.items():
        asleep, dead, slow, alone = (
            cells[contestant, scenario] for scenario in ("sleeps", "dies", "is slow", "nothing")
        )
        steps = min(min(run) for run in dead["steps_of_others"])
        rows.append(
            [
                name,
                f"{1e3 * max(asleep['longest_step_seconds']):,.0f} ms",
                str(steps) if steps == 200 else f"{steps}, then it ends",
                f"{max(slow['seconds_of_others']):.1f} s, "
                f"undisturbed {max(alone['seconds_of_others']):.1f} s",
            ]
        )
    return table(
        [
            "",
            "one sleeps 6 s: longest step of the others",
            "one is killed: steps of the others, of 200",
            "one at half speed: the others' 200 steps",
        ],
        rows,
    )


@_table("step")
def step() -> str:
    tasks = results("step")["tasks"]
    rows = []
    for name in ("gossip", "gossip, bf16 wire", "ddp", "no communication"):
        row = [name.replace("ddp", "DDP")]
        for task in tasks.values():
            way = task[name]
            low, high = (f"{way['ratio_to_ddp_quartiles'][at]:.2f}" for at in (0, 2))
            cell = f"{way['step_milliseconds_median']:,.0f} ms"
            row.append(
                cell
                if name == "ddp"
                else f"{cell}, {way['ratio_to_ddp_median']:.2f} ({low} to {high})"
            )
        rows.append(row)
    return table(["time of a step, share of DDP's", *tasks], rows)


def main() -> None:
    """Fills all pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
