"""HTML elements that escape what they hold, and figures: a script's data with a table."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """An element with escaped children and attributes.

    Args:
        tag: Its name.
        children: What it holds: `Markup` as it is, other text escaped.
        attributes: Its attributes; `_` stands for `-`, and a trailing `_` is dropped.

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


def table(
    caption: str, head: list[str], rows: list[list[str]], *, text_columns: Container[int] = ()
) -> Markup:
    """A table whose first column names its rows, in a box that scrolls on a narrow screen.

    Args:
        caption: What the table is of.
        head: The names of the columns.
        rows: The cells, as many a row as there are columns.
        text_columns: The columns that hold prose and not numbers.
    """

    def cell(tag: str, column: int, text: str, **attributes: str) -> Markup:
        if column in text_columns:
            attributes["class_"] = "text"
        return element(tag, text, **attributes)

    header = [cell("th", i, name, scope="col") for i, name in enumerate(head)]
    lines = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(cell("td", i, text) for i, text in enumerate(row[1:], start=1)),
        )
        for row in rows
    ]
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", *header)),
            element("tbody", *lines),
        ),
        class_="scroll",
        tabindex="0",
        role="group",
        aria_label=caption,
    )


def disclosure(summary: str, *children: str) -> Markup:
    """Content that is folded away until it is asked for."""
    return element("details", element("summary", summary), *children)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A figure that a script of the page draws.

    Attributes:
        title: Of the figure.
        description: A sentence or two below it.
        payload: The data for the script.
        head: The columns of a table with the same values.
        rows: Its rows.
    """

    title: str
    description: str
    payload: dict[str, Any]
    head: list[str]
    rows: list[list[str]]

    def table(self, caption: str | None = None) -> Markup:
        """The table; None: its caption is the title."""
        return table(self.title if caption is None else caption, self.head, self.rows)
