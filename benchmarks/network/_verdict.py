"""What gossip was to reach, and where it did not."""

from typing import Any

from ._contestants import SELDOM

OVER_BOUND = 1.05
EFFICIENCY = 0.97
HIDDEN_SHARE = 0.9  # of the compute: a bare transfer as short as that should cost nothing
# `sync` hides nothing, and so has another bound.
HIDDEN = ("gossip", "gossip, bf16 wire", "gossip, state", f"gossip, {SELDOM}")

Cell = dict[str, Any]


def shortfalls(cells: list[Cell]) -> list[str]:
    """A line for every goal that gossip misses in a cell that is not marked, and how many it met.

    The goals: at most 1.05 times max(compute, bare transfer); an efficiency of at least 0.97 where
    the bare exchange takes at most 0.9 of the compute; faster than every other contestant that
    mixes in every step. Against a contestant whose own cell is marked nothing is claimed, nor
    against a bare transfer that was not measured.
    """
    sound = [cell for cell in cells if not cell["marked"]]
    missed, checked = [], 0
    for cell in sound:
        if cell["contestant"] not in HIDDEN:
            continue
        step = cell["step_seconds_median"]
        where = (
            f"{cell['contestant']}, {cell['profile']}, p = {cell['world_size']}, "
            f"{cell['rate_bits_per_second'] / 1e6:g} Mbit/s"
        )
        if cell["bare_seconds"] is not None:
            over = step / cell["exchange_bound_seconds"]
            checked += 1
            if over > OVER_BOUND:
                missed.append(f"{where}: {over:.3f} of the bound")
            if cell["bare_seconds"] <= HIDDEN_SHARE * cell["compute_seconds"]:
                checked += 1
                if cell["efficiency"] < EFFICIENCY:
                    missed.append(f"{where}: efficiency {cell['efficiency']:.3f}")
        if cell["contestant"] != "gossip":
            continue
        for other in sound:
            if not _competes(other, cell):
                continue
            checked += 1
            if other["step_seconds_median"] <= step:
                missed.append(
                    f"{where}: {1e3 * step:.1f} ms, {other['contestant']} "
                    f"{1e3 * other['step_seconds_median']:.1f} ms"
                )
    unmarked = len([cell for cell in sound if not cell["contestant"].startswith("bare ")])
    return [
        f"{checked - len(missed)} of {checked} goals met in {unmarked} cells that are not marked",
        *(f"missed: {line}" for line in missed),
    ]


def _competes(other: Cell, cell: Cell) -> bool:
    same = ("profile", "time_factor", "size_factor", "world_size", "rate_bits_per_second")
    return (
        other["mixes_every_step"]
        and not other["contestant"].startswith("gossip")
        and all(other[key] == cell[key] for key in same)
    )
