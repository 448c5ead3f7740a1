"""Tables of the documentation that are filled with what was measured."""

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without its last newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("| --- ", "|---") for line in lines)


def fill(text: str, new: str) -> str:
    """The page with the table in place of the one whose first column is headed alike.

    Raises:
        ValueError: The page has none.

    Example:
        >>> print(fill(table(["a", "b"], [["1", "2"]]), table(["a", "c"], [["3", "4"]])), end="")
        | a | c |
        |---|---|
        | 3 | 4 |
    """
    head = new[: new.index(" | ") + 3]
    if not text.startswith(head) and f"\n{head}" not in text:
        raise ValueError(f"the page has no table that begins with {head!r}")
    begin = 0 if text.startswith(head) else text.index(f"\n{head}") + 1
    end = text.find("\n\n", begin)
    return text[:begin] + new + (text[end:] if end >= 0 else "\n")


def fill_between(page: Path, name: str, new: str) -> None:
    """Writes text between the two marks of a benchmark in a page.

    Raises:
        ValueError: The page does not have them.
    """
    begin, end = f"<!-- benchmarks.{name} -->\n", "<!-- end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page.name} has no {begin.strip()!r} with {end!r} behind it")
    page.write_text(f"{before}{begin}\n{new}\n\n{end}{after}", encoding="utf-8")
