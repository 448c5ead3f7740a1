"""How often ranks show that they live, and when one that does not is taken for dead."""

import math
from dataclasses import dataclass, fields
from numbers import Real

__all__ = ["Heartbeats", "check_heartbeats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeats:
    """Signs of life through the rendezvous store, by a thread of each rank.

    A beat costs a rank one write and two reads, a third where others may join, however many ranks
    there are: each watches the next one among the living. A rank whose process dies breaks its
    links, too, and is taken for dead soon after `lease_seconds`; one that only hangs, after
    `silent_seconds`.

    Attributes:
        interval_seconds: Between two beats; also how soon a change of the membership is learnt.
        silent_seconds: How long a rank may show no sign of life. One that shows one later, having
            been stopped and continued, finds that the others go on without it.
        lease_seconds: How old the knowledge may be, before something is sent, that this rank is
            still a member. If it is older, the store is asked first, for at most as long again.
            Nobody is given up sooner.

    Raises:
        ValueError: If a duration is not positive and finite, or they are not in that order.

    Example:
        >>> Heartbeats(silent_seconds=30.0).interval_seconds
        0.5
    """

    interval_seconds: float = 0.5
    silent_seconds: float = 10.0
    lease_seconds: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Real) or not 0 < float(value) < math.inf:
                raise ValueError(
                    f"{field.name} must be a number of seconds above 0 and finite, got {value!r}"
                )
        if not self.interval_seconds < self.lease_seconds <= self.silent_seconds:
            raise ValueError(
                f"interval_seconds={self.interval_seconds:g}, lease_seconds={self.lease_seconds:g}"
                f" and silent_seconds={self.silent_seconds:g} must rise in this order: a rank must "
                "be able to renew its lease, and have lost it before the others give it up"
            )


def check_heartbeats(heartbeats: object) -> None:
    """Raises `ValueError` for what is neither `Heartbeats` nor None."""
    if heartbeats is not None and not isinstance(heartbeats, Heartbeats):
        raise ValueError(
            "heartbeats must be gg.Heartbeats(...), or None for a membership that never changes, "
            f"got {heartbeats!r}"
        )
