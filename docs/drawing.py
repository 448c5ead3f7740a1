"""SVG by hand: what the figures of these pages are drawn with."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = """
svg.gg{--ink:#1f2328;--faint:#8c959f;--grid:#d8dee4;--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;
--c3:#8250df;--c4:#bf3989;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){svg.gg{--ink:#e6edf3;--faint:#848d97;--grid:#30363d;--c0:#58a6ff;
--c1:#f0883e;--c2:#3fb950;--c3:#a371f7;--c4:#f778ba}}
.gg text{fill:var(--ink)}.gg .faint{fill:var(--faint)}
""".strip().replace("\n", "")
COLOURS = tuple(f"var(--c{i})" for i in range(5))
INK, FAINT, GRID = "var(--ink)", "var(--faint)", "var(--grid)"


class Drawing:
    """A picture under construction; coordinates in pixels from the upper left."""

    def __init__(self, width: int, height: int) -> None:
        self._head = f'<svg xmlns="http://www.w3.org/2000/svg" class="gg" viewBox="0 0 {width} '
        self._head += f'{height}" width="{width}">'
        self._parts = [f"<style>{STYLE}</style>"]

    def line(
        self, points: Sequence[tuple[float, float]], *, colour: str = INK, width: float = 1.5
    ) -> None:
        """A line through the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" style="stroke:{colour}" '
            f'stroke-width="{width:g}" stroke-linejoin="round"/>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        """A line with a head at its end."""
        (x0, y0), (x1, y1) = start, end
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        self.line([start, end], colour=colour)
        corners = [(x1, y1)]
        corners += [
            (x1 - 8 * ux + side * 3.5 * uy, y1 - 8 * uy - side * 3.5 * ux) for side in (1, -1)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon points="{path}" style="fill:{colour}"/>')

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, title: str = ""
    ) -> None:
        """A filled rectangle; the title is shown under the pointer."""
        hint = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
            f'style="fill:{colour}">{hint}</rect>'
        )

    def dot(self, x: float, y: float, colour: str = INK, radius: float = 3) -> None:
        """A small disc."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" style="fill:{colour}"/>'
        )

    def text(
        self, x: float, y: float, what: str, *, anchor: str = "start", colour: str = INK
    ) -> None:
        """One line of text; `y` is its base line."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{colour}">'
            f"{escape(what)}</text>"
        )

    def save(self, path: Path) -> None:
        """Writes the picture."""
        path.write_text("\n".join([self._head, *self._parts, "</svg>"]) + "\n")
