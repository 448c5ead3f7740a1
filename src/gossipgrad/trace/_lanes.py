"""Which row of a timeline a span is drawn on."""

from collections.abc import Sequence

KIND_OF_NAME = {
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "data": "compute",
    "evaluate": "compute",
    "exchange": "exchange",
    "wait": "communication",
    "mix": "communication",
    "snapshot": "communication",
    "select": "communication",
    "average": "communication",
    "root": "roots",
}


def kind_of(name: str) -> str:
    """The kind of track a span of that name belongs to; compute for names we do not know."""
    return KIND_OF_NAME.get(name, "compute")


def assign_lanes(spans: Sequence[tuple[float, float]], *, nest: bool) -> list[int]:
    """Spread spans over as few lanes as keep each lane readable.

    A viewer draws the spans of a lane as a stack of calls: a span that begins inside another and
    ends after it has no place there. With `nest`, a span may lie on a lane inside a longer one;
    without it, the spans of a lane never overlap.

    Args:
        spans: Start and end of each, sorted by start and, for equal starts, the longest first.
        nest: Whether a lane may hold a span inside another.

    Returns:
        The lane of each span, counted from 0; the lowest lane that fits.
    """
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
