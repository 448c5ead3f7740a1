"""What `compress` may be, and what it goes with."""

from typing import Any

from gossipgrad.compression import SharedMask, TopK
from gossipgrad.topology import Schedule

__all__ = ["Compressor", "check_links", "fixed_partners", "name_of", "resolve_compress"]

Compressor = SharedMask | TopK

_KINDS: dict[str, type[Compressor]] = {"shared-mask": SharedMask, "top-k": TopK}


def resolve_compress(compress: Any) -> Compressor | None:
    """A compressor by value, or by name and density, such as `"shared-mask:0.1"`; None for none.

    Behind the density of `"top-k"` its `consensus_step` may stand, after another colon.

    Raises:
        ValueError: There is no such, or its density cannot be.
    """
    if compress is None or isinstance(compress, Compressor):
        return compress
    if isinstance(compress, str):
        kind, *numbers = compress.split(":")
        try:
            told = [float(number) for number in numbers]
        except ValueError:
            told = []
        if kind in _KINDS and 1 <= len(told) <= (2 if kind == "top-k" else 1):
            return _KINDS[kind](*told)
    raise ValueError(
        f"compress must be gg.SharedMask(density), gg.TopK(density), or such as 'shared-mask:0.1' "
        f"or 'top-k:0.01', got {compress!r}: None sends all weights"
    )


def name_of(compress: Compressor) -> str:
    """The name with which `resolve_compress` makes it again."""
    (name,) = (name for name, kind in _KINDS.items() if isinstance(compress, kind))
    step = compress.consensus_step if isinstance(compress, TopK) else None
    return ":".join([name, *(repr(float(n)) for n in (compress.density, step) if n is not None)])


def check_links(compress: Compressor | None, schedule: Schedule) -> None:
    """Raises `ValueError` for a schedule whose links cannot carry differences."""
    if not isinstance(compress, TopK) or schedule.world_size == 1:
        return
    if not schedule.symmetric:
        raise ValueError(
            f"compress={compress} and topology {schedule.name!r}: the two ends of a link have to "
            "count the same exchanges, and there one sends what the other does not answer. Use "
            "topology='ring' or 'complete', or compress=gg.SharedMask(density)"
        )
    if fixed_partners(schedule, 0) is None:
        raise ValueError(
            f"compress={compress} and topology {schedule.name!r}, which rotates: each partner "
            "costs two copies of all weights, and in the end each rank would meet all. Use "
            "topology='ring' or 'complete', a schedule made with rotate=False, or "
            "compress=gg.SharedMask(density), which keeps no copies"
        )


def fixed_partners(schedule: Schedule, rank: int) -> frozenset[int] | None:
    """All whom a rank ever meets; None where partners rotate, and one period does not show them."""
    met = {schedule.peers(round, rank).send_to for round in range(schedule.period)}
    partners = frozenset(partner for partner in met if partner is not None)
    told = schedule.describe()
    there = len(told.get("living", range(schedule.world_size)))
    rotates = told.get("inner", told)["rotate"]
    return None if rotates and len(partners) < there - 1 else partners
