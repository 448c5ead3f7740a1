"""The settings of gossip: payload, compression, and others."""

from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from gossipgrad.compression import SharedMask
from gossipgrad.decentralized._outer import Nesterov
from gossipgrad.engine import Mode, Overlap, RoundSettings, Stale, Sync, is_count

__all__ = [
    "GossipSettings",
    "Gradients",
    "GradientsAndWeights",
    "Payload",
    "Weights",
    "WeightsAndState",
    "check_compress",
    "check_exchanges",
    "check_moments",
    "check_sync",
    "resolve_compress",
    "resolve_local_steps",
    "resolve_payload",
    "travels",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights only: half of ring all-reduce's bytes. The default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsAndState:
    """Weights every round; optimizer state (momentum, Adam's moments) every `every` rounds.

    Attributes:
        every: Rounds from one exchange of state to the next.
        only: Names of the optimizer state to exchange; None: all.
    """

    every: int = 1
    only: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.only, str):
            raise ValueError(f"only={self.only!r} is one text: give a tuple of names of state")
        if not is_count(self.every):
            raise ValueError(
                "every counts rounds between exchanges of state, a whole number from 1, got "
                f"{self.every!r}"
            )
        object.__setattr__(self, "every", int(self.every))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Gradients only, mixed before the update: for study, replicas drift apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientsAndWeights:
    """Gradients as in `Gradients`, then weights as in `Sync`: the authors' first version."""


Payload = Weights | WeightsAndState | Gradients | GradientsAndWeights

_PAYLOADS: dict[str, Payload] = {
    "weights": Weights(),
    "weights+state": WeightsAndState(),
    "weights+momentum": WeightsAndState(only=("momentum_buffer", "exp_avg")),
    "gradients": Gradients(),
    "gradients+weights": GradientsAndWeights(),
}


@dataclass(frozen=True, kw_only=True)
class GossipSettings(RoundSettings):
    """The resolved settings of `gossip()`.

    Attributes:
        payload: What is exchanged.
        compress: Selects the coordinates of the weights; None for all.
        seed: The mask's seed.
        outer: Makes one outer step of a round's local steps; None: no outer optimizer.
    """

    payload: Payload
    compress: SharedMask | None = None
    seed: int = 0
    outer: Nesterov | None = None

    def must_fit(self) -> dict[str, str]:
        """Return the settings that must match when a state is loaded; waits may differ.

        Only a mask's coordinates, outer weights and corrections depend on the buckets.
        """
        described = super().must_fit()
        corrects = isinstance(self.mode, Sync) and self.mode.momentum > 0
        if self.compress is None and self.outer is None and not corrects:
            del described["bucket_bytes"]
        return described


def resolve_payload(payload: Payload | str, mode: Mode) -> Payload:
    """Return a payload given by name or value, checked against the mode."""
    if not isinstance(payload, Payload):
        if not isinstance(payload, str) or payload not in _PAYLOADS:
            raise ValueError(
                f"payload must be one of {', '.join(map(repr, _PAYLOADS))}, got {payload!r}"
            )
        payload = _PAYLOADS[payload]
    of_gradients = isinstance(payload, Gradients | GradientsAndWeights)
    if of_gradients and isinstance(mode, Stale):
        raise ValueError(
            f"payload {payload} and mode {mode}: a gradient that arrives after its step is worth "
            "nothing, and no step waits for one: use payload='weights', or mode='overlap'"
        )
    if of_gradients and not isinstance(mode, Overlap):
        raise ValueError(
            f"payload {payload} has its own order (gradients before the update, weights after the "
            f"update), mode {mode} would change nothing: leave mode='overlap'"
        )
    return payload


def check_compress(compress: SharedMask | None, payload: Payload, seed: Any) -> None:
    """Raise `ValueError` for payloads that do not support a mask."""
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


def travels(payload: Payload, key: str) -> bool:
    """Whether a payload includes the optimizer state of that name."""
    if key == "step" or not isinstance(payload, WeightsAndState):
        return False
    return payload.only is None or key in payload.only


def check_moments(payload: Payload, kept: Collection[str]) -> None:
    """Raise `ValueError` if Adam's first moment would be sent without its second.

    If a rank's own gradients have been 0 so far, as for the weights of a rare input, it would
    divide its partner's momentum by 0.
    """
    sent = {key for key in ("exp_avg", "exp_avg_sq") if key in kept and travels(payload, key)}
    if sent == {"exp_avg"} and "exp_avg_sq" in kept:
        raise ValueError(
            f"payload {payload} sends Adam's first moment (exp_avg) without its second "
            "(exp_avg_sq), and a rank would divide its partner's momentum by a second moment that "
            "may be 0: use gg.GossipAdamW, whose second moment is that of the mixed momentum, or "
            "payload='weights+state'"
        )


def check_exchanges(exchanges: Any, mode: Mode) -> None:
    """Raise `ValueError` for a number of exchanges that the mode does not support."""
    if not is_count(exchanges):
        raise ValueError(
            f"exchanges counts partners that a step meets, a whole number from 1, got {exchanges!r}"
        )
    if exchanges > 1 and not isinstance(mode, Sync):
        raise ValueError(
            f"exchanges={exchanges} with mode {mode}: a snapshot travels with one partner there. "
            "Use mode='sync', or leave exchanges at 1"
        )
    if isinstance(mode, Sync) and mode.overlap and exchanges == 1:
        raise ValueError(
            "overlap=True of mode sync with exchanges=1: backward hides the last of several "
            "exchanges. Use exchanges=2, or mode='overlap'"
        )


def check_sync(mode: Mode, payload: Payload, compress: Any, local_steps: Any, every: Any) -> None:
    """Raise `ValueError` for settings that do not go with a momentum or overlap of mode sync."""
    if not isinstance(mode, Sync) or not (mode.momentum or mode.overlap):
        return
    for name, value in (
        ("compress", compress),
        ("local_steps", local_steps),
        ("payload", None if isinstance(payload, Weights) else payload),
        ("every", every if mode.overlap and every != 1 else None),
    ):
        if value is not None:
            raise ValueError(
                f"{name}={value!r} and mode {mode} do not go together: momentum exchanges all "
                f"weights, and overlap does in every step. Leave {name} out, or momentum and "
                "overlap"
            )


def resolve_local_steps(
    local_steps: Any, outer: Any, every: Any, payload: Payload
) -> tuple[int, Nesterov | None]:
    """Return the steps in a round, and the outer optimizer; None without local steps."""
    if local_steps is None:
        if outer is not None:
            raise ValueError(
                f"outer={outer!r} takes the local steps of a period as one, and there are none: "
                "give local_steps, such as local_steps=32"
            )
        return int(every), None
    if not is_count(local_steps):
        raise ValueError(
            "local_steps counts steps without an exchange, a whole number from 1, got "
            f"{local_steps!r}"
        )
    if outer is not None and not isinstance(outer, Nesterov):
        raise ValueError(f"outer must be such as gg.Nesterov(lr=0.7, momentum=0.9), got {outer!r}")
    if every != 1:
        raise ValueError(
            f"every={every!r} and local_steps={local_steps!r} both count the steps in a round: "
            "leave every out"
        )
    if isinstance(payload, Gradients | GradientsAndWeights):
        raise ValueError(
            f"local_steps={local_steps!r} and payload {payload}: local steps exchange weights "
            "alone, at their end. Use payload='weights'"
        )
    return int(local_steps), Nesterov() if outer is None else outer


def resolve_compress(compress: Any) -> SharedMask | None:
    """Return a shared mask given by value or as text, `"shared-mask:0.1"`; None for none.

    Raises:
        ValueError: It is not a mask, or the density is invalid.
    """
    if compress is None or isinstance(compress, SharedMask):
        return compress
    if isinstance(compress, str):
        kind, _, density = compress.partition(":")
        if kind == "shared-mask":
            try:
                share = float(density)
            except ValueError:
                pass
            else:
                return SharedMask(share)
    raise ValueError(
        f"compress must be gg.SharedMask(density), or such as 'shared-mask:0.1', got "
        f"{compress!r}: None sends all weights"
    )
