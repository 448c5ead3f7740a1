"""Rates in bits a second, as people write them."""

import re

__all__ = ["MINIMUM_RATE", "format_rate", "parse_rate"]

MINIMUM_RATE = 1e6  # below, a bucket of few packets is no longer a smooth rate
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
# Bits, however they are written; of `bps` and `Bps` the first alone is a rate in bits.
_WRITTEN = re.compile(
    r"\s*(\d+(?:\.\d*)?(?:[eE]\d+)?)\s*(?:([kKmMgG]?)(?:[bB][iI][tT](?:/[sS])?|bps)?)\s*"
)


def parse_rate(text: str) -> float:
    """Bits a second of `1Gbit`, `100 Mbit/s`, `2.5g`, `1e9`.

    Raises:
        ValueError: If it is no rate, or one of bytes.
    """
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(
            f"rate {text!r} is not understood: write a number and kbit, Mbit or Gbit, as in 100Mbit"
        )
    return check_rate(float(found[1]) * _UNITS[found[2].lower()], f"rate {text!r}")


def check_rate(rate: float, what: str) -> float:
    """The rate itself, if a link can have it."""
    if not MINIMUM_RATE <= rate < float("inf"):
        raise ValueError(
            f"{what} is {rate:g} bit/s: a shaped link carries {format_rate(MINIMUM_RATE)} or more, "
            "in bits a second (1e9 is 1 Gbit/s)"
        )
    return float(rate)


def format_rate(rate: float) -> str:
    """`1e9` as `1 Gbit/s`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.4g} {unit}bit/s"
    return f"{rate:.4g} bit/s"
