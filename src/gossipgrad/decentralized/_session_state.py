"""The numbers of a session, its rounds and its averages, as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gossipgrad.comm import Outcome
from gossipgrad.decentralized._averaging import Averaging
from gossipgrad.decentralized._modes import Stale
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._settings import Settings
from gossipgrad.decentralized._stale_rounds import StaleRounds

__all__ = [
    "VERSION",
    "Carried",
    "averages_of",
    "load_averages",
    "load_residuals",
    "load_rounds",
    "must_fit",
    "residuals_of",
    "rounds_of",
]

VERSION = 1
_COUNTS = (  # of rounds, each saved and loaded under its own name
    *("next_round", "closed_rounds", "late_rounds", "void_rounds"),
    *("exposed_seconds", "mixing_seconds"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What earlier parts of a run have counted on their links, and what was lost between them.

    Attributes:
        bytes_sent: Payload bytes sent to partners.
        bytes_received: Payload bytes that came from partners.
        refused_messages: Messages dropped because they did not fit the plan.
        torn_rounds: Rounds that a resumption found mixed at one end alone.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    refused_messages: int = 0
    torn_rounds: int = 0


def must_fit(settings: Settings) -> dict[str, str]:
    """What must be the same where a state is loaded; how long steps wait may be another."""
    described = settings.describe()
    mode = settings.mode
    staleness = f", max_staleness {mode.max_staleness}" if isinstance(mode, Stale) else ""
    described["mode"] = f"{type(mode).__name__.lower()}{staleness}"
    return {name: str(value) for name, value in described.items()}


def rounds_of(rounds: Rounds, carried: Carried) -> dict[str, Any]:
    """Where the rounds are and what they have counted, less what travels again after a resume."""
    channel = rounds.channel
    again = channel.early_bytes
    if not isinstance(rounds, StaleRounds):
        again += sum(
            transfer.section.parts[bucket].size_bytes
            for transfer in rounds.under_way
            for bucket, exchange in transfer.exchanges.items()
            if bucket not in transfer.taken and exchange.outcome is Outcome.DELIVERED
        )
    now = Carried(
        bytes_sent=carried.bytes_sent + channel.bytes_sent,
        bytes_received=carried.bytes_received + channel.bytes_received - again,
        refused_messages=carried.refused_messages + channel.refused,
        torn_rounds=carried.torn_rounds,
    )
    return {
        **{name: getattr(rounds, name) for name in _COUNTS},
        "outcomes": {outcome.value: count for outcome, count in rounds.outcomes.items()},
        "pair_distance": rounds.pair_distance.state(),
        "mixed": [list(met) for met in rounds.mixed],
        "carried": asdict(now),
        "stale": rounds.place() if isinstance(rounds, StaleRounds) else None,
    }


def load_rounds(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """Takes up what `rounds_of` gave, in rounds that have posted nothing."""
    for name in _COUNTS:
        setattr(rounds, name, state[name])
    rounds.outcomes.update({Outcome(name): count for name, count in state["outcomes"].items()})
    rounds.pair_distance.load(state["pair_distance"])
    rounds.mixed.extend((round, other) for round, other in state["mixed"])
    if isinstance(rounds, StaleRounds):
        rounds.go_to(state["stale"])


def averages_of(averaging: Averaging) -> dict[str, Any]:
    """What averages have counted."""
    names = ("last_distance", "averages", "averaged_bytes", "seconds")
    return {name: getattr(averaging, name) for name in names}


def load_averages(averaging: Averaging, state: Mapping[str, Any]) -> None:
    """Takes up what `averages_of` gave."""
    for name, value in state.items():
        setattr(averaging, name, value)


def residuals_of(sections: Sections, *, copy: bool = True) -> list[list[Any]]:
    """What rounding took away from narrow weights: a list a bucket, None for others."""
    return [
        [None if e is None else e.to("cpu", copy=copy) for e in section.residuals(bucket)]
        for section in sections.all
        for bucket in range(len(section.plan.buckets))
    ]


@torch.no_grad()
def load_residuals(sections: Sections, state: Sequence[Sequence[Any]]) -> None:
    """Takes up what `residuals_of` gave."""
    buckets = [
        section.residuals(bucket)
        for section in sections.all
        for bucket in range(len(section.plan.buckets))
    ]
    for own, saved in zip(buckets, state, strict=True):
        for residual, value in zip(own, saved, strict=True):
            if residual is not None:
                residual.copy_(value)
