"""The modes: when a round's snapshots are sent and mixed."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

__all__ = ["Mode", "Overlap", "Stale", "Sync", "check_stale", "resolve_mode"]

MAX_STALENESS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Sends a snapshot at the start of a step and mixes at its end: the whole step hides it.

    `w += weight * (received - snapshot)`, which keeps the mean over ranks exactly (D-PSGD with one
    partner). The default.

    Attributes:
        patience_seconds: How long a step waits at most for a partner that is not ready. It then
            continues, and the partner's part is mixed when it arrives. The others are told, and no
            step waits for that rank again until it is heard of. The parts of a partner that is
            ready are awaited as long as the network needs. `math.inf` waits for any living
            partner: for runs that are repeated bit for bit.
    """

    patience_seconds: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "patience_seconds", _patience(self.patience_seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Exchanges weights after the update and mixes them immediately; nothing is hidden.

    With a `momentum` above 0 the differences to partners also change what the optimizer's momentum
    has gathered, without sending it. Each weight w has a correction C, at first 0::

        C = momentum * C;  w = w + C               after each of the optimizer's steps
        D = weight * (received - sent)             of each exchange
        w = w + D;  C = C + gain * D

    The Ds of all ranks sum to 0, and so do their Cs: the mean over ranks is kept. If a round is
    void there is no D, and C decays; a late D counts when it arrives. C is 0 again after an average
    of all ranks, `broadcast_()` and `rebuild()`, and 0 for a joiner. It costs memory for one more
    model, in fp32 or wider, and no bytes. Needs `payload="weights"`, without a mask or local steps.

    The weight is 1/2 unless the topology says otherwise. With `exchanges=2` both Ds count, each of
    the weights as they are by then. A gain of 0.4 was measured with one exchange and with two, for
    SGD with momentum 0.9: docs/settings.md.

    Attributes:
        patience_seconds: As of `Overlap`.
        momentum: That of the optimizer, 0 to below 1. 0: no correction.
        gain: What C takes of each change by an exchange, above 0, at most 1.
        overlap: With `exchanges=2` or more: the last exchange of a step is one of `Overlap`. It
            sends the weights with which the gradient is computed, hides behind backward, and is
            mixed after the next update. Not with `every`, other payloads or islands.

    References:
        The rule is not from a paper. Lin et al., Quasi-Global Momentum, arXiv:2102.04761, and Wang
        et al., SlowMo, arXiv:1910.00643, form a momentum from the differences of mixed weights,
        steps included; C has what partners differ alone, beside the optimizer's own momentum.
    """

    patience_seconds: float = 300.0
    momentum: float = 0.0
    gain: float = 0.4
    overlap: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "patience_seconds", _patience(self.patience_seconds))
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap of mode sync must be True or False, got {self.overlap!r}")
        for name, rule, fits in (
            ("momentum", "from 0 to below 1, such as the optimizer's 0.9", lambda v: 0 <= v < 1),
            ("gain", "above 0 and at most 1, such as 0.4", lambda v: 0 < v <= 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not fits(float(value)):
                raise ValueError(f"{name} of mode sync must be {rule}, got {value!r}")
            object.__setattr__(self, name, float(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale:
    r"""Never waits in a step: a partner's part is mixed in the step in which it arrives.

    `w += weight * (received - snapshot)` as in `Overlap`, once on each end, however late, iff both
    ends sent: the mean over ranks is kept. After a step a rank's round is `max(own + 1, highest
    received)`. Rounds that it jumps over are void. A round is also void if all snapshots are in
    flight, or if its partner has not answered for more than `max_staleness` rounds; the partner is
    notified. Needs a schedule of symmetric pairs.

    The bound limits the snapshots in flight: a snapshot is mixed before `max_staleness + 1` later
    ones are sent, or these are not sent. The weight depends only on the bound, not on the actual
    delay, so that both ends use the same weight.

    Attributes:
        max_staleness: Rounds, 0 to 15. 0 has one snapshot in flight, as in `Overlap`.

    Example:
        >>> [round(Stale(max_staleness=d).weight, 3) for d in range(5)]
        [0.5, 0.325, 0.201, 0.145, 0.113]
    """

    max_staleness: int = 2

    def __post_init__(self) -> None:
        number = self.max_staleness
        if (
            isinstance(number, bool)
            or not isinstance(number, Integral)
            or not 0 <= int(number) <= MAX_STALENESS
        ):
            raise ValueError(
                f"max_staleness counts rounds, a whole number from 0 to {MAX_STALENESS}, got "
                f"{number!r}: 2 suits most networks, and each further round costs a snapshot"
            )
        object.__setattr__(self, "max_staleness", int(number))

    @property
    def weight(self) -> float:
        """`min(0.5, 0.65 sin(pi / (4 d + 2)))` of the configured staleness d.

        A pair whose exchanges are all d rounds late is stable below the sine.
        """
        return min(0.5, 0.65 * math.sin(math.pi / (4 * self.max_staleness + 2)))

    @property
    def snapshots(self) -> int:
        """The largest number in flight, `max_staleness + 1`."""
        return self.max_staleness + 1


Mode = Overlap | Sync | Stale

_MODES: dict[str, type[Mode]] = {"overlap": Overlap, "sync": Sync, "stale": Stale}


def resolve_mode(mode: Mode | str) -> Mode:
    """Return a mode given by name or value.

    Raises:
        ValueError: If there is no such mode.
    """
    if isinstance(mode, Mode):
        return mode
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
    return _MODES[mode]()


def _patience(seconds: object) -> float:
    """Return a valid patience, or raise `ValueError`."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:
        raise ValueError(
            f"patience_seconds must be positive, got {seconds!r}: it is how long a step waits for "
            "a partner that is not ready; math.inf is for ever"
        )
    return float(seconds)


def check_stale(mode: Mode, *, average_every: object, symmetric: bool, topology: str) -> None:
    """Raise `ValueError` for settings that make a step of mode stale wait, or lose the mean."""
    if not isinstance(mode, Stale):
        return
    if average_every is not None:
        raise ValueError(
            f"average_every={average_every!r} waits for all ranks, and in mode 'stale' no step "
            "waits: leave it out, call session.average_() where all may wait, or use "
            "mode='overlap'"
        )
    if not symmetric:
        raise ValueError(
            f"topology {topology} is directed, and mode 'stale' needs symmetric pairs: a round "
            "that is void at one end only would shift the mean over ranks. Use 'matching' (any "
            "number of ranks) or 'hypercube' (a power of two), or mode='overlap'"
        )
