"""A run's folder as `gossipgrad train` leaves it, finished, interrupted or killed."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ._text import is_number, listed, read_json_lines

Record = dict[str, Any]
# Past this a trace is left to Perfetto: to read it here would take gigabytes of memory.
_MAX_TRACE_BYTES = 400_000_000
# A file that claims more has come to harm.
_MAX_WORLD_SIZE = 1_000_000


class Span(NamedTuple):
    """A complete event of the trace; its track has a number and a name."""

    rank: int
    track: tuple[int, str]
    name: str
    start_us: float
    end_us: float
    attributes: Record


class Run(NamedTuple):
    """One run, as far as it could be read."""

    name: str  # the folder's own name
    world_size: int  # how many workers it was started with, or the ranks that left metrics
    config: Record  # the resolved options, empty when there are none
    summary: Record  # its summary, empty when it has not ended
    steps: dict[int, list[Record]]  # the step records of each rank, in the order written
    epochs: dict[int, list[Record]]
    spans: list[Span]  # of the trace, all ranks, by start
    problems: list[str]  # a sentence for each file or line that is missing or could not be read
    started_seconds: float | None

    @property
    def is_finished(self) -> bool:
        """Whether the run ended by itself."""
        return bool(self.summary) and not self.summary.get("interrupted")

    @property
    def ranks(self) -> list[int]:
        """Every rank that the run had or left metrics of."""
        return sorted({*range(self.world_size), *self.steps})

    @property
    def island(self) -> int:
        """How many ranks share a replica."""
        size = self.config.get("island")
        return size if type(size) is int and 0 < size <= self.world_size else 1

    @property
    def workers(self) -> str:
        """How many it was started with, in words."""
        text = f"{self.world_size} worker{'s' * (self.world_size != 1)}"
        return text if self.island == 1 else f"{text} in islands of {self.island}"

    def spans_named(self, name: str) -> list[Span]:
        """The spans of that name, by start."""
        return [span for span in self.spans if span.name == name]


def read_run(run_dir: str | os.PathLike[str]) -> Run:
    """Read a run's folder, however much of it there is."""
    # Missing files and truncated lines become `problems`, no error: a run that was killed is the
    # one that its user wants to look at.
    folder = Path(run_dir)
    way_out = "pass the folder that `gossipgrad train` wrote to"
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; {way_out}")
    problems: list[str] = []
    config = _read_object(folder / "config.json", problems)
    # A run writes it last: what is read after it is whole.
    summary = _read_object(folder / "summary.json", problems)
    steps, epochs = _read_metrics(folder, problems)
    if config is None and summary is None and not steps:
        raise ValueError(
            f"{folder} holds no run: there is neither config.json nor summary.json nor "
            f"metrics-rank*.jsonl; {way_out}"
        )
    if summary is None:
        problems.append(
            "The run left no summary.json, so it was killed or is still going on. The figures are "
            "those of the metrics written so far."
        )
    recorded = (summary or {}).get("world_size") or (config or {}).get("nproc")
    is_known = type(recorded) is int and 0 < recorded <= _MAX_WORLD_SIZE
    world_size = recorded if is_known else max(steps, default=0) + 1
    silent = [rank for rank in range(world_size) if rank not in steps]
    if silent:
        noun = "rank" if len(silent) == 1 else "ranks"
        problems.append(f"There are no metrics of {noun} {listed(silent)}.")
    started = folder / "config.json"
    return Run(
        name=folder.resolve().name,
        world_size=world_size,
        config=config or {},
        summary=summary or {},
        steps=steps,
        epochs=epochs,
        spans=_read_trace(folder / "trace.json", problems),
        problems=problems,
        started_seconds=started.stat().st_mtime if started.exists() else None,
    )


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
    folder: Path, problems: list[str]
) -> tuple[dict[int, list[Record]], dict[int, list[Record]]]:
    """The step and the epoch records of each rank that left a metrics file."""
    steps: dict[int, list[Record]] = {}
    epochs: dict[int, list[Record]] = {}
    found = {
        int(match[1]): path
        for path in folder.glob("metrics-rank*.jsonl")
        if (match := re.fullmatch(r"metrics-rank(\d+)\.jsonl", path.name))
    }
    for rank, path in sorted(found.items()):
        try:
            records, skipped = read_json_lines(path)
        except OSError as error:
            problems.append(f"{path.name} could not be read: {error.strerror}.")
            continue
        steps[rank] = [one for one in records if one.get("event") == "step"]
        epochs[rank] = [_count_from_one(one) for one in records if one.get("event") == "epoch"]
        if skipped:
            lines = "1 line of" if skipped == 1 else f"{skipped} lines of"
            problems.append(
                f"{lines} {path.name} could not be read and was left out: the worker was probably "
                "killed while it wrote."
            )
    return steps, epochs


def _count_from_one(record: Record) -> Record:
    """The record with its epoch as people count; the file counts from 0, steps from 1."""
    epoch = record.get("epoch")
    return record | {"epoch": epoch + 1} if isinstance(epoch, int) else record


def _read_trace(path: Path, problems: list[str]) -> list[Span]:
    """The spans of a Chrome trace; none when there is no trace, or one too large to draw."""
    if path.exists() and path.stat().st_size > _MAX_TRACE_BYTES:
        problems.append(f"{path.name} is too large to draw here; open it in Perfetto.")
        return []
    events = (_read_object(path, problems) or {}).get("traceEvents")
    spans, skipped = _spans_of(events if isinstance(events, list) else [])
    if skipped:
        noun = "1 event" if skipped == 1 else f"{skipped} events"
        problems.append(f"{noun} of {path.name} could not be read.")
    return spans


def _spans_of(events: Iterable[Any]) -> tuple[list[Span], int]:
    """The spans among Chrome trace events, by start, and how many events could not be read."""
    spans: list[Span] = []
    tracks: dict[tuple[int, int], str] = {}
    skipped = 0
    for event in events:
        # `merge_traces` writes the names of a rank's tracks before its spans.
        match event:
            case {"ph": "X", "pid": int(rank), "tid": int(track), "name": str(name)} if is_number(
                start := event.get("ts")
            ) and is_number(length := event.get("dur")):
                attributes = event.get("args")
                spans.append(
                    Span(
                        rank=rank,
                        track=(track, tracks.get((rank, track), f"track {track}")),
                        name=name,
                        start_us=float(start),
                        end_us=float(start) + max(0.0, float(length)),
                        attributes=attributes if isinstance(attributes, dict) else {},
                    )
                )
            case {"ph": "M", "name": "thread_name", "pid": int(rank), "tid": int(track)}:
                arguments = event.get("args")
                if isinstance(arguments, dict) and isinstance(arguments.get("name"), str):
                    tracks[rank, track] = arguments["name"]
            case {"ph": str(phase)} if phase != "X":
                pass
            case _:
                skipped += 1
    spans.sort(key=lambda span: (span.start_us, -span.end_us))
    return spans, skipped
