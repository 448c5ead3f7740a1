"""Rows of `benchmarks.virtual_ranks`: cells of one kind, seed by seed."""

import math
import statistics
from itertools import zip_longest

KEY = ("model", "world_size", "strategy", "lr_factor", "epochs_factor", "batch_factor")
DISTANCES_PER_EPOCH = 4
# All-reduce at the usual rate is what the others are compared with.
_OWN = ("strategy", "lr_factor")


def table(results: list[dict]) -> list[dict]:
    """One row a model, world size and strategy, over as many seeds as there are.

    A run that diverged has ended there; its accuracy counts on as it was then.
    """
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        groups.setdefault(tuple(result[field] for field in KEY), []).append(result)
    baseline = {
        (*(r[field] for field in KEY if field not in _OWN), r["seed"]): r["accuracy"][-1]
        for r in results
        if r["strategy"] == "allreduce" and r["lr_factor"] == 1
    }
    rows = []
    for key, found in sorted(groups.items()):
        own = dict(zip(KEY, key, strict=True))
        beside = tuple(value for field, value in own.items() if field not in _OWN)
        found.sort(key=lambda r: r["seed"])
        final = [r["accuracy"][-1] for r in found]
        paired = [
            100 * (r["accuracy"][-1] - baseline[*beside, r["seed"]])
            for r in found
            if (*beside, r["seed"]) in baseline
        ]
        replicas = [accuracy for r in found for accuracy in r["replica_accuracy"]]
        rows.append(
            {
                **own,
                "seeds": [r["seed"] for r in found],
                "accuracy": final,
                "accuracy_mean": round(statistics.fmean(final), 5),
                "accuracy_sd": round(statistics.stdev(final), 5) if len(final) > 1 else None,
                "minus_allreduce_points": [round(d, 3) for d in paired],
                "minus_allreduce_points_mean": round(statistics.fmean(paired), 3)
                if paired
                else None,
                "accuracy_by_epoch_mean": _mean_by_epoch([r["accuracy"] for r in found]),
                "replica_accuracy_mean": round(statistics.fmean(replicas), 5),
                "loss": [_finite(r["loss"][-1]) for r in found],
                "diverged_at_epoch": [_diverged(r) for r in found],
                "consensus_distance_by_epoch": [_distances(r) for r in found],
                "seconds": [round(r["seconds"], 1) for r in found],
            }
        )
    return rows


def merged(rows: list[dict], published: list[dict]) -> tuple[list[dict], list[dict]]:
    """Rows that are here, and those published that hold more.

    A published row gives way to one over the same seeds or more of them, as often compared with
    all-reduce.

    Returns:
        All rows in their order; of them, those that stay as they were published.
    """
    here = {_key(row): row for row in rows}
    stay = [row for row in published if not _covers(here.get(_key(row)), row)]
    return sorted((here | {_key(row): row for row in stay}).values(), key=_key), stay


def _key(row: dict) -> tuple:
    return tuple(row[field] for field in KEY)


def _covers(row: dict | None, published: dict) -> bool:
    return (
        row is not None
        and set(row["seeds"]) >= set(published["seeds"])
        and len(row["minus_allreduce_points"]) >= len(published["minus_allreduce_points"])
    )


def _mean_by_epoch(curves: list[list[float]]) -> list[float]:
    """Mean over seeds, each curve that ended early held at its last value."""
    held = [zip_longest(curve, range(max(map(len, curves)))) for curve in curves]
    filled = [
        [curve[-1] if value is None else value for value, _ in pairs]
        for curve, pairs in zip(curves, held, strict=True)
    ]
    return [round(statistics.fmean(values), 5) for values in zip(*filled, strict=True)]


def _diverged(result: dict) -> int | None:
    return None if math.isfinite(result["loss"][-1]) else len(result["loss"])


def _distances(result: dict) -> list[float | None]:
    """At the end of each epoch."""
    ends = result["distances"][DISTANCES_PER_EPOCH - 1 :: DISTANCES_PER_EPOCH]
    return [_finite(distance) for _, distance in ends]


def _finite(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
