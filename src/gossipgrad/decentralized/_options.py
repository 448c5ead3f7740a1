"""The options that `gossip()` and `join()` share: names, types, defaults and checks."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypedDict, TypeVar

import torch

from gossipgrad._messages import warn
from gossipgrad.comm import DEFAULT_BUCKET_BYTES, Heartbeats, Recorder, check_heartbeats
from gossipgrad.compression import SharedMask
from gossipgrad.decentralized._outer import Nesterov
from gossipgrad.decentralized._settings import (
    GossipSettings,
    Gradients,
    GradientsAndWeights,
    Payload,
    check_compress,
    check_exchanges,
    check_sync,
    resolve_compress,
    resolve_local_steps,
    resolve_payload,
)
from gossipgrad.engine import (
    Mode,
    Sync,
    check_numbers,
    check_stale,
    resolve_average_every,
    resolve_mode,
)
from gossipgrad.topology import SCHEDULE_NAMES, Schedule, by_name

__all__ = ["CheckedOptions", "GossipOptions", "check_options", "resolve_settings", "with_options"]

F = TypeVar("F", bound=Callable[..., Any])
_HEARTBEATS = Heartbeats()


class GossipOptions(TypedDict, total=False):
    """Types of the options that `gossip()` describes, and `join()` takes, too."""

    topology: str | Schedule
    mode: str | Mode
    payload: str | Payload
    every: int
    average_every: int | str | None
    exchanges: int
    local_steps: int | None
    outer: Nesterov | None
    wire_dtype: torch.dtype | None
    compress: str | SharedMask | None
    scaler: torch.amp.GradScaler | None
    seed: int
    bucket_bytes: int | None
    recorder: Recorder | None
    heartbeats: Heartbeats | None


@dataclass(frozen=True, kw_only=True)
class CheckedOptions:
    """The options with their defaults, checked as far as that is possible before a group exists.

    Raises:
        ValueError: For the first option that is invalid for any group.
    """

    topology: Any = "matching"
    mode: Any = "overlap"
    payload: Any = "weights"
    every: Any = 1
    average_every: Any = None
    exchanges: Any = 1
    local_steps: Any = None
    outer: Any = None
    wire_dtype: Any = None
    compress: Any = None
    scaler: Any = None
    seed: Any = 0
    bucket_bytes: Any = None
    recorder: Any = None
    heartbeats: Any = _HEARTBEATS

    def __post_init__(self) -> None:
        size = DEFAULT_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes
        check_numbers(every=self.every, bucket_bytes=size, wire_dtype=self.wire_dtype)
        mode = resolve_mode(self.mode)
        payload = resolve_payload(self.payload, mode)
        if isinstance(payload, Gradients | GradientsAndWeights) and self.scaler is not None:
            raise ValueError(
                f"payload {payload} sends gradients before the step, when each rank's scaler has "
                "scaled them differently: use payload='weights'"
            )
        check_compress(resolve_compress(self.compress), payload, self.seed)
        check_sync(mode, payload, self.compress, self.local_steps, self.every)
        resolve_average_every(self.average_every, 1)
        check_exchanges(self.exchanges, mode)
        resolve_local_steps(self.local_steps, self.outer, self.every, payload)
        topology = self.topology
        if isinstance(topology, str):
            symmetric = by_name(topology, 4).symmetric  # any schedule of one or two ranks is
        elif isinstance(topology, Schedule):
            symmetric = topology.symmetric
        else:
            raise ValueError(
                f"topology must be one of {', '.join(map(repr, SCHEDULE_NAMES))} or a schedule "
                f"from gossipgrad.topology, got {topology!r}"
            )
        shown = repr(topology) if isinstance(topology, str) else str(topology)
        check_stale(mode, average_every=self.average_every, symmetric=symmetric, topology=shown)
        check_heartbeats(self.heartbeats)


def check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> CheckedOptions:
    """Return the options of a call, with defaults; raises `TypeError` for an unknown one."""
    for name in options.keys() - {field.name for field in fields(CheckedOptions)}:
        near = get_close_matches(name, inspect.signature(function).parameters, 1)
        hint = f": do you mean {near[0]}?" if near else ""
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
    return CheckedOptions(**options)


def with_options(function: F) -> F:
    """Let `help()` show the options of a function that takes them as `**options`."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=GossipOptions.__annotations__[field.name],
        )
        for field in fields(CheckedOptions)
    ]
    is_positional = [p.kind is not p.KEYWORD_ONLY for p in own].count(True)
    parameters = [*own[:is_positional], *shared, *own[is_positional:]]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def resolve_settings(
    world_size: int, options: CheckedOptions, *, island: int = 1, slices: int | None = None
) -> GossipSettings:
    """Return the settings of a run that starts with `world_size` ranks; warn of unused options.

    `island` is the number of ranks that share a replica, of which `slices` exchange, or all.

    Raises:
        ValueError: The payload has gradients, or mode sync overlaps, which islands do not support.
    """
    resolved_mode = resolve_mode(options.mode)
    resolved_payload = resolve_payload(options.payload, resolved_mode)
    if island > 1 and isinstance(resolved_payload, Gradients | GradientsAndWeights):
        raise ValueError(
            f"payload {resolved_payload} with island=: gradients are averaged inside an island, "
            "and weights are exchanged between islands. Use payload='weights'"
        )
    if island > 1 and isinstance(resolved_mode, Sync) and resolved_mode.overlap:
        raise ValueError(
            "overlap=True of mode sync with island=: no pass of an island hides its exchanges in "
            "mode sync. Use mode='overlap', or leave overlap out"
        )
    if isinstance(resolved_payload, Gradients):
        warn(
            "payload='gradients' never mixes weights: replicas drift apart. It is the wording "
            "of the paper's abstract, kept for study; train with payload='weights'"
        )
    steps, optimizer = resolve_local_steps(
        options.local_steps, options.outer, options.every, resolved_payload
    )
    compressor = resolve_compress(options.compress)
    masked = compressor is not None
    schedule = _resolve_schedule(options.topology, world_size, options.seed, seeds_all=not masked)
    return GossipSettings(
        schedule=schedule,
        mode=resolved_mode,
        payload=resolved_payload,
        every=steps,
        average_every=resolve_average_every(options.average_every, world_size),
        wire_dtype=options.wire_dtype,
        bucket_bytes=int(options.bucket_bytes),
        exchanges=int(options.exchanges),
        compress=compressor,
        outer=optimizer,
        island=slices or island,
        seed=int(options.seed) if masked else 0,
    )


def _resolve_schedule(
    topology: str | Schedule, world_size: int, seed: int, *, seeds_all: bool
) -> Schedule:
    """Return the schedule; warn of a seed without effect, if it `seeds_all`."""
    unused = seeds_all and seed != 0
    if isinstance(topology, str):
        if topology == "ring" and unused:
            warn(
                f"seed={seed} is ignored: the ring does not rotate; topology=gossipgrad.topology."
                "ring(world_size, seed=..., rotate=True) does"
            )
        return by_name(topology, world_size, seed=seed)
    if topology.world_size != world_size:
        raise ValueError(
            f"the schedule {topology} is for {topology.world_size} ranks, the group has "
            f"{world_size}: make it for world_size={world_size}"
        )
    if unused:
        warn(f"seed={seed} is ignored: the schedule given as topology has its own")
    return topology
