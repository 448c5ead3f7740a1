"""Numbers as people read them; "n/a" for what is not known."""

from collections.abc import Sequence
from itertools import islice
from typing import TypeGuard

UNKNOWN = "n/a"
# What lists ranks shows so many: more rows are read in the files, not on a page.
MAX_RANKS_LISTED = 256
# Beyond it sums and means overflow, and a float cannot hold every int; nothing measured is near.
_MAX_SIZE = 1e300


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a number that can be reckoned with: finite and not absurd.

    Example:
        >>> is_number(1.5), is_number(float("nan")), is_number(10**400), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MAX_SIZE <= value <= _MAX_SIZE


def number(value: object) -> str:
    """Four significant digits, thousands grouped, an exponent only where it must be.

    Example:
        >>> number(12345.6), number(0.00123456), number(1e-9), number(20), number(None)
        ('12,346', '0.001235', '1e-09', '20', 'n/a')
    """
    if not is_number(value):
        return UNKNOWN
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: object) -> str:
    """A share of 1 in percent: one decimal, two below one percent.

    Example:
        >>> percent(0.9785), percent(0.00312), percent(0)
        ('97.9%', '0.31%', '0.0%')
    """
    if not is_number(share):
        return UNKNOWN
    return f"{100 * share:.{2 if 0 < abs(share) < 0.01 else 1}f}%"


def byte_count(value: object) -> str:
    """Bytes with a decimal prefix.

    Example:
        >>> byte_count(532), byte_count(1_048_576)
        ('532 B', '1.05 MB')
    """
    if not is_number(value):
        return UNKNOWN
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: object) -> str:
    """A time in the units that fit it.

    Example:
        >>> duration(0.0123), duration(7.25), duration(125), duration(7380)
        ('12.3 ms', '7.25 s', '2 min 5 s', '2 h 3 min')
    """
    if not is_number(seconds):
        return UNKNOWN
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def listed(values: Sequence[object], most: int = 16) -> str:
    """Values in a row of words, the first of them where there are many.

    Example:
        >>> listed([1, 3]), listed(range(1000), 3)
        ('1, 3', '0, 1, 2 and 997 more')
    """
    shown = ", ".join(map(str, islice(values, most)))
    return shown if len(values) <= most else f"{shown} and {len(values) - most:,} more"


def shortened(value: object) -> object:
    """A JSON value whose long lists and objects are cut, with a word on how much was left out.

    Example:
        >>> shortened({"ranks": [0] * 300})["ranks"][-2:]
        [0, '44 more left out']
    """
    if isinstance(value, list):
        kept: list[object] = [shortened(each) for each in value[:MAX_RANKS_LISTED]]
        left = len(value) - len(kept)
        return [*kept, f"{left:,} more left out"] if left else kept
    if isinstance(value, dict):
        items = {k: shortened(each) for k, each in islice(value.items(), MAX_RANKS_LISTED)}
        left = len(value) - len(items)
        return items | {"...": f"{left:,} more left out"} if left else items
    return value
