"""Where spans of time go; `gossipgrad.trace` has the recorder that writes them down."""

from typing import Protocol, runtime_checkable

__all__ = ["Recorder"]


@runtime_checkable
class Recorder(Protocol):
    """Takes named spans of time; cheap, thread-safe, and never in the way of training."""

    def span(
        self, name: str, start_seconds: float, end_seconds: float, **attributes: object
    ) -> None:
        """Notes that `name` went on from start to end, in `time.perf_counter` seconds."""
        ...
