"""Counts, rates and times as people write them, and back."""

import math
import re

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d+))?"
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": -9, "us": -6, "ms": -3, "s": 0}  # powers of ten


def count_of(text: str) -> int:
    """The number of `124M`, `1.5B` or `7850`."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([kKmMbBgGtT]?)\s*", text)
    count = 0.0 if match is None else float(f"{match[1]}e{match[2] or 0}")
    count *= 1 if match is None else _COUNTS[match[3].lower()]
    if not 1 <= count < 1e18:
        raise ValueError(f"{text!r} is no number of parameters: write 124M, 1.5B or 7850")
    return round(count)


def count_text(count: int) -> str:
    """A number as people write it: `124 M`, `7.85 k`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count}"


def rate_of(text: str) -> float:
    """Bits a second of `1Gbit`, `100Mbit/s` or `2.5 Gbps`."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([kKmMgGtT]?)(?:bit|Bit|bit/s|bps)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no rate: write 100Mbit, 1Gbit or 2.5Gbit, in bits a second")
    rate = float(f"{match[1]}e{match[2] or 0}") * _RATES[match[3].lower() + "bit"]
    if not 0 < rate < math.inf:
        raise ValueError(
            f"a rate of {text!r} is not that of a link: give one above 0, such as 10Gbit"
        )
    return rate


def seconds_of(text: str) -> float:
    """Seconds of `50us`, `1.5 ms` or `2s`."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*(ns|us|ms|s)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no time: write 50us, 1.5ms or 2s")
    seconds = float(f"{match[1]}e{int(match[2] or 0) + _TIMES[match[3]]}")
    if math.isinf(seconds):
        raise ValueError(f"a time of {text!r} never ends: give one that does, as 50us")
    return seconds


def list_of(text: str, what: str, example: str) -> list[str]:
    """The parts of a list with commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(
            f"{what} {text!r} has an empty part: write a list with commas, as {example}"
        )
    return parts


def rate_text(rate: float) -> str:
    """A rate as people write it: `2.5 Gbit/s`."""
    for unit, size in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        if rate >= size:
            return f"{rate / size:.4g} {unit}/s"
    return f"{rate:.4g} bit/s"


def seconds_text(seconds: float) -> str:
    """A time as people write it: `12.3 ms`, `2 h`."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size and (size <= 1 or seconds >= 1.5 * size):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
