"""The tables of `docs/selection.md`."""

import json
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS
from benchmarks._pages import DOCS, fill, table

NAMES = {1 << 16: "64 Ki", 1 << 18: "256 Ki", 1 << 20: "1 Mi", 1 << 22: "4 Mi"}
WAYS = {"torch.topk": "`torch.topk`", "np.argpartition": "`np.argpartition`", "top_k": "`top_k`"}
METHODS = ("partition", "threshold")
LARGE = 25_000_000


def fill_page(page: Path = DOCS / "selection.md", results: Path = RESULTS) -> None:
    """Writes the tables of the page anew, of what was measured last."""
    found = json.loads((results / "selection.json").read_text())
    text = page.read_text()
    for rows in (against_others(found), methods(found), threads(found)):
        text = fill(text, rows)
    page.write_text(text)


def against_others(found: dict[str, Any]) -> str:
    """Processor time and memory of each way, for what error feedback leaves."""
    rows = []
    for cell in _cells(found, 1, "accumulator"):
        for density, by_way in cell["densities"].items():
            if float(density) > 0.05:
                continue
            memory = found["memory"].get(str(cell["numel"]), {}).get(density, {})
            ratios = [
                _cpu(other["densities"][density], "torch.topk")
                / _cpu(other["densities"][density], "top_k")
                for other in found["cells"]
                if (other["threads"], other["numel"]) == (1, cell["numel"])
            ]
            rows.append(
                [
                    _size(cell["numel"]),
                    f"{100 * float(density):g} %",
                    *(_milliseconds(_cpu(by_way, way)) for way in WAYS),
                    f"{min(ratios):.1f} to {max(ratios):.1f}",
                    *(_megabytes(memory.get(way)) for way in ("torch.topk", "top_k")),
                ]
            )
    head = ["values", "density", *WAYS.values(), "times faster", "memory of torch", "ours"]
    return table(head, rows)


def methods(found: dict[str, Any]) -> str:
    """Which of our methods is the faster, by size and density."""
    rows = []
    for cell in _cells(found, 1, "accumulator"):
        times = [
            " / ".join(_milliseconds(_cpu(by_way, method)) for method in METHODS)
            for by_way in cell["densities"].values()
        ]
        rows.append([_size(cell["numel"]), *times])
    densities = _cells(found, 1, "accumulator")[0]["densities"]
    return table(["partition / threshold", *(f"{100 * float(d):g} %" for d in densities)], rows)


def threads(found: dict[str, Any]) -> str:
    """Processor time with one thread and with two, 25 million values."""
    rows = [
        [
            str(cell["threads"]),
            f"{100 * float(density):g} %",
            *(_spread(by_way[way]["cpu_seconds_quartiles"]) for way in WAYS),
        ]
        for count in (1, 2)
        for cell in _cells(found, count, "accumulator")
        for density, by_way in cell["densities"].items()
        if cell["numel"] == LARGE and density in ("0.001", "0.01")
    ]
    return table(["threads", "density", *WAYS.values()], rows)


def _cells(found: dict[str, Any], threads: int, distribution: str) -> list[dict[str, Any]]:
    return [
        cell
        for cell in found["cells"]
        if (cell["threads"], cell["distribution"]) == (threads, distribution)
    ]


def _cpu(by_way: dict[str, Any], way: str) -> float:
    return by_way[way]["cpu_seconds_quartiles"][1]


def _size(numel: int) -> str:
    return NAMES.get(numel) or f"{numel // 1_000_000} M"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def _spread(quartiles: list[float]) -> str:
    lower, median, upper = quartiles
    return f"{_milliseconds(median)} ({_milliseconds(lower)} to {_milliseconds(upper)})"


def _megabytes(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "not measured"
    return f"{size_bytes / 1e6:,.0f} MB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.2g} MB"
