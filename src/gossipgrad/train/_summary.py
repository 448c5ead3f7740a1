"""Puts a run together from what its ranks handed in."""

import json
import math
import os
import platform
import signal
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from gossipgrad.report import merge_traces, write_report

from ._config import TrainConfig
from ._folder import RunDir, write_whole
from ._result import RankResult
from ._versions import versions
from .strategies import ring_bytes

# Each of many ranks may say the same in other words.
_MOST_NOTES = 12


def compose(
    config: TrainConfig,
    results: Mapping[int, RankResult],
    lost: Mapping[int, str],
    *,
    world_size: int,
    exported: RankResult,
    stopped_by: signal.Signals | None,
    run_dir: RunDir | None = None,
    when_seconds: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """The content of `summary.json`.

    Figures a step are means over the ranks that reached their end. `accuracy` is that of the
    exported model, whichever the strategy.
    """
    ranks = list(results.values())
    started = [result for rank, result in results.items() if rank < world_size] or ranks
    # Entries of those that joined come behind those of the start.
    places = max([world_size, *(rank + 1 for rank in (*results, *lost))])
    outcomes: Counter[str] = Counter()
    for result in ranks:
        outcomes.update(result.outcomes)
    shares = _shares(ranks)
    return {
        "strategy": config.strategy,
        "world_size": world_size,
        "job": config.job,
        "model": config.job or config.model,
        "data": config.job or config.data,
        "optimizer": config.optimizer,
        "accuracy": exported.accuracy,
        **({} if exported.best is None else {"best": exported.best}),
        "metric_name": exported.metric_name,
        "metric_format": exported.metric_format,
        "accuracy_per_rank": [
            results[rank].own_accuracy if rank in results else None for rank in range(places)
        ],
        "model_is_consensus": exported.is_consensus,
        "model_from_rank": exported.rank,
        "consensus_distance": exported.consensus_distance,
        "steps": max(result.steps for result in ranks),
        **_by_rank(results, places, "steps"),
        "epochs": max(result.epochs for result in ranks),
        "seconds": max(result.seconds for result in ranks),
        "samples_per_second": sum(_ratio(r.samples, r.train_seconds) or 0.0 for r in ranks),
        "step_seconds": _mean_ratio(ranks, "train_seconds", "steps_counted"),
        "bytes_sent_per_step": _mean_ratio(ranks, "bytes_sent", "steps_counted"),
        "bytes_sent_are": config.traits.bytes_are,
        "all_reduce_bytes_per_step": ring_bytes(exported.gradient_bytes, world_size),
        "exposed_seconds_per_step": _mean_ratio(ranks, "exposed_seconds", "steps_counted"),
        "mixing_seconds_per_step": None
        if exported.mixing_seconds is None
        else _mean_ratio(ranks, "mixing_seconds", "steps_counted"),
        "extra_memory_bytes": exported.extra_memory_bytes,
        **_shuffle(config, ranks),
        "shares": shares,
        "outcomes": dict(outcomes),
        **_by_rank(results, places, "late_rounds", "void_rounds"),
        "interrupted": any(result.stopped for result in started),
        "stopped_by": None if stopped_by is None else stopped_by.name,
        "lost_ranks": sorted(lost),
        "lost_because": {str(rank): lost[rank] for rank in sorted(lost)},
        "losses": _losses(ranks, lost, run_dir, when_seconds or {}),
        "joined": _joined(results, run_dir),
        "notes": [*_note_on_shares(shares), *_notes(ranks, exported)],
        "parameters": exported.parameters,
        "machine": machine(),
        "versions": versions(),
    }


def choose_exported(results: Mapping[int, RankResult]) -> RankResult:
    """Whose model to export: a consensus if there is one, of the lowest rank that has it."""
    return min(results.values(), key=lambda result: (not result.is_consensus, result.rank))


def known_joined(results: Iterable[RankResult]) -> dict[int, dict[str, Any]]:
    """Who has joined, by what the ranks know."""
    joined = {int(rank): how for result in results for rank, how in result.joined.items()}
    return dict(sorted(joined.items()))


def _losses(
    ranks: list[RankResult],
    lost: Mapping[int, str],
    run_dir: RunDir | None,
    when_seconds: Mapping[int, float],
) -> dict[str, dict[str, Any]]:
    """For each lost rank its last step, by its metrics, and since when the others knew."""
    losses: dict[str, dict[str, Any]] = {}
    for rank in sorted(lost):
        known = [one.lost[str(rank)] for one in ranks if str(rank) in one.lost]
        last = {} if run_dir is None else _last_step(run_dir, rank)
        losses[str(rank)] = {
            "step": last.get("step", 0),
            "when_seconds": (known[0]["when_seconds"] if known else None) or when_seconds.get(rank),
            "generation": known[0]["generation"] if known else None,
        }
    return losses


def _last_step(run_dir: RunDir, rank: int) -> dict[str, Any]:
    """The last step in the metrics of a rank; a line that it could not finish does not count."""
    with suppress(OSError):
        for line in reversed(run_dir.metrics(rank).read_text().splitlines()):
            with suppress(ValueError):
                if (event := json.loads(line)).get("event") == "step":
                    return event
    return {}


def _joined(results: Mapping[int, RankResult], run_dir: RunDir | None) -> list[dict[str, Any]]:
    """For each rank that joined: when, from whom, what it did, and how it ended."""
    return [
        {
            **{name: how[name] for name in ("when_seconds", "from_rank", "generation")},
            "rank": rank,
            **_part_of(rank, results.get(rank), run_dir),
        }
        for rank, how in known_joined(results.values()).items()
    ]


def _part_of(rank: int, result: RankResult | None, run_dir: RunDir | None) -> dict[str, Any]:
    if result is not None:
        end = "left" if result.left else "finished"
        return {"steps": result.steps, "samples": result.samples, "end": end}
    last = {} if run_dir is None else _last_step(run_dir, rank)
    begun = step = last.get("step", 0)
    if run_dir is not None:
        with suppress(KeyError, OSError, ValueError):
            begun = json.loads(run_dir.rank_joined(rank).read_text())["step"]
    return {"steps": max(0, step - begun), "samples": last.get("samples", 0), "end": "lost"}


def _shares(ranks: list[RankResult]) -> dict[str, Any] | None:
    """The elastic statistics of all ranks together; None without elastic batches."""
    shares = [rank.shares for rank in ranks if rank.shares is not None]
    if not shares:
        return None
    return {
        "samples_of_other_shares": sum(one["samples_of_other_shares"] for one in shares),
        "disturbed_epochs": max(one["disturbed_epochs"] for one in shares),
    }


def _note_on_shares(shares: Mapping[str, Any] | None) -> list[str]:
    if shares is None or not shares["disturbed_epochs"]:
        return []
    return [
        "samples were assigned again as ranks joined or left; up to a chunk of batches of each "
        "rank that died may have been used twice"
    ]


def _by_rank(
    results: Mapping[int, RankResult], places: int, *names: str
) -> dict[str, list[int | None]]:
    """Figures of every rank, None of one that did not come to its end."""
    return {
        f"{name}_per_rank": [
            getattr(results[rank], name) if rank in results else None for rank in range(places)
        ]
        for name in names
    }


def _notes(ranks: list[RankResult], exported: RankResult) -> list[str]:
    """What ranks have to say, that of the exported first; what several say, once."""
    said: dict[str, int] = {}
    for result in (exported, *sorted(ranks, key=lambda result: result.rank)):
        for note in result.notes:
            said.setdefault(note, result.rank)
    notes = [f"rank {rank}: {note}" for note, rank in said.items()]
    shown = max(_MOST_NOTES, len(exported.notes))
    more = len(notes) - shown
    return notes if more <= 0 else [*notes[:shown], f"{more} more notes of other ranks"]


def _shuffle(config: TrainConfig, ranks: list[RankResult]) -> dict[str, Any]:
    figures: dict[str, Any] = {"shuffle": config.shuffle}
    if config.shuffle != "global":
        figures["shards"] = config.shards
    if config.shuffle == "ring":
        figures |= {
            "shuffle_bytes_sent_per_step": _mean_ratio(
                ranks, "shuffle_bytes_sent", "steps_counted"
            ),
            "shuffle_late_rounds": sum(rank.shuffle_late_rounds for rank in ranks),
        }
    return figures


def finish(run_dir: RunDir, summary: dict[str, Any], exported: RankResult) -> Path:
    """Write the exported model, the trace, the summary and the report; returns the report.

    A full disk takes the trace or the report with a warning, and never the model or the summary.
    """
    run_dir.rank_model(exported.rank).replace(run_dir.model)
    for other in run_dir.partial.glob("model-rank*"):  # room for what follows
        other.unlink(missing_ok=True)
    if traces := sorted(run_dir.partial.glob("trace-rank*.jsonl")):
        try:
            merge_traces(traces, run_dir.trace)
        except (OSError, ValueError) as error:
            warnings.warn(f"no trace of the run: {error}", stacklevel=2)
        for trace in traces:
            trace.unlink(missing_ok=True)
    # A page that is served ends with the summary, so it comes last of all that the page reads.
    try:
        write_json(run_dir.summary, summary)
    except OSError:
        run_dir.trace.unlink(missing_ok=True)  # room for the summary
        write_json(run_dir.summary, summary)
    run_dir.remove_partial()
    try:
        write_report(run_dir.path)
    except OSError as error:
        way_out = f"make room, and run `gossipgrad report {run_dir.path}`"
        warnings.warn(f"no report of the run: {error.strerror}; {way_out}", stacklevel=2)
    return run_dir.report


def write_json(path: Path, value: object) -> None:
    """Write JSON so that the file is whole or not there; numbers that are not finite are null."""
    write_whole(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine() -> dict[str, Any]:
    """The machine that the summary was written on."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _ratio(value: int | float, by: int | float) -> float | None:
    return value / by if by else None


def _mean_ratio(ranks: list[RankResult], value: str, by: str) -> float | None:
    ratios = [_ratio(getattr(result, value), getattr(result, by)) for result in ranks]
    known = [ratio for ratio in ratios if ratio is not None]
    return fmean(known) if known else None
