"""Who has claimed which batches of one share: what the store holds of it, and how that changes."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Batches in a row that one rank has claimed; it trains on them in their order.

    Attributes:
        rank: Who.
        generation: The one of the membership in which it claimed them, the last one if in several.
        start: The first batch.
        end: Behind the last.
        used: How many of them it is known to have trained on.
    """

    rank: int
    generation: int
    start: int
    end: int
    used: int


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The membership as one rank knows it when it asks.

    Attributes:
        rank: This rank.
        generation: The generation that it is in.
        living: The ranks that take part, rising.
    """

    rank: int
    generation: int
    living: tuple[int, ...]

    def counts_out(self, span: Span) -> bool:
        """Whether a claim is that of a rank which is gone, and not of one that came later."""
        return span.rank not in self.living and span.generation < self.generation


def parse(text: str) -> list[Span]:
    """What `to_text` wrote; nothing is claimed in an empty text.

    Raises:
        ValueError: It is no such text.
    """
    if not text:
        return []
    try:
        return [Span(*map(int, values)) for values in json.loads(text)]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the store holds {text[:80]!r} where claims of samples are kept: give each dealer of "
            "a run a name of its own"
        ) from error


def to_text(spans: Sequence[Span]) -> str:
    """Claims as text, for the store."""
    return json.dumps(spans, separators=(",", ":"))


def free_parts(spans: Sequence[Span], part: range, view: View) -> list[range]:
    """What of a part nobody has claimed, or nobody who lives and has not trained on it yet."""
    parts, at = [], part.start
    for span in spans:
        end = span.start + span.used if view.counts_out(span) else span.end
        if span.start > at:
            parts.append(range(at, min(span.start, part.stop)))
        at = max(at, end)
        if at >= part.stop:
            break
    parts.append(range(at, part.stop))
    return [free for free in parts if free]


def claimed(spans: Sequence[Span], part: range, view: View, *, used: int = 0) -> list[Span]:
    """The claims with a free part claimed by this rank; what a rank that is gone had of it ends."""
    assert part in free_parts(spans, part, view), f"{part} is not free in {spans}"
    kept = [Span(view.rank, view.generation, part.start, part.stop, used)]
    for span in spans:
        if span.end <= part.start or span.start >= part.stop:
            kept.append(span)
            continue
        if span.start < part.start:
            before = part.start - span.start
            kept.append(span._replace(end=part.start, used=min(span.used, before)))
        if span.end > part.stop:
            kept.append(span._replace(start=part.stop, used=0))
    return _merged(sorted(kept, key=lambda span: span.start))


def told(spans: Sequence[Span], used: Iterable[range], view: View) -> list[Span]:
    """The claims with what this rank has trained on, claimed before or not.

    What others have claimed meanwhile stays theirs.
    """
    used = list(used)
    own = [
        span._replace(used=max(span.used, _covered(span, used))) if span.rank == view.rank else span
        for span in spans
    ]
    for part in used:
        for free in free_parts(own, part, view):
            own = claimed(own, free, view, used=len(free))
    return _merged(own)


def begun(spans: Sequence[Span], part: range, view: View) -> list[range]:
    """What of a part ranks had claimed that are gone: they may have trained on it, untold."""
    parts = [
        range(max(span.start + span.used, part.start), min(span.end, part.stop))
        for span in spans
        if view.counts_out(span)
    ]
    return [part for part in parts if part]


def _covered(span: Span, used: Iterable[range]) -> int:
    end = span.start
    for part in sorted(used, key=lambda part: part.start):
        if part.start <= end:
            end = max(end, part.stop)
    return min(end, span.end) - span.start


def _merged(spans: Sequence[Span]) -> list[Span]:
    """As few claims as say the same."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.rank == span.rank
            and last.end == span.start
            and last.used == last.end - last.start
        ):
            merged[-1] = Span(
                last.rank,
                max(last.generation, span.generation),
                last.start,
                span.end,
                last.used + span.used,
            )
        else:
            merged.append(span)
    return merged
