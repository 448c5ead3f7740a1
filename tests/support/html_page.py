"""Reads a report as HTML: checks that it is well-formed and keeps what it holds."""

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Checks that elements close in order, and keeps text, attributes and table rows."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.contents: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
            self.contents.setdefault(tag, []).append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open:
            return
        self.contents[self.open[-1]][-1] += data
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data

    def data(self) -> dict[str, Any]:
        (text,) = (text for text in self.contents["script"] if text.startswith("{"))
        return json.loads(text)

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row[0] == name)
