"""What the user chooses: payloads and the rest, as values, with strings as shorthand."""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from gossipgrad.comm import BucketPlan
from gossipgrad.compression import SharedMask
from gossipgrad.decentralized._modes import Mode, Overlap, Stale, Sync
from gossipgrad.topology import Schedule

__all__ = [
    "Gradients",
    "GradientsAndWeights",
    "Payload",
    "Settings",
    "Weights",
    "WeightsAndState",
]


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights alone: half of ring all-reduce's bytes. The default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsAndState:
    """Weights every round; optimizer state (momentum, Adam's moments) every `every` rounds."""

    every: int = 1

    def __post_init__(self) -> None:
        if not _is_count(self.every):
            raise ValueError(
                "every counts rounds between exchanges of state, a whole number from 1, got "
                f"{self.every!r}"
            )
        object.__setattr__(self, "every", int(self.every))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Gradients alone, each bucket as backward finishes it: for study, replicas drift apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientsAndWeights:
    """Gradients as in `Gradients`, then weights as in `Sync`: the authors' first version."""


Payload = Weights | WeightsAndState | Gradients | GradientsAndWeights

_PAYLOADS: dict[str, Payload] = {
    "weights": Weights(),
    "weights+state": WeightsAndState(),
    "gradients": Gradients(),
    "gradients+weights": GradientsAndWeights(),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that `gossip()` was asked for, resolved."""

    schedule: Schedule
    mode: Mode
    payload: Payload
    every: int
    average_every: int | None
    wire_dtype: torch.dtype | None
    bucket_bytes: int
    compress: SharedMask | None = None
    seed: int = 0

    @property
    def snapshots(self) -> int:
        """How many may be held at once: by default one that travels and one that is made."""
        return self.mode.snapshots if isinstance(self.mode, Stale) else 2

    @property
    def sends_early(self) -> bool:
        """Whether a round's weights leave as it begins, and not at its end."""
        of_gradients = isinstance(self.payload, Gradients | GradientsAndWeights)
        return not of_gradients and not isinstance(self.mode, Sync)

    @property
    def sends_whole(self) -> bool:
        """Whether what travels are the weights, bit for bit."""
        return self.wire_dtype is None and self.compress is None

    def describe(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        plain = {
            "topology": self.schedule.describe(),
            "mode": self.mode,
            "payload": self.payload,
            "every": self.every,
            "average_every": self.average_every,
            "wire_dtype": self.wire_dtype,
            "bucket_bytes": self.bucket_bytes,
        }
        if self.compress is None:
            return plain
        return {**plain, "compress": self.compress, "seed": self.seed}


def resolve_payload(payload: Payload | str, mode: Mode) -> Payload:
    """A payload by name or value, checked against the mode."""
    if not isinstance(payload, Payload):
        if not isinstance(payload, str) or payload not in _PAYLOADS:
            raise ValueError(
                f"payload must be one of {', '.join(map(repr, _PAYLOADS))}, got {payload!r}"
            )
        payload = _PAYLOADS[payload]
    of_gradients = isinstance(payload, Gradients | GradientsAndWeights)
    if of_gradients and isinstance(mode, Stale):
        raise ValueError(
            f"payload {payload} and mode {mode}: a gradient that comes after its step is worth "
            "nothing, and no step waits for one: use payload='weights', or mode='overlap'"
        )
    if of_gradients and not isinstance(mode, Overlap):
        raise ValueError(
            f"payload {payload} has its own order (gradients during backward, weights after the "
            f"update), mode {mode} would change nothing: leave mode='overlap'"
        )
    return payload


def check_compress(compress: SharedMask | None, payload: Payload, seed: Any) -> None:
    """Raises `ValueError` for payloads and seeds that a shared mask does not go with."""
    if compress is None:
        return
    if not isinstance(payload, Weights):
        raise ValueError(
            f"compress={compress} and payload {payload}: an element's moments would be mixed in "
            "other rounds than each other and the weight, and an update of Adam divides one by the "
            "other; gradients want error feedback. Use payload='weights'"
        )
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**64:
        raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, got {seed!r}")


def resolve_average_every(average_every: int | str | None, world_size: int) -> int | None:
    """Steps between exact averages, None for never."""
    if average_every == "log_p":
        return max(1, math.ceil(math.log2(world_size)))
    if average_every is None:
        return None
    if not isinstance(average_every, str) and _is_count(average_every):
        return int(average_every)
    raise ValueError(
        f"average_every must be a positive number of steps, 'log_p' or None, got {average_every!r}"
    )


def check_numbers(*, every: object, bucket_bytes: object, wire_dtype: object) -> None:
    """Raises `ValueError` for what no session can count, size or send by."""
    if not _is_count(every):
        raise ValueError(
            f"every counts steps in a round, so it is at least 1, got {every!r}: give a whole "
            "number, such as every=2"
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, Integral):
        raise ValueError(
            f"bucket_bytes is the size of a message, a whole number such as 2**20, got "
            f"{bucket_bytes!r}"
        )
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise ValueError(
            f"wire_dtype must be a type such as torch.bfloat16, or None, got {wire_dtype!r}"
        )
    BucketPlan.make([], bucket_bytes=int(bucket_bytes), wire_dtype=wire_dtype)
