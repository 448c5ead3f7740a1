"""A session's own part of a state: where it is, what it has counted, residuals."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm import local
from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._flow import Flow
from gossipgrad.engine._rounds import Rounds

__all__ = [
    "VERSION",
    "counters",
    "is_of_other_version",
    "load_counters",
    "load_residuals",
    "misses_residuals",
    "residuals",
]

VERSION = 2


def counters(rounds: Rounds | None, flows: Sequence[Flow], averaging: Averaging) -> dict[str, Any]:
    """What `stats()` counts on from."""
    return {
        "clamps": [int(bucket.clamped) for flow in flows for bucket in flow.buckets],
        "averages": averaging.state_dict(),
        "rounds": None if rounds is None else rounds.state_dict(),
    }


def load_counters(
    rounds: Rounds | None, flows: Sequence[Flow], averaging: Averaging, state: Mapping[str, Any]
) -> None:
    """Takes over what `counters` returned."""
    buckets = [bucket for flow in flows for bucket in flow.buckets]
    for bucket, clamps in zip(buckets, state["clamps"], strict=True):
        bucket.clamped.fill_(clamps)
    averaging.load_state_dict(state["averages"])
    if rounds is not None and state["rounds"] is not None:
        rounds.load_state_dict(state["rounds"])


def residuals(flows: Sequence[Flow], *, copy: bool = True) -> dict[str, Tensor]:
    """What rounding took away from narrow weights, by name of the parameter."""
    found: dict[str, Tensor] = {}
    for bucket in (bucket for flow in flows for bucket in flow.buckets):
        for entry, residual in zip(bucket.entries, bucket.residuals, strict=True):
            if residual is None:
                continue
            if entry.rows is None:
                found[entry.spec.name] = residual.to("cpu", copy=copy)
                continue
            shape = local(entry.parameter).shape
            whole = found.setdefault(entry.spec.name, torch.zeros(shape, dtype=residual.dtype))
            whole.narrow(0, *entry.rows).copy_(residual)
    return found


@torch.no_grad()
def load_residuals(flows: Sequence[Flow], state: Mapping[str, Tensor]) -> None:
    """Takes over what `residuals` returned."""
    for bucket in (bucket for flow in flows for bucket in flow.buckets):
        for entry, residual in zip(bucket.entries, bucket.residuals, strict=True):
            if residual is not None:
                whole = state[entry.spec.name]
                residual.copy_(whole if entry.rows is None else whole.narrow(0, *entry.rows))


def misses_residuals(flows: Sequence[Flow], state: Mapping[str, Any]) -> str | None:
    """Which residual a state lacks, in words; None if none."""
    missing = sorted(residuals(flows, copy=False).keys() - state.keys())
    return f"it has no residual of {missing[0]}" if missing else None


def is_of_other_version(state: Any) -> str | None:
    """Why it is no state of a session, or one of an older version; None if it is one."""
    version = None
    if isinstance(state, Mapping) and isinstance(state.get("session"), Mapping):
        version = state["session"].get("version")
    if version == VERSION:
        return None
    if isinstance(version, int) and version < VERSION:
        return (
            f"it is of version {version}, from an older gossipgrad, and here is {VERSION}: go on "
            "with that release, or begin a session from its weights (gg.load_replica)"
        )
    return f"it is no state that state_dict() of a session returns (version {VERSION})"
