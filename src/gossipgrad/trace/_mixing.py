"""Who met whom, out of a trace, beside what the schedule says of the same rounds."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from gossipgrad.topology import by_name

from ._format import listed, number
from ._runs import Run, find_key
from ._spans import Span
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """From whom each rank took a delivered exchange, round by round.

    Attributes:
        world_size: The number of ranks, those that joined among them.
        first_round: The round of the first row.
        observed: A row a round: for each rank the one whose part it took, -1 for nobody.
        expected: The same by the schedule; None where the schedule is not known, or ranks were
            lost or joined.
        silent_ranks: Ranks without an exchange in the trace.
        period: Rounds of one period of the schedule, if it is known.
    """

    world_size: int
    first_round: int
    observed: list[list[int]]
    expected: list[list[int]] | None
    silent_ranks: list[int]
    period: int | None
    has_changed: bool = False
    """Whether ranks were lost or joined before a round in the trace."""

    def payload(self) -> dict[str, Any]:
        """The rounds as the page's script takes them."""
        return {
            "worldSize": self.world_size,
            "firstRound": self.first_round,
            "observed": self.observed,
            "expected": self.expected,
            "silent": self.silent_ranks,
            "period": self.period,
        }

    @property
    def description(self) -> str:
        """How much there is, and how far it is what the schedule says."""
        rounds = f"{len(self.observed)} rounds" if len(self.observed) > 1 else "1 round"
        missing = listed(self.silent_ranks)
        text = f"{rounds[0].upper()}{rounds[1:]} of the trace."
        if missing:
            text += f" No exchange of rank {missing} is in it: drawn as if it had taken nothing."
        if self.has_changed:
            return f"{text} Ranks were lost or joined: no schedule is beside it."
        if self.expected is None:
            return f"{text} The schedule of the run is not known, so nothing is beside it."
        pairs = [
            (seen, planned)
            for row, plan in zip(self.observed, self.expected, strict=True)
            for seen, planned in zip(row, plan, strict=True)
            if planned != _NOBODY
        ]
        kept = sum(seen == planned for seen, planned in pairs)
        return f"{text} Delivered by the partner of the schedule: {kept:,} of {len(pairs):,}."

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows: how often each rank took from which, for as many ranks as one can read."""
        counts = Counter(
            (rank, other)
            for row in self.observed
            for rank, other in enumerate(row)
            if other != _NOBODY
        )
        ranks = range(min(self.world_size, _MAX_TABLE_RANKS))
        head = ["Rank", *(f"from {other}" for other in ranks)]
        return head, [
            [
                f"rank {rank}",
                *(
                    "no trace" if rank in self.silent_ranks else number(counts[rank, other])
                    for other in ranks
                ),
            ]
            for rank in ranks
        ]


def mixing(run: Run) -> Mixing | None:
    """The meetings in the trace of a run; None when it has no exchange, or `too_many_ranks`."""
    spans = run.trace.named("exchange")
    if (world_size := _world_size(run)) > _MAX_RANKS:
        return None
    taken: dict[int, dict[int, int]] = {}
    rounds_of: dict[int, set[int]] = {}
    for span in spans:
        round, other = span.attributes.get("round"), span.attributes.get("recv_from")
        if type(round) is not int or not 0 <= span.rank < world_size:
            continue
        rounds_of.setdefault(span.rank, set()).add(round)
        if type(other) is int and 0 <= other < world_size and was_delivered(span):
            taken.setdefault(round, {})[span.rank] = other
    if not rounds_of:
        return None
    # At its ends a trace has rounds of some ranks alone.
    first = max(min(rounds) for rounds in rounds_of.values())
    last = min(max(rounds) for rounds in rounds_of.values())
    last = min(last, first + max(1, _MAX_NUMBERS // world_size) - 1)
    if last < first:
        return None
    rounds = range(first, last + 1)
    has_changed = any(span.attributes.get("generation", 0) != 0 for span in spans)
    expected, period = (None, None) if has_changed else _expected(run, rounds)
    return Mixing(
        world_size=world_size,
        first_round=first,
        observed=[
            [taken.get(round, {}).get(rank, _NOBODY) for rank in range(world_size)]
            for round in rounds
        ],
        expected=expected,
        silent_ranks=[rank for rank in range(world_size) if rank not in rounds_of],
        period=period,
        has_changed=has_changed,
    )


def _world_size(run: Run) -> int:
    """How many ranks there were at the start, and joined."""
    numbers = [joined.get("rank") for joined in joined_ranks(run)]
    return max([run.world_size, *(rank + 1 for rank in numbers if type(rank) is int)])


def too_many_ranks(run: Run) -> str:
    """Why the meetings of a run are not drawn, if its size is why; else empty."""
    if run.world_size <= _MAX_RANKS or not run.trace.named("exchange"):
        return ""
    return (
        f"{run.name} has {run.world_size:,} ranks: who met whom is drawn for up to {_MAX_RANKS:,}. "
        "trace.json has all exchanges, and `gossipgrad topology` computes how a schedule mixes."
    )


def was_delivered(span: Span) -> bool:
    """Whether an exchange brought something; one that says nothing of it did."""
    return span.attributes.get("outcome", "delivered") == "delivered"


def _expected(run: Run, rounds: range) -> tuple[list[list[int]] | None, int | None]:
    """What the schedule that the configuration names says of these rounds, and its period."""
    name, seed = strategy_is(run).get("topology"), find_key(run.config, "seed")
    if not isinstance(name, str):
        return None, None
    try:
        schedule = by_name(name, run.world_size, seed=seed if type(seed) is int else 0)
        found = [[int(rank) for rank in schedule.round_peers(t).recv_from] for t in rounds]
    except ValueError:
        return None, None
    return found, schedule.period
