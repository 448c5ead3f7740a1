"""Who met whom, out of a trace, beside what the schedule says of the same rounds."""

from collections import Counter

from gossipgrad.topology import by_name

from ._format import listed, number
from ._html import Drawing
from ._runs import Run, find_key
from ._values import joined_ranks, strategy_is

INTRODUCTION = (
    "How often each rank took in what another had sent, and how the first values of all ranks "
    "would be mixed if each delivered exchange had weight one half."
)
_NOBODY = -1
# A rank times a round is one number in the page.
_MAX_NUMBERS = 50_000
_MAX_TABLE_RANKS = 16
# A square a pair of ranks: more are finer than a screen, and their product is slow in a browser.
_MAX_RANKS = 1024

Rounds = list[list[int]]


def too_many_ranks(run: Run) -> str:
    """The reason if a run is too large to draw who met whom; else empty."""
    if run.world_size <= _MAX_RANKS or not run.trace.named("exchange"):
        return ""
    return (
        f"{run.name} has {run.world_size:,} ranks: who met whom is drawn for up to {_MAX_RANKS:,}. "
        "trace.json has all exchanges, and `gossipgrad.topology.analyse` computes how a schedule "
        "mixes."
    )


def mixing(run: Run) -> Drawing | None:
    """From which rank each took a delivered exchange, round by round.

    The script gets a row a round, -1 for no rank, and the same by the schedule: None where the
    schedule is not known, or ranks were lost or joined.

    Returns:
        None when the trace has no exchange, or there are `too_many_ranks`.
    """
    spans = run.trace.named("exchange")
    joined = [record.get("rank") for record in joined_ranks(run)]
    world_size = max([run.world_size, *(rank + 1 for rank in joined if type(rank) is int)])
    if world_size > _MAX_RANKS:
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
    observed = [
        [received.get((round, rank), _NOBODY) for rank in range(world_size)] for round in rounds
    ]
    has_changed = any(span.attributes.get("generation", 0) != 0 for span in spans)
    expected, period = (None, None) if has_changed else _schedule_of(run, rounds, world_size)
    silent = [rank for rank in range(world_size) if rank not in rounds_of]
    head, rows = _table(observed, silent)
    return Drawing(
        title="Who met whom",
        description=_describe(observed, expected, silent, has_changed=has_changed),
        payload={
            "worldSize": world_size,
            "firstRound": first,
            "observed": observed,
            "expected": expected,
            "silent": silent,
            "period": period,
        },
        head=head,
        rows=rows,
    )


def _schedule_of(
    run: Run, rounds: range, world_size: int
) -> tuple[Rounds, int] | tuple[None, None]:
    """These rounds by the schedule that the configuration names, and its period."""
    name, seed = strategy_is(run).get("topology"), find_key(run.config, "seed")
    if not isinstance(name, str):
        return None, None
    try:
        schedule = by_name(name, run.world_size, seed=seed if type(seed) is int else 0)
        later = [_NOBODY] * (world_size - run.world_size)  # ranks that joined after the trace
        return [
            [*map(int, schedule.round_peers(t).recv_from), *later] for t in rounds
        ], schedule.period
    except ValueError:
        return None, None


def _describe(
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


def _table(observed: Rounds, silent: list[int]) -> tuple[list[str], list[list[str]]]:
    """How often each rank took from which, for as many ranks as one can read."""
    counts = Counter((rank, other) for row in observed for rank, other in enumerate(row))
    ranks = range(min(len(observed[0]), _MAX_TABLE_RANKS))
    return ["Rank", *(f"from {other}" for other in ranks)], [
        [f"rank {rank}"]
        + ["no trace" if rank in silent else number(counts[rank, other]) for other in ranks]
        for rank in ranks
    ]
