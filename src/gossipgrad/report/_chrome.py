"""The spans of all ranks in one Chrome trace, as Perfetto and chrome://tracing open it."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from ._text import dumps, read_json_lines
from ._trace import TRACE_FORMAT, TRACE_VERSION

_KINDS = {
    "exchange": "exchange",
    "root": "roots",
    **dict.fromkeys(("wait", "mix", "snapshot", "select", "average"), "communication"),
}


class _Span(NamedTuple):
    name: str
    start_us: float
    end_us: float
    attributes: dict[str, Any]

    @property
    def kind(self) -> str:
        """Of its track; compute for names that are not known."""
        return _KINDS.get(self.name, "compute")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """One rank's file and its header."""

    path: Path
    rank: int
    wall_clock_ns: int
    perf_counter_seconds: float
    earliest_seconds: float | None
    dropped: int

    def wall_ns(self, seconds: float) -> int:
        """The wall clock at a reading of this rank's span clock."""
        return self.wall_clock_ns + round((seconds - self.perf_counter_seconds) * 1e9)


@dataclass(frozen=True, slots=True)
class _Messages:
    """Where messages left and arrived, so that an arrow can join the two ends."""

    sent: dict[tuple[Any, ...], tuple[int, _Span]] = field(default_factory=dict)
    arrived: dict[tuple[Any, ...], tuple[int, _Span]] = field(default_factory=dict)

    def note(self, rank: int, thread: int, span: _Span) -> None:
        get = span.attributes.get
        what = (get("round"), get("bucket"))
        if get("send_to") is not None:
            self.sent[rank, get("send_to"), *what] = (thread, span)
        if get("recv_from") is not None and get("outcome") == "delivered":
            self.arrived[get("recv_from"), rank, *what] = (thread, span)

    def arrows(self) -> Iterator[dict[str, Any]]:
        """Pairs of flow events, each within its slice, never backwards in time."""
        for number, (edge, (from_thread, sent)) in enumerate(self.sent.items()):
            if edge not in self.arrived:
                continue
            to_thread, arrived = self.arrived[edge]
            # A viewer closes a slice before it looks at what happens at its very end.
            arrival_us = arrived.end_us - min(1.0, (arrived.end_us - arrived.start_us) / 2)
            if arrival_us < sent.start_us:
                continue  # the clocks of two hosts differ by more than the message took
            common = {"cat": "message", "name": "message", "id": number}
            tail = {"ts": sent.start_us, "pid": edge[0], "tid": from_thread}
            head = {"ts": round(arrival_us, 3), "pid": edge[1], "tid": to_thread}
            yield {"ph": "s", **common, **tail}
            yield {"ph": "f", "bp": "e", **common, **head}


def merge_traces(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Puts the traces that the ranks saved on one time axis, in one Chrome trace JSON file.

    A process a rank, and in it a track for computing, one for the communication that the rank
    itself works at or waits for, and one a bucket for exchanges in flight. Spans of a track that
    overlap without lying one inside the other get further lanes. Arrows lead from the exchange
    that sent a message to the one that received it. Times are microseconds from the earliest span.
    The ranks' clocks are aligned by their hosts' wall clocks, so between hosts as well as NTP
    aligns these.

    Local: reads and writes files only, with the memory of one rank's trace at a time and of the
    ends of the messages of all.

    Args:
        paths: One file of `Trace.save` a rank, in any order. A rank that died has none: leave it
            out.
        out: The file to write, by custom `trace.json`.

    Returns:
        The path written.

    Raises:
        ValueError: There is no path, a file is no trace, or two are of the same rank.
    """
    sources: dict[int, _Source] = {}
    for path in paths:
        source = _read_header(Path(path))
        other = sources.setdefault(source.rank, source)
        if other is not source:
            raise ValueError(
                f"{other.path} and {source.path} are both of rank {source.rank}; "
                "merge the traces of one run, one file a rank"
            )
    if not sources:
        raise ValueError("there is no trace to merge: paths is empty; Trace.save() writes them")
    origin_ns = min(
        (s.wall_ns(s.earliest_seconds) for s in sources.values() if s.earliest_seconds is not None),
        default=0,
    )
    skipped_lines: dict[str, int] = {}
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("w", encoding="ascii") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for number, event in enumerate(_events(sources, origin_ns, skipped_lines)):
                file.write((",\n" if number else "\n") + dumps(event))
            metadata = {
                "source": "gossipgrad",
                "origin_unix_ns": origin_ns,
                "ranks": sorted(sources),
                "dropped_spans": {str(rank): s.dropped for rank, s in sorted(sources.items())},
                "skipped_lines": skipped_lines,
            }
            file.write(f'\n],"metadata":{dumps(metadata)}}}\n')
        partial.replace(out)
    except BaseException:  # of a full disk it keeps no part
        partial.unlink(missing_ok=True)
        raise
    return out


def _events(
    sources: dict[int, _Source], origin_ns: int, skipped_lines: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """All events, a rank after another; notes the lines that could not be read."""
    messages = _Messages()
    # Perfetto knows a thread by its number alone, whatever its process, and 0 is reserved.
    thread_numbers = count(1)
    for rank in sorted(sources):
        spans, skipped_lines[str(rank)] = _read_spans(sources[rank], origin_ns)
        yield from _rank_events(rank, spans, thread_numbers, messages)
    yield from messages.arrows()


def _read_header(path: Path) -> _Source:
    """Read and check the first line of a file of `Trace.save`."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        header = json.loads(first)
        if header["format"] != TRACE_FORMAT or header["version"] != TRACE_VERSION:
            raise ValueError(header["format"], header["version"])
        return _Source(
            path=path,
            rank=header["rank"],
            wall_clock_ns=header["wall_clock_ns"],
            perf_counter_seconds=header["perf_counter_seconds"],
            earliest_seconds=header["earliest_seconds"],
            dropped=header["dropped"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not begin as a trace of version {TRACE_VERSION}; "
            "merge only files written by Trace.save() of this gossipgrad"
        ) from error


def _read_spans(source: _Source, origin_ns: int) -> tuple[list[_Span], int]:
    """A rank's spans on the common axis, by start and then the longest first; lines left out."""
    lines, skipped = read_json_lines(source.path)
    spans = []
    for line in lines[1:]:
        if not {"name", "start", "end"} <= line.keys():
            skipped += 1
            continue
        start_us, end_us = (
            (source.wall_ns(line[key]) - origin_ns) / 1000 for key in ("start", "end")
        )
        spans.append(_Span(line["name"], start_us, end_us, line.get("attributes", {})))
    spans.sort(key=lambda span: (span.start_us, -span.end_us))
    return spans, skipped


def _rank_events(
    rank: int, spans: list[_Span], numbers: Iterator[int], messages: _Messages
) -> Iterator[dict[str, Any]]:
    """The names of a rank's process and tracks, then its spans as complete events."""
    yield _metadata("process_name", rank, {"name": f"rank {rank}"})
    yield _metadata("process_sort_index", rank, {"sort_index": rank})
    tracks: dict[str, list[_Span]] = defaultdict(list)
    for span in spans:
        tracks[_track_of(span)].append(span)
    for track in sorted(tracks, key=_track_order):
        lanes = _assign_lanes(
            [(span.start_us, span.end_us) for span in tracks[track]],
            nest=not track.startswith("exchange"),
        )
        threads = list(islice(numbers, max(lanes) + 1))
        for lane, thread in enumerate(threads):
            name = track if lane == 0 else f"{track} ({lane + 1})"
            yield _metadata("thread_name", rank, {"name": name}, thread)
            yield _metadata("thread_sort_index", rank, {"sort_index": thread}, thread)
        for span, lane in zip(tracks[track], lanes, strict=True):
            if span.kind == "exchange":
                messages.note(rank, threads[lane], span)
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "ts": span.start_us,
                "dur": round(span.end_us - span.start_us, 3),
                "pid": rank,
                "tid": threads[lane],
                "args": span.attributes,
            }


def _track_of(span: _Span) -> str:
    bucket = span.attributes.get("bucket")
    if span.kind != "exchange" or bucket is None:
        return span.kind
    return f"exchange, bucket {bucket}"


def _track_order(track: str) -> tuple[int, str]:
    """Compute first, then communication, then the buckets by number and not by their text."""
    return {"compute": 0, "communication": 1}.get(track, 2), track.rjust(40)


def _metadata(name: str, rank: int, arguments: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "ts": 0, "pid": rank, "tid": thread, "args": arguments}


def _assign_lanes(spans: Sequence[tuple[float, float]], *, nest: bool) -> list[int]:
    """Spreads spans over as few lanes as keep each lane readable."""
    # A viewer draws the spans of a lane as a stack of calls: none may begin inside another and end
    # after it. With `nest` a span may lie inside a longer one; without, spans never overlap.
    open_ends: list[list[float]] = []  # by lane, of the spans not over yet, the innermost last
    lanes = []
    for start, end in spans:
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        fitting = (
            lane for lane, ends in enumerate(open_ends) if not ends or (nest and end <= ends[-1])
        )
        lane = next(fitting, len(open_ends))
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(end)
        lanes.append(lane)
    return lanes
