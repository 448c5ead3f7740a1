"""Spans of a few steps, from the loop and the session, for the trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from gossipgrad.report import Trace

# Links are made and caches filled in the first steps, which are no picture of the others.
_WARM_UP_STEPS = 5
_PEERS = ("send_to", "recv_from")


class StepSpans:
    """A recorder that keeps the spans of `num_steps` steps near the start and drops the rest.

    A session numbers islands: its partners are here the ranks of the same number in `island` ranks.
    """

    def __init__(self, rank: int, *, num_steps: int, total_steps: int, island: int = 1) -> None:
        self._island, self._index = island, rank % island
        self._trace = Trace(rank) if num_steps else None
        self._num_steps, self._total_steps = num_steps, total_steps
        self._recording = False
        self.set_step(0)

    def set_step(self, after_step: int) -> None:
        """Tell how many steps this rank had made when the run was resumed; before the first."""
        left = self._total_steps - after_step - self._num_steps
        self._first = after_step + min(_WARM_UP_STEPS, max(left, 0))
        self._end = self._first + self._num_steps

    def begin(self, step: int) -> None:
        """Tell the step that starts now, counted from 1."""
        self._recording = self._first < step <= self._end

    def span(
        self, name: str, start_seconds: float, end_seconds: float, **attributes: object
    ) -> None:
        """Keep a span if a step of interest is under way; the session calls this."""
        if self._recording and self._trace is not None:
            for name_of_peer in _PEERS if self._island > 1 else ():
                if isinstance(peer := attributes.get(name_of_peer), int):
                    attributes[name_of_peer] = peer * self._island + self._index
            self._trace.span(name, start_seconds, end_seconds, **attributes)

    @contextmanager
    def measure(self, name: str, step: int) -> Iterator[None]:
        """Record the time inside the block as a span of `step`."""
        start_seconds = perf_counter()
        yield
        self.span(name, start_seconds, perf_counter(), step=step)

    def save(self, path: Path) -> None:
        """Write the spans to `path`, if any were asked for."""
        if self._trace is not None:
            self._trace.save(path)
