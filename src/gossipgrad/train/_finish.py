"""The end of a run: each rank hands in its result, and the lowest that lives puts all together."""

import json
import math
import os
import platform
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from gossipgrad.comm import AskedStore
from gossipgrad.report import merge_traces, write_report

from ._config import TrainConfig, versions
from ._folder import RunDir, is_held, where_weights_are, write_whole
from ._result import Outcome, RankResult, RunFailedError, exit_code_of
from .strategies import ring_bytes

# What a rank hands in: its "result" and the signal that stopped it, or the "cause" why it has none.
End = Mapping[str, Any]
_POLL_SECONDS = 0.1
# Each of many ranks may say the same in other words.
_MOST_NOTES = 12


class Ends:
    """What ranks hand in: in the folder, and in the store."""

    def __init__(self, run_dir: RunDir, store: AskedStore) -> None:
        self.run_dir, self._store = run_dir, store

    def hand_in(self, rank: int, end: End) -> End:
        """Leave how a rank ended, and when."""
        end = {"when_seconds": time.time(), **end}
        text = json.dumps(end)
        with suppress(OSError):
            write_whole(self.run_dir.rank_result(rank), text)
        with suppress(RuntimeError):
            self._store.ask(lambda store: store.set(f"rank{rank}", text))
        return end

    def read(self, rank: int) -> End | None:
        """What a rank has handed in, None if nothing."""
        with suppress(OSError, ValueError):
            return json.loads(self.run_dir.rank_result(rank).read_text())
        key = f"rank{rank}"
        with suppress(RuntimeError):
            text = self._store.ask(lambda store: store.get(key) if store.check([key]) else None)
            return None if text is None else json.loads(text)
        return None

    def clean_up(self) -> None:
        """Remove what a run that failed has left, but not what its ranks have learned."""
        self.run_dir.invitation.unlink(missing_ok=True)
        if not any("result" in (self.read(rank) or {}) for rank in self.run_dir.ranks_seen()):
            self.run_dir.remove_partial()


def finish(config: TrainConfig, handed: Ends, rank: int, own: End) -> Outcome | None:
    """Put the run together if this is the lowest rank that lives; None once another has.

    If the one that does so dies over it, the next one begins again.
    """
    # A rank lives for as long as it holds its lock, which the system frees when its process ends.
    # Where there is no lock to look at, `lost_after_seconds` are all it gets.
    assert config.nproc is not None, "resolve the configuration first"
    ranks, begun_seconds = {*range(config.nproc), rank}, time.monotonic()
    run_dir = handed.run_dir
    while not run_dir.summary.exists() and run_dir.partial.exists():
        unseen = time.monotonic() < begun_seconds + config.lost_after_seconds
        living = {one for one in ranks if is_held(run_dir.rank_lock(one), otherwise=unseen)}
        # Read after the look at who lives: a rank hands in before it ends.
        ends = {one: end for one in ranks if (end := handed.read(one))} | {rank: own}
        results = {r: RankResult(**end["result"]) for r, end in ends.items() if "result" in end}
        if more := known_joined(results.values()).keys() - ranks:
            ranks |= more
            continue
        lost = {int(one) for result in results.values() for one in result.lost}
        passed = {r for r in ends if r not in results or results[r].left}
        passed |= {int(one) for one in results[rank].lost}
        if rank == min(living - passed | {rank}) and living - lost <= ends.keys():
            return _put_together(config, run_dir, ranks, ends, results)
        time.sleep(_POLL_SECONDS)
    return None


def _put_together(
    config: TrainConfig,
    run_dir: RunDir,
    ranks: Iterable[int],
    ends: Mapping[int, End],
    results: Mapping[int, RankResult],
) -> Outcome:
    signals = [end["stopped_by"] for end in ends.values() if end.get("stopped_by")]
    stopped_by = signal.Signals(signals[0]) if signals else None
    with_model = [one for r, one in results.items() if run_dir.rank_model(r).exists()]
    if not with_model:
        where = where_weights_are(run_dir)
        if run_dir.model.exists():
            where = f"the model is in {run_dir.model}"
        raise RunFailedError(f"another rank was lost while it put the run together: {where}")
    # A consensus if there is one, of the lowest rank that has it.
    exported = min(with_model, key=lambda result: (not result.is_consensus, result.rank))
    lost = {rank: ends.get(rank, {}) for rank in sorted({*ranks} - results.keys())}
    summary = summarize(config, run_dir, results, lost, exported=exported, stopped_by=stopped_by)
    _write(run_dir, summary, exported)
    return Outcome(
        exit_code=exit_code_of(stopped_by if summary["interrupted"] else None),
        run_dir=run_dir.path,
        summary=summary,
        report=run_dir.report,
    )


def summarize(
    config: TrainConfig,
    run_dir: RunDir,
    results: Mapping[int, RankResult],
    lost: Mapping[int, End],
    *,
    exported: RankResult,
    stopped_by: signal.Signals | None,
) -> dict[str, Any]:
    """The content of `summary.json`; figures a step are means over ranks that reached their end."""
    world_size = config.nproc or len(results)
    ranks = [results[rank] for rank in sorted(results)]
    started = [result for result in ranks if result.rank < world_size] or ranks
    # Entries of those that joined come behind those of the start.
    entries = range(max([world_size, *(rank + 1 for rank in (*results, *lost))]))
    outcomes: Counter[str] = Counter()
    for result in ranks:
        outcomes.update(result.outcomes)
    shares = [rank.shares for rank in ranks if rank.shares is not None]
    disturbed = max((one["disturbed_epochs"] for one in shares), default=0)
    notes = _notes(ranks, exported)
    if disturbed:
        notes.insert(
            0,
            "samples were assigned again as ranks joined or left; up to a chunk of batches of each "
            "rank that died may have been used twice",
        )

    def per_rank(name: str) -> list[Any]:
        return [getattr(results[rank], name) if rank in results else None for rank in entries]

    def per_step(name: str) -> float | None:
        ratios = [getattr(one, name) / one.steps_counted for one in ranks if one.steps_counted]
        return fmean(ratios) if ratios else None

    losses = {rank: _loss(rank, end, ranks, run_dir) for rank, end in lost.items()}
    shuffle: dict[str, Any] = {"shuffle": config.shuffle}
    if config.shuffle != "global":
        shuffle["shards"] = config.shards
    if config.shuffle == "ring":
        shuffle["shuffle_bytes_sent_per_step"] = per_step("shuffle_bytes_sent")
        shuffle["shuffle_late_rounds"] = sum(rank.shuffle_late_rounds for rank in ranks)
    return {
        "strategy": config.strategy,
        "world_size": world_size,
        "island": config.island,
        "job": config.job,
        "model": config.job or config.model,
        "data": config.job or config.data,
        "optimizer": config.optimizer,
        "accuracy": exported.accuracy,
        **({} if exported.best is None else {"best": exported.best}),
        "metric_name": exported.metric_name,
        "metric_format": exported.metric_format,
        "accuracy_per_rank": per_rank("own_accuracy"),
        "model_is_consensus": exported.is_consensus,
        "model_from_rank": exported.rank,
        "consensus_distance": exported.consensus_distance,
        "steps": max(result.steps for result in ranks),
        "steps_per_rank": per_rank("steps"),
        "epochs": max(result.epochs for result in ranks),
        "seconds": max(result.seconds for result in ranks),
        "samples_per_second": sum(r.samples / r.train_seconds for r in ranks if r.train_seconds),
        "step_seconds": per_step("train_seconds"),
        "bytes_sent_per_step": per_step("bytes_sent"),
        "bytes_sent_are": config.traits.bytes_are,
        "all_reduce_bytes_per_step": ring_bytes(exported.gradient_bytes, world_size),
        "exposed_seconds_per_step": per_step("exposed_seconds"),
        "mixing_seconds_per_step": None
        if exported.mixing_seconds is None
        else per_step("mixing_seconds"),
        "extra_memory_bytes": exported.extra_memory_bytes,
        **shuffle,
        "shares": {
            "samples_of_other_shares": sum(one["samples_of_other_shares"] for one in shares),
            "disturbed_epochs": disturbed,
        }
        if shares
        else None,
        "outcomes": dict(outcomes),
        "late_rounds_per_rank": per_rank("late_rounds"),
        "void_rounds_per_rank": per_rank("void_rounds"),
        "interrupted": any(result.stopped for result in started),
        "stopped_by": None if stopped_by is None else stopped_by.name,
        "lost_ranks": [*losses],
        "lost_because": {str(rank): loss.pop("cause") for rank, loss in losses.items()},
        "losses": {str(rank): loss for rank, loss in losses.items()},
        "joined": [
            {**_part_of(rank, results.get(rank), run_dir), **how, "rank": rank}
            for rank, how in known_joined(ranks).items()
        ],
        "notes": notes,
        "parameters": exported.parameters,
        "machine": machine(),
        "versions": versions(),
    }


def known_joined(results: Iterable[RankResult]) -> dict[int, dict[str, Any]]:
    """Who has joined, by what the ranks know."""
    joined = {int(rank): how for result in results for rank, how in result.joined.items()}
    return dict(sorted(joined.items()))


def _loss(rank: int, end: End, ranks: list[RankResult], run_dir: RunDir) -> dict[str, Any]:
    """Why a rank was lost, its last step by its metrics, and since when the others knew."""
    known = next((one.lost[str(rank)] for one in ranks if str(rank) in one.lost), {})
    cause = f"was taken for dead: {known['why']}" if known else "ended and wrote no result"
    return {
        "cause": end.get("cause", cause),
        "step": max((one["step"] for one in _events(run_dir, rank, "step")), default=0),
        "when_seconds": known.get("when_seconds") or end.get("when_seconds"),
        "generation": known.get("generation"),
    }


def _part_of(rank: int, result: RankResult | None, run_dir: RunDir) -> dict[str, Any]:
    """What a rank that joined did, and how it ended."""
    if result is not None:
        end = "left" if result.left else "finished"
        return {"steps": result.steps, "samples": result.samples, "end": end}
    joined, steps = (_events(run_dir, rank, kind) for kind in ("joined", "step"))
    if not (joined and steps):
        return {"steps": 0, "samples": 0, "end": "lost"}
    done = steps[-1]["step"] - joined[0]["step"]
    return {"steps": done, "samples": steps[-1]["samples"], "end": "lost"}


def _events(run_dir: RunDir, rank: int, kind: str) -> list[dict[str, Any]]:
    """Events of a kind in the metrics of a rank; a line that it could not finish does not count."""
    events: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in run_dir.metrics(rank).read_text().splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return [event for event in events if event.get("event") == kind]


def _notes(ranks: list[RankResult], exported: RankResult) -> list[str]:
    """What ranks have to say, that of the exported first; what several say, once."""
    said: dict[str, int] = {}
    for result in (exported, *ranks):
        for note in result.notes:
            said.setdefault(note, result.rank)
    notes = [f"rank {rank}: {note}" for note, rank in said.items()]
    shown = max(_MOST_NOTES, len(exported.notes))
    more = len(notes) - shown
    return notes if more <= 0 else [*notes[:shown], f"{more} more notes of other ranks"]


def _write(run_dir: RunDir, summary: dict[str, Any], exported: RankResult) -> None:
    """Write the exported model, the trace, the summary and the report."""
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
    text = json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n"
    try:
        write_whole(run_dir.summary, text)
    except OSError:
        run_dir.trace.unlink(missing_ok=True)  # room for the summary
        write_whole(run_dir.summary, text)
    run_dir.remove_partial()
    try:
        write_report(run_dir.path)
    except OSError as error:
        way_out = f"make room, and run `gossipgrad report {run_dir.path}`"
        warnings.warn(f"no report of the run: {error.strerror}; {way_out}", stacklevel=2)


def _finite(value: Any) -> Any:
    """Numbers that are not finite are null in JSON."""
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
