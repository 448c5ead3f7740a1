"""Headline figures of published systems, beside what was measured here: docs/published.md.

Measures nothing: fills the page's tables from the results that are there.

    python -m benchmarks.published
"""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._common import RESULTS
from benchmarks._pages import DOCS, fill, table
from benchmarks.netlab import format_rate

_PROFILE = "resnet50"
_WORLDS = (4, 8, 16)
_NONE = "not measured"


def tables(results: Path = RESULTS) -> list[str]:
    """Speed and accuracy: published, ours, and what differs."""
    cells = _of_one_scale(_load(results / "network.json") or [])
    slow, fast = 1e8, 1e9
    behind_slow, behind_fast = (_behind(cells, rate) for rate in (slow, fast))
    speed = [
        [
            "GossipGraD: about 100 % compute efficiency",
            "ResNet-50 on 128 P100, InfiniBand",
            _efficiencies(cells, fast),
            f"gossip, compute / step, {behind_fast}",
        ],
        [
            "Bluefog: over 95 % scaling, Horovod about 66 %",
            "ResNet-50 on 128 V100, batch 64, 25 Gbit/s",
            _efficiencies(cells, slow),
            f"gossip, compute / step, {behind_slow}",
        ],
        [
            "Decent-DP, AER: 26 to 64 % less time a step than all-reduce",
            "Transformer on 8 to 32 A40, 25 Gbit/s",
            _gains(cells, slow),
            f"gossip against DDP, {behind_slow}",
        ],
        [
            "Decent-DP, AER: 15 to 16 % less",
            "Transformer on 8 to 32 A100, 100 Gbit/s InfiniBand",
            _gains(cells, fast),
            f"gossip against DDP, {behind_fast}",
        ],
    ]
    trained = (_load(results / "accuracy.json") or {}).get("rows", [])
    virtual = (_load(results / "virtual_ranks.json") or {}).get("rows", [])
    accuracy = [
        [
            "GossipGraD: top-1 matches all-reduce's",
            "ResNet-50 on ImageNet, 128 workers",
            _virtual(virtual, 128),
            "MLP on Fashion-MNIST, 128 virtual ranks",
        ],
        [
            "Decent-DP, DAdam: 75.31 against 76.01, 0.70 points behind",
            "ResNet-50 on ImageNet, 32 workers",
            _virtual(virtual, 32),
            "MLP on Fashion-MNIST, 32 virtual ranks",
        ],
        [
            "SGP: within 1.2 points",
            "ResNet-50 on ImageNet, 32 nodes of 8 GPUs",
            _trained(trained),
            "LeNet on Fashion-MNIST, 8 real workers",
        ],
    ]
    return [
        table(["speed, published", "there", f"ours at {_listed(_WORLDS)} hosts", "here"], speed),
        table(["accuracy, published", "there", "ours minus all-reduce", "here"], accuracy),
    ]


def fill_page(page: Path = DOCS / "published.md", results: Path = RESULTS) -> None:
    """Writes the tables into the page."""
    text = page.read_text(encoding="utf-8")
    for each in tables(results):
        text = fill(text, each)
    page.write_text(text, encoding="utf-8")


def _load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _of_one_scale(cells: list[dict]) -> list[dict]:
    """Those of the profile that are scaled as most of them; of as many, the smaller ones."""

    def scale(cell: dict) -> tuple[float, float]:
        return cell.get("size_factor", 1.0), cell.get("time_factor", 1.0)

    own = [cell for cell in cells if cell["profile"] == _PROFILE]
    counts = Counter(scale(cell) for cell in own if cell.get("step_seconds_median"))
    most = min(counts, key=lambda one: (-counts[one], one), default=None)
    return [cell for cell in own if scale(cell) == most]


def _behind(cells: list[dict], rate: float) -> str:
    """The rate, and what it loads a step as, were nothing scaled."""
    scale = cells[0].get("time_factor", 1.0) / cells[0].get("size_factor", 1.0) if cells else 1.0
    return f"{rate / 1e6:g} Mbit/s, as {format_rate(rate * scale)} unscaled"


def _cell(cells: list[dict], contestant: str, p: int, rate: float) -> dict | None:
    place = {"contestant": contestant, "world_size": p, "rate_bits_per_second": rate}
    place["profile"] = _PROFILE
    for cell in cells:
        if cell.get("step_seconds_median") and all(cell[k] == v for k, v in place.items()):
            return cell
    return None


def _efficiencies(cells: list[dict], rate: float) -> str:
    return "; ".join(
        _NONE if cell is None else f"{100 * cell['efficiency']:.0f} %" + _mark(cell)
        for cell in (_cell(cells, "gossip", p, rate) for p in _WORLDS)
    )


def _gains(cells: list[dict], rate: float) -> str:
    told = []
    for p in _WORLDS:
        own, other = (_cell(cells, name, p, rate) for name in ("gossip", "ddp"))
        if own is None or other is None:
            told.append(_NONE)
            continue
        less = 1 - own["step_seconds_median"] / other["step_seconds_median"]
        told.append(f"{100 * less:.0f} % less" + _mark(own, other))
    return "; ".join(told)


def _mark(*cells: dict) -> str:
    return " (marked)" * any(cell["marked"] for cell in cells)


def _virtual(rows: list[dict], p: int) -> str:
    plain = {"model": "mlp", "world_size": p, "strategy": "gossip", "lr_factor": 1}
    plain |= {"epochs_factor": 1, "batch_factor": 1}
    for row in rows:
        points = row["minus_allreduce_points"]
        if points and all(row[key] == value for key, value in plain.items()):
            return f"{fmean(points):+.2f} points ({len(points)} seed{'s' * (len(points) != 1)})"
    return _NONE


def _trained(rows: list[dict]) -> str:
    for row in rows:
        if row["world_size"] == 8 and "gossip" in row["difference_to_allreduce_points"]:
            found = row["difference_to_allreduce_points"]["gossip"]
            return f"{found['mean']:+.2f} +- {found['half_width_95']:.2f} points"
    return _NONE


if __name__ == "__main__":
    fill_page()
