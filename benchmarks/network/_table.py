"""The cells as a table in the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from ._kinds import CONTESTANTS, PAYLOADS

_PAYLOADS = ("gossip", "gossip, bf16 wire", *(n for n in CONTESTANTS if n in PAYLOADS))


def print_table(cells: list[dict[str, Any]]) -> None:
    """A table a profile and rate, a row a contestant, a column a world size; then payloads."""
    places = {
        (c["profile"], c["time_factor"], c["size_factor"], c["rate_bits_per_second"]) for c in cells
    }
    console = Console(width=140)
    for place in sorted(places):
        console.print(_table(place, [c for c in cells if _place(c) == place]))
    payloads = [c for c in cells if c["contestant"] in _PAYLOADS and c["error"] is None]
    measured = {(_place(c), c["world_size"]) for c in payloads if "state" in c["contestant"]}
    if measured:
        console.print(
            _payload_table([c for c in payloads if (_place(c), c["world_size"]) in measured])
        )


def _place(cell: dict[str, Any]) -> tuple[str, float, float, float]:
    return (
        *(cell["profile"], cell["time_factor"], cell["size_factor"]),
        cell["rate_bits_per_second"],
    )


def _table(place: tuple[str, float, float, float], cells: list[dict[str, Any]]) -> Table:
    profile, times, sizes, rate = place
    compute = max(cell["compute_seconds"] for cell in cells)
    table = Table(
        title=f"{profile} (times x {times:g}, sizes x {sizes:g}), compute {1e3 * compute:.0f} ms, "
        f"{rate / 1e6:g} Mbit/s; step in ms, efficiency, step / bound; * marked"
    )
    world_sizes = sorted({cell["world_size"] for cell in cells})
    table.add_column("contestant")
    for world_size in world_sizes:
        table.add_column(f"p = {world_size}", justify="right")
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        by_name.setdefault(cell["contestant"], {})[cell["world_size"]] = cell
    for name, by_size in by_name.items():
        table.add_row(name, *(_text(by_size.get(world_size)) for world_size in world_sizes))
    return table


def _payload_table(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="What gossip sends against what a step takes; * marked")
    columns = ("place", "payload", "MB a step", "bare transfer, ms", "step, ms", "efficiency")
    for column in (*columns, "memory, MB"):
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for cell in cells:
        bare, memory = cell["bare_seconds"], cell.get("memory_bytes")
        table.add_row(
            f"{cell['profile']}, p = {cell['world_size']}, "
            f"{cell['rate_bits_per_second'] / 1e6:g} Mbit/s",
            cell["contestant"],
            f"{cell['bytes_on_wire'] / 1e6:.2f}",
            "-" if bare is None else f"{1e3 * bare:.0f}",
            f"{1e3 * cell['step_seconds_median']:.0f}" + "*" * cell["marked"],
            "-" if cell["efficiency"] is None else f"{100 * cell['efficiency']:.1f} %",
            "-" if memory is None else f"{memory / 1e6:.1f}",
        )
    return table


def _text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if cell["error"] is not None:
        return cell["error"][:40]
    low, high = min(cell["step_seconds"]), max(cell["step_seconds"])
    text = f"{1e3 * cell['step_seconds_median']:.0f} ({1e3 * low:.0f}..{1e3 * high:.0f})"
    if cell["efficiency"] is not None:
        text += f" {100 * cell['efficiency']:.0f} %"
    if cell["exchange_bound_seconds"] is not None:
        text += f" {cell['step_seconds_median'] / cell['exchange_bound_seconds']:.2f}x"
    return text + ("*" if cell["marked"] else "")
