"""A run directory as `gossipgrad train` leaves it, finished, interrupted or killed."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ._format import is_number, listed
from ._json import read_json_lines

Record = dict[str, Any]
_METRICS_NAME = re.compile(r"metrics-rank(\d+)\.jsonl")
# Past this a trace is left to Perfetto: to read it here would take gigabytes of memory.
_MAX_TRACE_BYTES = 400_000_000
# A file that claims more has come to harm.
_MAX_WORLD_SIZE = 1_000_000


class Span(NamedTuple):
    """A complete event: start and end in microseconds of the trace."""

    rank: int
    track: int
    name: str
    start_us: float
    end_us: float
    attributes: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """All spans of a trace, as far as they can be read.

    Attributes:
        spans: By start.
        track_names: By rank and number of the track.
        skipped: How many events could not be read.
    """

    spans: list[Span] = field(default_factory=list)
    track_names: dict[tuple[int, int], str] = field(default_factory=dict)
    skipped: int = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks that have spans."""
        return sorted({span.rank for span in self.spans})

    def named(self, name: str) -> list[Span]:
        """The spans of that name, by start."""
        return [span for span in self.spans if span.name == name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run, as far as it could be read.

    Attributes:
        name: The directory's own name.
        world_size: How many workers it was started with, or the ranks that left metrics.
        config: The resolved options, empty when there are none.
        summary: Its summary, empty when it has not ended.
        steps: The step records of each rank, in the order written.
        epochs: The epoch records of each rank, in the order written; epochs count from 1.
        trace: The spans of all ranks.
        problems: A sentence for each file or line that is missing or could not be read.
        started_seconds: When its configuration was written, since the epoch; None: unknown.
    """

    name: str
    world_size: int
    config: Record
    summary: Record
    steps: dict[int, list[Record]]
    epochs: dict[int, list[Record]]
    trace: Spans
    problems: tuple[str, ...]
    started_seconds: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the run ended by itself."""
        return bool(self.summary) and not self.summary.get("interrupted")

    @property
    def ranks(self) -> list[int]:
        """Every rank that the run had or left metrics of."""
        return sorted({*range(self.world_size), *self.steps})


def read_run(run_dir: str | os.PathLike[str]) -> Run:
    """Read a run directory, however much of it there is.

    Missing files and truncated lines are listed in `Run.problems`, not raised: a run that was
    killed is the one that its user wants to look at.

    Raises:
        ValueError: `run_dir` is no directory or holds nothing of a run.
    """
    directory = Path(run_dir)
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is no directory; pass the directory that `gossipgrad train` wrote to"
        )
    problems: list[str] = []
    config = _read_object(directory / "config.json", problems)
    # A run writes it last: what is read after it is whole.
    summary = _read_object(directory / "summary.json", problems)
    steps, epochs = _read_metrics(directory, problems)
    if config is None and summary is None and not steps:
        raise ValueError(
            f"{directory} holds no run: there is neither config.json nor summary.json nor "
            "metrics-rank*.jsonl; pass the directory that `gossipgrad train` wrote to"
        )
    if summary is None:
        problems.append(
            "The run left no summary.json, so it was killed or is still going on. The figures are "
            "those of the metrics written so far."
        )
    recorded = (summary or {}).get("world_size") or find_key(config, "nproc")
    known = type(recorded) is int and 0 < recorded <= _MAX_WORLD_SIZE
    world_size = recorded if known else max(steps, default=0) + 1
    silent = [rank for rank in range(world_size) if rank not in steps]
    if silent:
        noun = "rank" if len(silent) == 1 else "ranks"
        problems.append(f"There are no metrics of {noun} {listed(silent)}.")
    trace = _read_trace(directory / "trace.json", problems)
    return Run(
        name=directory.resolve().name,
        world_size=world_size,
        config=config or {},
        summary=summary or {},
        steps=steps,
        epochs=epochs,
        trace=trace,
        problems=tuple(problems),
        started_seconds=_modified_seconds(directory / "config.json"),
    )


def _modified_seconds(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def find_key(tree: object, key: str) -> object:
    """The first value under `key` in nested dicts, level by level; None when there is none."""
    level = [tree]
    while level:
        dicts = [node for node in level if isinstance(node, dict)]
        for node in dicts:
            if key in node:
                return node[key]
        level = [child for node in dicts for child in node.values()]
    return None


def _read_object(path: Path, problems: list[str]) -> Record | None:
    """The JSON object in a file, or None when there is no file or no object in it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}.")
        return None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path.name} is no JSON object and was left out.")
        return None
    return value


def _read_metrics(
    directory: Path, problems: list[str]
) -> tuple[dict[int, list[Record]], dict[int, list[Record]]]:
    """The step and the epoch records of each rank that left a metrics file."""
    steps: dict[int, list[Record]] = {}
    epochs: dict[int, list[Record]] = {}
    for path in sorted(directory.glob("metrics-rank*.jsonl")):
        match = _METRICS_NAME.fullmatch(path.name)
        if not match:
            continue
        rank = int(match[1])
        try:
            records, skipped = read_json_lines(path)
        except OSError as error:
            problems.append(f"{path.name} could not be read: {error.strerror}.")
            continue
        steps[rank] = [record for record in records if record.get("event") == "step"]
        epochs[rank] = [
            _numbered_from_one(record) for record in records if record.get("event") == "epoch"
        ]
        if skipped:
            lines = "1 line of" if skipped == 1 else f"{skipped} lines of"
            problems.append(
                f"{lines} {path.name} could not be read and was left out: the worker was probably "
                "killed while it wrote."
            )
    return dict(sorted(steps.items())), dict(sorted(epochs.items()))


def _numbered_from_one(record: Record) -> Record:
    """The record with its epoch as people count; the file counts from 0, steps from 1."""
    epoch = record.get("epoch")
    return record | {"epoch": epoch + 1} if isinstance(epoch, int) else record


def _read_trace(path: Path, problems: list[str]) -> Spans:
    """The spans of a Chrome trace; none when there is no trace, or one too large to draw."""
    if path.exists() and path.stat().st_size > _MAX_TRACE_BYTES:
        problems.append(f"{path.name} is too large to draw here; open it in Perfetto.")
        return Spans()
    trace = _parse_events((_read_object(path, problems) or {}).get("traceEvents", []))
    if trace.skipped:
        events = "1 event" if trace.skipped == 1 else f"{trace.skipped} events"
        problems.append(f"{events} of {path.name} could not be read.")
    return trace


def _parse_events(events: object) -> Spans:
    """The spans among Chrome trace events, those of `merge_traces`; others are left out."""
    spans: list[Span] = []
    names: dict[tuple[int, int], str] = {}
    skipped = 0
    for event in events if isinstance(events, list) else []:
        phase = event.get("ph") if isinstance(event, dict) else None
        if phase == "X":
            span = _span(event)
            if span is None:
                skipped += 1
            else:
                spans.append(span)
        elif phase == "M" and event.get("name") == "thread_name":
            arguments = event.get("args")
            name = arguments.get("name") if isinstance(arguments, dict) else None
            if isinstance(name, str) and _has_track(event):
                names[event["pid"], event["tid"]] = name
        elif phase is None:
            skipped += 1
    spans.sort(key=lambda span: (span.start_us, -span.end_us))
    return Spans(spans=spans, track_names=names, skipped=skipped)


def _span(event: Record) -> Span | None:
    start, length, name = event.get("ts"), event.get("dur"), event.get("name")
    if not (_has_track(event) and isinstance(name, str) and is_number(start) and is_number(length)):
        return None
    attributes = event.get("args")
    return Span(
        rank=event["pid"],
        track=event["tid"],
        name=name,
        start_us=float(start),
        end_us=float(start) + max(0.0, float(length)),
        attributes=attributes if isinstance(attributes, dict) else {},
    )


def _has_track(event: Record) -> bool:
    return type(event.get("pid")) is int and type(event.get("tid")) is int
