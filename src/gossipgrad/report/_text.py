"""Numbers as people read them, HTML that escapes what it holds, and JSON for all readers."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

UNKNOWN = "n/a"
# What lists ranks shows so many: more rows are read in the files, not on a page.
MAX_RANKS_LISTED = 256
# Beyond it sums and means overflow, and a float cannot hold every int; nothing measured is near.
_MAX_SIZE = 1e300


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether one can calculate with `value`: finite, not absurd, no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MAX_SIZE <= value <= _MAX_SIZE


def number(value: object) -> str:
    """Four significant digits, thousands grouped.

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
    """A share of 1 in percent: one decimal, two below one percent."""
    if not is_number(share):
        return UNKNOWN
    return f"{100 * share:.{2 if 0 < abs(share) < 0.01 else 1}f}%"


def formatted(specification: str) -> Callable[[object], str]:
    """What writes numbers by a format specification, such as ".2%"; one that is wrong is ignored.

    Example:
        >>> formatted(".2%")(0.5), formatted(".2%")(None), formatted("?")(3.7e-7)
        ('50.00%', 'n/a', '3.7e-07')
    """
    try:
        format(0.5, specification)
    except ValueError:
        return number
    return lambda value: format(float(value), specification) if is_number(value) else UNKNOWN


def byte_count(value: object) -> str:
    """Bytes with a decimal prefix, such as "1.05 MB"."""
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
    """Values separated by commas: the first of many, and how many more there are."""
    shown = ", ".join(map(str, islice(values, most)))
    return shown if len(values) <= most else f"{shown} and {len(values) - most:,} more"


def shortened(value: object) -> object:
    """A JSON value whose long lists and objects are cut, and say how much was left out."""
    if isinstance(value, list):
        kept: list[object] = [shortened(each) for each in value[:MAX_RANKS_LISTED]]
        left = len(value) - len(kept)
        return [*kept, f"{left:,} more left out"] if left else kept
    if isinstance(value, dict):
        items = {k: shortened(each) for k, each in islice(value.items(), MAX_RANKS_LISTED)}
        left = len(value) - len(items)
        return items | {"...": f"{left:,} more left out"} if left else items
    return value


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """An element with escaped children and attributes.

    In the name of an attribute `_` stands for `-`, and a trailing `_` is dropped.

    Example:
        >>> element("td", "a < b", class_="number")
        '<td class="number">a &lt; b</td>'
    """
    rendered = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
    )
    return Markup(f"<{tag}{rendered}>{join(children)}</{tag}>")


def join(parts: Iterable[str]) -> Markup:
    """Put parts one after the other, escaping those that are not HTML yet."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table whose first column names its rows, in a box that scrolls on a narrow screen."""
    header = (element("th", name, scope="col") for name in head)
    lines = (
        element("tr", element("th", row[0], scope="row"), *(element("td", it) for it in row[1:]))
        for row in rows
    )
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *header)),
        element("tbody", *lines),
    )
    return element("div", whole, class_="scroll", tabindex="0", role="group", aria_label=caption)


def disclosure(summary: str, *children: str) -> Markup:
    """Content that is folded away until it is asked for."""
    return element("details", element("summary", summary), *children)


class Drawing(NamedTuple):
    """A figure that a script of the page draws: its data, and the same values as a table."""

    title: str
    description: str
    payload: dict[str, Any]
    head: list[str]
    rows: list[list[str]]


def dumps(value: object) -> str:
    """Encode `value` as strict ASCII JSON: numbers that are not finite are null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str)


def dumps_for_script(value: object) -> str:
    """The same, to stand in a `<script>` element, which no `<`, `>` or `&` is there to close."""
    text = dumps(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a JSON-lines file, and how many lines are none, as of a killed process."""
    objects: list[dict[str, Any]] = []
    skipped = 0
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                objects.append(value)
            else:
                skipped += 1
    return objects, skipped


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
