"""Spans of one rank: recorded in memory while it trains, saved once as JSON lines."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ._text import dumps

TRACE_FORMAT = "gossipgrad-trace"
TRACE_VERSION = 1


class Trace:
    """Records what one rank did, as named spans of time; a `gossipgrad.comm.Recorder`.

    Local: nothing is ever sent. Recording is an append to a bounded queue under a lock, about a
    microsecond, and safe from any thread. When the queue is full the oldest span makes room, so
    that the end of a run, where the trouble is, stays; `dropped` counts them and `save` writes the
    count down.

    Args:
        rank: The rank whose spans these are.
        max_spans: How many spans are kept, at some 300 bytes of memory each.

    Raises:
        ValueError: `rank` is negative or `max_spans` is not positive.

    Example:
        >>> trace = Trace(rank=0)
        >>> with trace.measure("forward", step=3):
        ...     pass
        >>> trace.span("mix", 10.0, 10.5, round=3)
        >>> trace.num_spans, trace.dropped
        (2, 0)
    """

    def __init__(self, rank: int, *, max_spans: int = 200_000) -> None:
        if rank < 0:
            raise ValueError(f"rank must be 0 or more, got {rank}")
        if max_spans < 1:
            raise ValueError(
                f"max_spans must be 1 or more, got {max_spans}; to record nothing, pass no recorder"
            )
        self.rank = rank
        self._spans: deque[tuple[str, float, float, dict[str, object]]] = deque(maxlen=max_spans)
        self._recorded = 0
        self._lock = threading.Lock()
        self._wall_clock_ns, self._perf_counter_seconds = _read_both_clocks()

    def span(
        self, name: str, start_seconds: float, end_seconds: float, **attributes: object
    ) -> None:
        """Record that `name` lasted from `start_seconds` to `end_seconds`.

        Args:
            name: What was done: "forward", "exchange", "wait", ...
            start_seconds: Start, by `time.perf_counter()`.
            end_seconds: End, on the same clock.
            attributes: What else is to be shown with the span; plain JSON values.

        Raises:
            ValueError: The span ends before it starts.
        """
        if not start_seconds <= end_seconds:
            raise ValueError(
                f"span {name!r} ends at {end_seconds} before it starts at {start_seconds}; "
                "both are readings of time.perf_counter(), the start first"
            )
        with self._lock:
            self._spans.append((name, start_seconds, end_seconds, attributes))
            self._recorded += 1

    @contextmanager
    def measure(self, name: str, **attributes: object) -> Iterator[None]:
        """Record the body of a `with` statement as one span.

        A body that raises is recorded too, with the exception's type as attribute `error`.
        """
        start_seconds = time.perf_counter()
        try:
            yield
        except BaseException as error:
            attributes["error"] = type(error).__name__
            raise
        finally:
            self.span(name, start_seconds, time.perf_counter(), **attributes)

    @property
    def dropped(self) -> int:
        """How many spans had to make room for later ones."""
        with self._lock:
            return self._recorded - len(self._spans)

    @property
    def num_spans(self) -> int:
        """How many spans are kept."""
        return len(self._spans)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the kept spans as JSON lines: a header, then one span a line.

        The header carries the rank, one reading of the wall clock and of the span clock, read
        together, and the count of dropped spans. The file appears whole or not at all. Recording
        may continue; a later `save` writes everything again.

        Returns:
            The path written.
        """
        with self._lock:
            spans = list(self._spans)
            dropped = self._recorded - len(spans)
        header = {
            "format": TRACE_FORMAT,
            "version": TRACE_VERSION,
            "rank": self.rank,
            "wall_clock_ns": self._wall_clock_ns,
            "perf_counter_seconds": self._perf_counter_seconds,
            "earliest_seconds": min((start for _, start, _, _ in spans), default=None),
            "spans": len(spans),
            "dropped": dropped,
        }
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="ascii") as file:
            file.write(dumps(header) + "\n")
            for name, start, end, attributes in spans:
                line: dict[str, object] = {"name": name, "start": start, "end": end}
                if attributes:
                    line["attributes"] = attributes
                file.write(dumps(line) + "\n")
        partial.replace(path)
        return path


def _read_both_clocks() -> tuple[int, float]:
    """Read the wall clock (ns) and the span clock (s) at one moment."""
    # The tightest of a few readings: a process that loses its core between the two calls would be
    # drawn milliseconds away from its partners.
    readings = []
    for _ in range(5):
        before = time.perf_counter()
        wall_clock_ns = time.time_ns()
        after = time.perf_counter()
        readings.append((after - before, wall_clock_ns, (before + after) / 2))
    _, wall_clock_ns, perf_counter_seconds = min(readings)
    return wall_clock_ns, perf_counter_seconds
