"""How often ranks send heartbeats, and when a silent rank is declared dead."""

import math
from dataclasses import dataclass, fields
from numbers import Real

__all__ = ["Heartbeats", "check_heartbeats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeats:
    """Heartbeats through the rendezvous store, from a thread of each rank.

    A beat costs a rank one write and two reads, or three where ranks may join, for any world size:
    each rank watches the next living one. A rank whose process dies also breaks its links, and is
    declared dead soon after `lease_seconds`; a rank that hangs, after `silent_seconds`.

    Attributes:
        interval_seconds: Time between two beats; also how soon a change of the membership is
            noticed.
        silent_seconds: How long a rank may send no heartbeat. A rank that was stopped for longer,
            or in one call that lets no thread of Python run, such as the unpickling of a large
            file, finds that the others have continued without it.
        lease_seconds: For how long a rank may send after it last checked that it is still a member.
            After that it asks the store first, for at most as long again. No rank is declared dead
            sooner.

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
                "be able to renew its lease, and lose it before the others declare it dead"
            )


def check_heartbeats(heartbeats: object) -> None:
    """Raise `ValueError` unless the value is `Heartbeats` or None."""
    if heartbeats is not None and not isinstance(heartbeats, Heartbeats):
        raise ValueError(
            "heartbeats must be gg.Heartbeats(...), or None for a membership that never changes, "
            f"got {heartbeats!r}"
        )
