"""What a trace shows: who met whom beside what the schedule says, and the steps rank by rank."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from gossipgrad.topology import by_name

from ._figures import joined_ranks, strategy_is
from ._run import Run, Span
from ._text import Drawing, listed, number

Rounds = list[list[int]]
_NOBODY = -1
# A rank times a round is one number in the page.
_MAX_NUMBERS = 50_000
_MAX_TABLE_RANKS = 16
# A square a pair of ranks: more are finer than a screen, and their product is slow in a browser.
_MAX_MIXED_RANKS = 1024
_STEPS_SHOWN = 3
_MAX_TIMELINE_RANKS = 16
# These stop every worker: a window with one of them shows no ordinary step.
_UNUSUAL = frozenset({"evaluate", "average"})


def too_many_ranks(run: Run) -> str:
    """The reason if a run is too large to draw who met whom; else empty."""
    if run.world_size <= _MAX_MIXED_RANKS or not run.spans_named("exchange"):
        return ""
    return (
        f"{run.name} has {run.world_size:,} ranks: who met whom is drawn for up to "
        f"{_MAX_MIXED_RANKS:,}. trace.json has all exchanges, and `gossipgrad.topology.analyse` "
        "computes how a schedule mixes."
    )


def mixing(run: Run) -> Drawing | None:
    """From which rank each took a delivered exchange, round by round, and by the schedule."""
    spans = run.spans_named("exchange")
    joined = [record.get("rank") for record in joined_ranks(run)]
    world_size = max([run.world_size, *(rank + 1 for rank in joined if type(rank) is int)])
    if world_size > _MAX_MIXED_RANKS:
        return None
    received: dict[tuple[int, int], int] = {}
    rounds_of: dict[int, set[int]] = {}
    for span in spans:
        round, other = span.attributes.get("round"), span.attributes.get("recv_from")
        if type(round) is not int or not 0 <= span.rank < world_size:
            continue
        rounds_of.setdefault(span.rank, set()).add(round)
        was_delivered = span.attributes.get("outcome", "delivered") == "delivered"
        if was_delivered and type(other) is int and 0 <= other < world_size:
            received[round, span.rank] = other
    if not rounds_of:
        return None
    # At its ends a trace has rounds of some ranks alone.
    first = max(min(rounds) for rounds in rounds_of.values())
    last = min(max(rounds) for rounds in rounds_of.values())
    rounds = range(first, min(last + 1, first + max(1, _MAX_NUMBERS // world_size)))
    if not rounds:
        return None
    ranks = range(world_size)
    observed = [[received.get((round, rank), _NOBODY) for rank in ranks] for round in rounds]
    has_changed = any(span.attributes.get("generation", 0) != 0 for span in spans)
    expected, period = (None, None) if has_changed else _schedule_of(run, rounds, world_size)
    silent = [rank for rank in ranks if rank not in rounds_of]
    counts = Counter((rank, other) for row in observed for rank, other in enumerate(row))
    listed_ranks = ranks[:_MAX_TABLE_RANKS]
    return Drawing(
        title="Who met whom",
        description=_describe_mixing(observed, expected, silent, has_changed=has_changed),
        payload={
            "worldSize": world_size,
            "firstRound": first,
            "observed": observed,
            "expected": expected,
            "silent": silent,
            "period": period,
        },
        head=["Rank", *(f"from {other}" for other in listed_ranks)],
        rows=[
            [f"rank {rank}"]
            + [
                "no trace" if rank in silent else number(counts[rank, other])
                for other in listed_ranks
            ]
            for rank in listed_ranks
        ],
    )


def _schedule_of(
    run: Run, rounds: range, world_size: int
) -> tuple[Rounds, int] | tuple[None, None]:
    """These rounds by the schedule that the configuration names, and its period."""
    name, seed = strategy_is(run).get("topology"), run.config.get("seed")
    if not isinstance(name, str):
        return None, None
    size = run.island
    try:
        schedule = by_name(name, run.world_size // size, seed=seed if type(seed) is int else 0)
        later = [_NOBODY] * (world_size - run.world_size)  # ranks that joined after the trace
        planned = [[*_of_ranks(schedule.round_peers(t).recv_from, size), *later] for t in rounds]
    except ValueError:
        return None, None
    return planned, schedule.period


def _of_ranks(partners: Iterable[int], island: int) -> list[int]:
    """The partners of ranks, given those of islands: those of their numbers there."""
    return [
        int(partner) * island + index if partner >= 0 else _NOBODY
        for partner in partners
        for index in range(island)
    ]


def _describe_mixing(
    observed: Rounds, expected: Rounds | None, silent: list[int], *, has_changed: bool
) -> str:
    count = len(observed)
    text = f"{count} round{'s' * (count != 1)} of the trace."
    if silent:
        missing = listed(silent)
        text += f" No exchange of rank {missing} is in it: drawn as if it had taken nothing."
    if has_changed:
        return f"{text} Ranks were lost or joined: no schedule is beside it."
    if expected is None:
        return f"{text} The schedule of the run is not known, so nothing is beside it."
    kept = [
        seen == planned
        for row, plan in zip(observed, expected, strict=True)
        for seen, planned in zip(row, plan, strict=True)
        if planned != _NOBODY
    ]
    return f"{text} Delivered by the partner of the schedule: {sum(kept):,} of {len(kept):,}."


class Step(NamedTuple):
    """A step of the lowest rank: its number, start and end, in microseconds."""

    number: int
    start_us: float
    end_us: float


def timeline(run: Run, *, max_spans: int) -> Drawing | None:
    """The steps of a trace, or as many around its middle as `max_spans` spans hold."""
    ranks = sorted({span.rank for span in run.spans})
    if not ranks:
        return None
    drawn = {*ranks[:_MAX_TIMELINE_RANKS]}
    spans = [span for span in run.spans if span.rank in drawn]
    own = [span for span in spans if span.rank == ranks[0]]
    steps = _steps(own)
    start, end = spans[0].start_us, max(span.end_us for span in spans)
    kept: list[Step] = []
    shown: list[Step] = []
    if steps:
        shown = _ordinary(steps, own)
        kept = _fitting(steps, shown, spans, max_spans)
        start, end = kept[0].start_us, kept[-1].end_us
    end = max(end, start + 1)
    shown_us = (shown[0].start_us, shown[-1].end_us) if shown else (start, end)
    tracks: dict[tuple[int, tuple[int, str]], list[Span]] = defaultdict(list)
    inside = [span for span in spans if span.start_us < end and span.end_us >= start]
    for span in inside[:max_spans]:
        tracks[span.rank, span.track].append(span)
    what = "The whole trace"
    if kept:
        what = (
            f"Steps {kept[0].number} to {kept[-1].number} of rank {ranks[0]} and what went on "
            f"meanwhile, first {shown[0].number} to {shown[-1].number}"
        )
    if len(ranks) > _MAX_TIMELINE_RANKS:
        what += f", the first {_MAX_TIMELINE_RANKS} of {len(ranks)} ranks"
    what += ", its beginning only" * (len(inside) > max_spans)
    head, rows = _spent(inside[:max_spans], shown_us)
    payload = _timeline_payload(dict(sorted(tracks.items())), kept, (start, end), shown_us)
    return Drawing("Timeline", f"{what}.", payload, head, rows)


def _timeline_payload(
    tracks: dict[tuple[int, tuple[int, str]], list[Span]],
    steps: list[Step],
    window_us: tuple[float, float],
    shown_us: tuple[float, float],
) -> dict[str, Any]:
    """The timeline as the page's script takes it, its times from the start of the window."""
    names: dict[str, int] = {}
    ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def since(at_us: float) -> float:
        return round(at_us - window_us[0], 1)

    for (rank, (_, track)), found in tracks.items():
        spans = [
            [
                since(span.start_us),
                round(span.end_us - span.start_us, 1),
                names.setdefault(span.name, len(names)),
                span.attributes,
            ]
            for span in found
        ]
        ranks[rank].append({"name": track, "spans": spans})
    return {
        "length": since(window_us[1]),
        "shown": [*map(since, shown_us)],
        "steps": [[step.number, since(step.start_us), since(step.end_us)] for step in steps],
        "names": list(names),
        "ranks": [{"rank": rank, "lanes": lanes} for rank, lanes in ranks.items()],
    }


def _spent(spans: list[Span], shown_us: tuple[float, float]) -> tuple[list[str], list[list[str]]]:
    """The milliseconds that each rank spent on what, in the part first shown."""
    start, end = shown_us
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in sorted(spans, key=lambda span: (span.rank, span.track)):
        inside_us = min(end, span.end_us) - max(start, span.start_us)
        if inside_us > 0:
            spent[span.rank][span.name] += inside_us / 1000
    names = dict.fromkeys(name for times in spent.values() for name in times)
    return ["Rank", *names], [
        [f"rank {rank}", *(number(round(times[name], 3)) for name in names)]
        for rank, times in spent.items()
    ]


def _steps(own: list[Span]) -> list[Step]:
    """The steps of one rank, each up to the start of the next, the last up to its last span."""
    starts: dict[int, float] = {}
    for span in own:
        step = span.attributes.get("step")
        if type(step) is int and span.name not in _UNUSUAL:
            starts[step] = min(span.start_us, starts.get(step, span.start_us))
    in_order = sorted(starts.items(), key=lambda item: item[1])
    ends = [*(at for _, at in in_order[1:]), max((span.end_us for span in own), default=0.0)]
    return [Step(step, at, end) for (step, at), end in zip(in_order, ends, strict=False)]


def _ordinary(steps: list[Step], own: list[Span]) -> list[Step]:
    """A few steps in a row near the middle, without an evaluation among them if there are any."""
    # The last step reaches to the end of the trace, which may be far off.
    windows = [steps[i : i + _STEPS_SHOWN] for i in range(len(steps) - _STEPS_SHOWN)] or [steps]
    unusual = [span for span in own if span.name in _UNUSUAL]
    middle = len(windows) // 2
    for i in sorted(range(len(windows)), key=lambda i: abs(i - middle)):
        start, end = windows[i][0].start_us, windows[i][-1].end_us
        if not any(span.start_us < end and span.end_us > start for span in unusual):
            return windows[i]
    return windows[middle]


def _fitting(steps: list[Step], shown: list[Step], spans: list[Span], max_spans: int) -> list[Step]:
    """As many steps around those shown first as have no more spans than allowed."""
    starts = [span.start_us for span in spans]
    counts = [
        bisect_left(starts, step.end_us) - bisect_left(starts, step.start_us) for step in steps
    ]
    first = last = steps.index(shown[0])
    total = counts[first]
    while True:
        after, before = last + 1, first - 1
        if after < len(steps) and total + counts[after] <= max_spans:
            last, total = after, total + counts[after]
        elif before >= 0 and total + counts[before] <= max_spans:
            first, total = before, total + counts[before]
        else:
            return steps[first : last + 1]
