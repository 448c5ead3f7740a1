"""The interface of a recorder of spans; `gossipgrad.report` has the one that writes a trace."""

from typing import Protocol, runtime_checkable

__all__ = ["Recorder"]


@runtime_checkable
class Recorder(Protocol):
    """Records named spans of time; cheap and thread-safe."""

    def span(
        self, name: str, start_seconds: float, end_seconds: float, **attributes: object
    ) -> None:
        """Record that `name` ran from start to end, in `time.perf_counter` seconds."""
        ...
