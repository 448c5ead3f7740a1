"""What virtual ranks were asked for, resolved and checked."""

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from gossipgrad.decentralized import (
    Payload,
    Weights,
    WeightsAndState,
    check_exchanges,
    resolve_payload,
)
from gossipgrad.engine import (
    Mode,
    Overlap,
    Stale,
    Sync,
    check_stale,
    resolve_average_every,
    resolve_mode,
)
from gossipgrad.topology import Schedule, by_name


@dataclass(frozen=True, slots=True)
class Lagged:
    """The rule of GossipGraD's authors, which sessions do not have.

    Sent as in `Overlap`, then `w += weight * (received - w)` with the updated `w`: the mean over
    ranks moves by half a step only.
    """


Strategy = Literal["gossip", "allreduce", "every-log-p", "local", "post-local-sgd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the replicas are kept together.

    Attributes:
        schedule: Who meets whom; None without gossip.
        mode: When messages are sent and mixed.
        payload: What is sent, and averaged.
        average_every: Steps between exact averages, None for never.
        exchanges: Rounds of a step in mode sync.
        wire_dtype: What messages are sent as, None for the tensors' own type.
        delay: Rounds by which every exchange is late in mode stale; 0 in other modes.
        reduced_steps: Steps from the start in which gradients are averaged, None for all.
    """

    schedule: Schedule | None
    mode: Mode | Lagged
    payload: Weights | WeightsAndState
    average_every: int | None
    wire_dtype: torch.dtype | None
    reduced_steps: int | None
    exchanges: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.reduced_steps is not None and self.reduced_steps < 0:
            raise ValueError(
                f"post_local_after is {self.reduced_steps}: it counts the steps of the first "
                "part, 0 or more"
            )


def make_plan(
    world_size: int,
    *,
    strategy: str,
    topology: str | Schedule | None,
    mode: str | Mode | None,
    payload: str | Payload | None,
    average_every: int | str | None,
    exchanges: int = 1,
    wire_dtype: torch.dtype | None,
    post_local_after: int | None,
    seed: int,
    delay: int | None = None,
) -> Plan:
    """The plan for these settings.

    Raises:
        ValueError: When they are unknown, or contradict each other.
    """
    if strategy not in get_args(Strategy):
        known = ", ".join(map(repr, get_args(Strategy)))
        raise ValueError(f"strategy must be one of {known}, got {strategy!r}")
    gossips = strategy == "gossip"
    given = {"topology": topology, "mode": mode, "wire_dtype": wire_dtype}
    ignored = [name for name, value in given.items() if value is not None and not gossips]
    if payload is not None and strategy in ("allreduce", "every-log-p"):
        ignored.append("payload")
    if ignored:
        warnings.warn(
            f"strategy {strategy!r} ignores {', '.join(ignored)}: leave it out, or choose "
            "strategy='gossip'",
            stacklevel=3,
        )
    resolved = _checked_mode(mode if gossips else None)
    schedule = None
    if exchanges != 1:
        check_exchanges(exchanges, Overlap() if isinstance(resolved, Lagged) else resolved)
    if gossips:
        default = "matching" if isinstance(resolved, Stale) else "dissemination"
        schedule = _schedule(default if topology is None else topology, world_size, seed)
        if isinstance(resolved, Stale):
            check_stale(
                resolved,
                average_every=average_every,
                symmetric=schedule.symmetric,
                topology=str(schedule),
            )
    return Plan(
        schedule=schedule,
        mode=resolved,
        delay=_delay(delay, resolved),
        payload=_payload(payload, strategy),
        average_every=_average_every(average_every, strategy, world_size),
        exchanges=exchanges,
        wire_dtype=_checked_wire(wire_dtype) if gossips else None,
        reduced_steps=_reduced_steps(strategy, post_local_after),
    )


def _delay(delay: int | None, mode: Mode | Lagged) -> int:
    if not isinstance(mode, Stale):
        if delay is not None:
            raise ValueError(
                f"delay={delay} with mode {mode}: exchanges are late in mode stale alone; leave it "
                "out, or use mode=Stale(max_staleness=...)"
            )
        return 0
    if delay is None:
        return mode.max_staleness
    if not 0 <= delay <= mode.max_staleness:
        raise ValueError(
            f"delay is {delay}, but a round of {mode} is 0 to {mode.max_staleness} rounds late"
        )
    return delay


def _schedule(topology: str | Schedule, world_size: int, seed: int) -> Schedule:
    if not isinstance(topology, Schedule):
        return by_name(topology, world_size, seed=seed)
    if topology.world_size != world_size:
        raise ValueError(
            f"the topology is for {topology.world_size} ranks, but world_size is {world_size}: "
            "build both for the same number"
        )
    return topology


def _checked_mode(mode: str | Mode | None) -> Mode | Lagged:
    if mode == "lagged":
        return Lagged()
    resolved = resolve_mode("overlap" if mode is None else mode)
    # Whatever the engine adds, these are the rules that are simulated.
    if not isinstance(resolved, Overlap | Sync | Stale):
        raise ValueError(
            f"mode {resolved} cannot be simulated: choose 'overlap', 'sync', 'stale' or 'lagged'"
        )
    return resolved


def _payload(payload: str | Payload | None, strategy: str) -> Weights | WeightsAndState:
    if strategy == "every-log-p":
        return WeightsAndState()
    ignored = payload is None or strategy == "allreduce"
    resolved = resolve_payload("weights" if ignored else payload, Overlap())
    if not isinstance(resolved, Weights | WeightsAndState):
        raise ValueError(
            f"virtual ranks exchange weights, with or without state, and not {resolved}: choose "
            "payload='weights' or 'weights+state'"
        )
    return resolved


def _average_every(average_every: int | str | None, strategy: str, world_size: int) -> int | None:
    if strategy in ("allreduce", "every-log-p") and average_every is not None:
        raise ValueError(
            f"average_every={average_every!r} with strategy {strategy!r}, which has a rule of "
            "its own: leave it out, or choose strategy='local'"
        )
    if strategy == "post-local-sgd" and average_every is None:
        raise ValueError(
            "strategy 'post-local-sgd' averages in its second part: give average_every, the steps "
            "between two averages"
        )
    every = "log_p" if strategy == "every-log-p" else average_every
    return resolve_average_every(every, world_size)


def _checked_wire(wire_dtype: torch.dtype | None) -> torch.dtype | None:
    if wire_dtype is not None and not wire_dtype.is_floating_point:
        raise ValueError(
            f"wire_dtype is {wire_dtype}, but weights travel as a floating type such as "
            "torch.bfloat16"
        )
    return wire_dtype


def _reduced_steps(strategy: str, post_local_after: int | None) -> int | None:
    if (strategy == "post-local-sgd") != (post_local_after is not None):
        raise ValueError(
            f"strategy {strategy!r} with post_local_after={post_local_after}: strategy "
            "'post-local-sgd' needs the steps of its first part there, and no other takes them"
        )
    if strategy == "allreduce":
        return None
    return post_local_after or 0
