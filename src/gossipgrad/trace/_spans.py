"""The spans of a Chrome trace, as far as they can be read."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ._format import is_number

Record = dict[str, Any]


class Span(NamedTuple):
    """A complete event: what one rank did from when to when, in microseconds of the trace."""

    rank: int
    track: int
    name: str
    start_us: float
    end_us: float
    attributes: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """All spans of a trace.

    Attributes:
        spans: By start.
        track_names: What the tracks are called, by rank and number.
        skipped: How many events were none that can be read.
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


def parse_events(events: object) -> Spans:
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
            if isinstance(name, str) and _is_place(event):
                names[event["pid"], event["tid"]] = name
        elif phase is None:
            skipped += 1
    spans.sort(key=lambda span: (span.start_us, -span.end_us))
    return Spans(spans=spans, track_names=names, skipped=skipped)


def _span(event: Record) -> Span | None:
    start, length, name = event.get("ts"), event.get("dur"), event.get("name")
    if not (_is_place(event) and isinstance(name, str) and is_number(start) and is_number(length)):
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


def _is_place(event: Record) -> bool:
    return type(event.get("pid")) is int and type(event.get("tid")) is int
