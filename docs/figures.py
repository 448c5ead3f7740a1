"""Draws the figures of these pages from the library itself and from what was measured.

python docs/figures.py            # draws all into docs/pictures
python docs/figures.py --record   # records the timeline anew first
"""

import argparse
import json
import math
from pathlib import Path

from drawing import COLOURS, FAINT, GRID, Drawing
from recording import record

from gossipgrad.topology import by_name, diffusion, dissemination

HERE = Path(__file__).parent
FIGURES = HERE / "pictures"
RESULTS = HERE.parent / "benchmarks" / "results"
TIMELINE = FIGURES / "timeline.json"


def draw_rounds(path: Path, world_size: int = 8) -> None:
    """Two periods of dissemination: who sends to whom, and the path of one rank's weights."""
    schedule = dissemination(world_size, rotate=False)
    rounds = schedule.period
    drawing = Drawing(640, 60 + 34 * world_size)
    left, top, across, down = 90, 50, 170, 34
    knows = {0}
    for r in range(world_size):
        drawing.text(left - 50, top + down * r + 4, f"rank {r}", anchor="middle")
    for t in range(rounds + 1):
        for r in range(world_size):
            drawing.dot(left + across * t, top + down * r, COLOURS[0] if r in knows else FAINT, 4)
        if t == rounds:
            break
        drawing.text(left + across * (t + 0.5), top - 25, f"round {t}", anchor="middle")
        send_to = schedule.round_peers(t).send_to
        told = set()
        for r in range(world_size):
            start = (left + across * t + 8, top + down * r)
            end = (left + across * (t + 1) - 8, top + down * int(send_to[r]))
            drawing.arrow(start, end, COLOURS[0] if r in knows else GRID)
            if r in knows:
                told.add(int(send_to[r]))
        knows |= told
    drawing.save(path)


def draw_rotation(path: Path, world_size: int = 8, periods: int = 4) -> None:
    """Who receives from whom, period by period; the colour is the round within the period."""
    schedule = dissemination(world_size, seed=0)
    cell, gap, left, top = 16, 26, 30, 56
    side = cell * world_size
    drawing = Drawing(left + periods * (side + gap), top + side + 40)
    for number in range(periods):
        x0 = left + number * (side + gap)
        drawing.text(x0 + side / 2, top - 28, f"period {number}", anchor="middle")
        for k in range(world_size + 1):
            drawing.line([(x0, top + cell * k), (x0 + side, top + cell * k)], colour=GRID, width=1)
            drawing.line([(x0 + cell * k, top), (x0 + cell * k, top + side)], colour=GRID, width=1)
        for k in range(schedule.period):
            t = number * schedule.period + k
            for r, sender in enumerate(schedule.round_peers(t).recv_from):
                title = f"round {t}: rank {r} receives from rank {sender}"
                x, y = x0 + cell * int(sender) + 2, top + cell * r + 2
                drawing.box(x, y, cell - 4, cell - 4, COLOURS[k], title)
    for k in range(schedule.period):
        drawing.box(left + 175 * k, top + side + 18, 12, 12, COLOURS[k])
        drawing.text(left + 175 * k + 18, top + side + 29, f"round {k} of the period")
    drawing.text(left, top - 8, "sender, across; receiver, down", colour=FAINT)
    for r in range(world_size):
        drawing.text(left - 8, top + cell * (r + 0.8), f"{r}", anchor="end", colour=FAINT)
    drawing.save(path)


class Chart:
    """Curves over rounds on one pair of axes."""

    def __init__(self, drawing: Drawing, x_max: float, y_range: tuple[float, float], log: bool):
        self.drawing, self.log = drawing, log
        self.x_max, self.y_range = x_max, y_range
        self.left, self.right, self.top, self.bottom = 70, 470, 36, 286

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of the data is in the picture."""
        low, high = self.y_range
        share = math.log(y / low) / math.log(high / low) if self.log else (y - low) / (high - low)
        across = self.left + (self.right - self.left) * x / self.x_max
        return across, self.bottom - (self.bottom - self.top) * share

    def axes(self, x_ticks: list[float], y_ticks: list[float], x_name: str, y_name: str) -> None:
        """Grid, ticks and names."""
        for x in x_ticks:
            across, _ = self.at(x, self.y_range[0])
            self.drawing.text(across, self.bottom + 20, f"{x:,g}", anchor="middle")
        for y in y_ticks:
            _, down = self.at(0, y)
            self.drawing.line([(self.left, down), (self.right, down)], colour=GRID, width=1)
            self.drawing.text(self.left - 8, down + 4, f"{y:g}", anchor="end")
        self.drawing.text((self.left + self.right) / 2, self.bottom + 42, x_name, anchor="middle")
        self.drawing.text(self.left - 55, 16, y_name)

    def curves(self, named: dict[str, list[tuple[float, float]]]) -> None:
        """The curves, with their names at the right in the order of their ends."""
        ends = sorted(named, key=lambda name: -named[name][-1][1])
        heights = spread([self.at(*named[name][-1])[1] for name in ends], 18)
        for number, (name, points) in enumerate(named.items()):
            colour = COLOURS[number]
            self.drawing.line([self.at(*point) for point in points], colour=colour, width=2)
            for point in points:
                self.drawing.dot(*self.at(*point), colour)
            height = heights[ends.index(name)] + 4
            self.drawing.text(self.right + 12, height, name, colour=colour)


def spread(heights: list[float], least: float) -> list[float]:
    """The heights, moved down so that each is at least so far below the one before."""
    result: list[float] = []
    for height in heights:
        result.append(height if not result else max(height, result[-1] + least))
    return result


def draw_islands(path: Path, ranks: int = 3) -> None:
    """Two islands: gradients inside, a slice of each rank between, gathered inside."""
    drawing = Drawing(640, 250)
    for island, left in enumerate((20, 420)):
        drawing.line(
            [(left, 40), (left + 200, 40), (left + 200, 220), (left, 220), (left, 40)],
            colour=GRID,
        )
        drawing.text(left + 100, 28, f"island {island}: one replica", anchor="middle")
        for rank in range(ranks):
            y = 70 + 55 * rank
            drawing.text(left + 12, y + 14, f"rank {rank}")
            for part in range(ranks):  # the slices of a bucket
                colour = COLOURS[rank] if part == rank else GRID
                drawing.box(left + 80 + 34 * part, y, 30, 20, colour)
    for rank in range(ranks):
        y = 80 + 55 * rank
        drawing.arrow((310, y), (412, y), COLOURS[rank])
        drawing.arrow((330, y), (228, y), COLOURS[rank])
        drawing.text(320, y - 8, f"slice {rank}", anchor="middle")
    drawing.text(320, 242, "slow link: one model each way, whatever the ranks", anchor="middle")
    for left in (120, 520):
        drawing.text(left, 212, "fast link: gradients, slices", anchor="middle", colour=FAINT)
    drawing.save(path)


def draw_diffusion(path: Path, world_size: int = 24, rounds: int = 12) -> None:
    """How far one rank's weights have come, by schedule."""
    drawing = Drawing(640, 336)
    chart = Chart(drawing, rounds, (0, 1), log=False)
    chart.axes(
        list(range(0, rounds + 1, 2)),
        [0, 0.25, 0.5, 0.75, 1],
        "rounds",
        f"share of {world_size} ranks heard of, mean over ranks",
    )
    curves = {}
    for name in ("dissemination", "matching", "ring"):
        shares = diffusion(by_name(name, world_size), rounds).mean(axis=1)
        curves[name] = [(t, float(share)) for t, share in enumerate(shares)]
    chart.curves(curves)
    drawing.save(path)


def draw_distance(path: Path, world_size: int = 4) -> None:
    """Consensus distance as training goes on, measured."""
    rows = json.loads((RESULTS / "equal_accuracy.json").read_text())["rows"]
    drawing = Drawing(680, 336)
    chart = Chart(drawing, 1000, (1e-4, 100), log=True)
    chart.axes(
        [0, 250, 500, 750, 1000],
        [1e-4, 1e-2, 1, 100],
        "rounds",
        f"consensus distance, {world_size} ranks",
    )
    names = {
        "no communication": "no communication",
        "overlap, weights": "overlap",
        "sync, weights": "sync",
        "overlap, weights+state": "overlap, with state",
    }
    curves = {}
    for way, name in names.items():
        key = ("drift", world_size, way)
        (row,) = [row for row in rows if (row["task"], row["ranks"], row["way"]) == key]
        curves[name] = [(int(step), distance) for step, distance in row["distance"].items()]
    chart.curves(curves)
    drawing.save(path)


def draw_timeline(path: Path) -> None:
    """Some recorded steps of one rank, with the exchange hidden and not hidden."""
    recorded = json.loads(TIMELINE.read_text())
    colours = dict(zip(("compute", "exchange", "wait", "mix"), COLOURS, strict=False))
    longest = max(max(span["end_ms"] for span in spans) for spans in recorded["modes"].values())
    left, width = 90, 620
    drawing = Drawing(left + width + 20, 60 + 110 * len(recorded["modes"]))
    for row, (mode, spans) in enumerate(recorded["modes"].items()):
        top = 20 + 110 * row
        drawing.text(left, top, f'mode="{mode}"')
        for lane, name in enumerate(("on the step", "network")):
            drawing.text(left - 10, top + 28 + 32 * lane, name, anchor="end", colour=FAINT)
        for span in spans:
            lane = 1 if span["name"] == "exchange" else 0
            x = left + width * span["start_ms"] / longest
            across = width * (span["end_ms"] - span["start_ms"]) / longest
            title = f"{span['name']}, {span['end_ms'] - span['start_ms']:.1f} ms"
            drawing.box(x, top + 12 + 32 * lane, max(across, 1.0), 22, colours[span["name"]], title)
        end = left + width * max(s["end_ms"] for s in spans if s["name"] != "exchange") / longest
        drawing.line([(end, top + 6), (end, top + 70)], colour=FAINT)
    base = 36 + 110 * len(recorded["modes"])
    for number, (name, colour) in enumerate(colours.items()):
        drawing.box(left + 130 * number, base - 11, 12, 12, colour)
        drawing.text(left + 130 * number + 18, base, name)
    drawing.save(path)


DRAWN = {
    "rounds": draw_rounds,
    "rotation": draw_rotation,
    "islands": draw_islands,
    "diffusion": draw_diffusion,
    "distance": draw_distance,
    "timeline": draw_timeline,
}


def draw_all(folder: Path) -> None:
    """Draws every figure into the folder."""
    for name, draw in DRAWN.items():
        draw(folder / f"{name}.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help="record the timeline anew")
    parser.add_argument("--into", type=Path, default=FIGURES, help="folder of the pictures")
    options = parser.parse_args()
    if options.record:
        TIMELINE.write_text(json.dumps(record(), indent=1) + "\n")
    draw_all(options.into)
