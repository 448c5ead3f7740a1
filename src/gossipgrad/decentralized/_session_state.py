"""The numbers and residuals of a session as plain values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm import Outcome, local
from gossipgrad.decentralized._averaging import Averaging
from gossipgrad.decentralized._modes import Stale
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._settings import Settings

__all__ = [
    "VERSION",
    "Carried",
    "counters_of",
    "load_counters",
    "load_residuals",
    "must_fit",
    "residuals_of",
]

VERSION = 2
_OF_ROUNDS = (
    *("closed_rounds", "late_rounds", "void_rounds"),
    *("exposed_seconds", "mixing_seconds"),
)
_OF_AVERAGES = ("last_distance", "averages", "averaged_bytes", "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What earlier parts of a run have counted on their links.

    Attributes:
        bytes_sent: Payload bytes sent to partners, less those of the round that was open.
        bytes_received: Payload bytes that came from partners.
        refused_messages: Messages dropped because they did not fit the plan.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    refused_messages: int = 0


def must_fit(settings: Settings) -> dict[str, str]:
    """What must be the same where a state is loaded; how long steps wait may be another."""
    described = settings.describe()
    mode = settings.mode
    staleness = f", max_staleness {mode.max_staleness}" if isinstance(mode, Stale) else ""
    described["mode"] = f"{type(mode).__name__.lower()}{staleness}"
    return {name: str(value) for name, value in described.items()}


def counters_of(
    rounds: Rounds | None, sections: Sections, averaging: Averaging, carried: Carried
) -> dict[str, Any]:
    """What `stats()` counts on from."""
    counters: dict[str, Any] = {
        "clamps": [int(section.clamped) for section in sections.all],
        "averages": {name: getattr(averaging, name) for name in _OF_AVERAGES},
    }
    if rounds is None:
        return counters
    channel = rounds.channel
    links = Carried(
        bytes_sent=carried.bytes_sent + channel.bytes_sent - rounds.open_bytes,
        bytes_received=carried.bytes_received + channel.bytes_received,
        refused_messages=carried.refused_messages + channel.refused,
    )
    return {
        **counters,
        "rounds": {name: getattr(rounds, name) for name in _OF_ROUNDS},
        "outcomes": {outcome.value: count for outcome, count in rounds.outcomes.items()},
        "pair_distance": rounds.pair_distance.state(),
        "links": asdict(links),
    }


def load_counters(
    rounds: Rounds | None, sections: Sections, averaging: Averaging, counters: Mapping[str, Any]
) -> Carried:
    """Takes up what `counters_of` gave, in rounds that have posted nothing."""
    for section, clamps in zip(sections.all, counters["clamps"], strict=True):
        section.clamped.fill_(clamps)
    for name, value in counters["averages"].items():
        setattr(averaging, name, value)
    if rounds is None:
        return Carried()
    for name, value in counters["rounds"].items():
        setattr(rounds, name, value)
    rounds.outcomes.update({Outcome(name): count for name, count in counters["outcomes"].items()})
    rounds.pair_distance.load(counters["pair_distance"])
    return Carried(**counters["links"])


def residuals_of(sections: Sections, *, copy: bool = True) -> dict[str, Tensor]:
    """What rounding took away from narrow weights, by name of the parameter."""
    found: dict[str, Tensor] = {}
    for section in sections.weights:
        for entry, residual in section.narrow:
            if entry.rows is None:
                found[entry.spec.name] = residual.to("cpu", copy=copy)
                continue
            shape = local(entry.parameter).shape
            whole = found.setdefault(entry.spec.name, torch.zeros(shape, dtype=residual.dtype))
            whole.narrow(0, *entry.rows).copy_(residual)
    return found


@torch.no_grad()
def load_residuals(sections: Sections, residuals: Mapping[str, Tensor]) -> None:
    """Takes up what `residuals_of` gave."""
    for section in sections.weights:
        for entry, residual in section.narrow:
            whole = residuals[entry.spec.name]
            residual.copy_(whole if entry.rows is None else whole.narrow(0, *entry.rows))
