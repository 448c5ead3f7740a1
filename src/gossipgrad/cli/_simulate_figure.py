"""The figure of `gossipgrad simulate`: efficiency over the number of ranks."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gossipgrad.planning import Profile

if TYPE_CHECKING:
    from ._simulate_cases import Case

_FORMATS = (".png", ".svg", ".pdf")
_MARKERS = "osD^vPX"


def check(path: Path) -> None:
    """Raise unless a figure can be drawn into that file, before anything is computed.

    Raises:
        ValueError: matplotlib is missing, the format is unknown, or there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            "--figure needs matplotlib, which is not installed: pip install 'gossipgrad[plot]'"
        )
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"--figure {path} must end in {', '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--figure {path}: there is no folder {path.parent}")


def draw(cases: "Sequence[Case]", profile: Profile, path: Path) -> None:
    """One panel a network, one line a strategy; times to accuracy below where they are known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    networks = list(dict.fromkeys(case.network for case in cases))
    timed = any(case.target_accuracy is not None for case in cases)
    figure = Figure(figsize=(4.6 * len(networks), 3.9 * (1 + timed) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{profile.name} on {profile.device}, predicted")
    panels = figure.subplots(1 + timed, len(networks), sharey="row", squeeze=False)
    for column, network in enumerate(networks):
        here = [case for case in cases if case.network == network]
        worlds = sorted({case.prediction.world_size for case in here})
        for row in panels[:, column]:
            row.set_xscale("log")
            row.set_xticks(worlds, [f"{p:,}" for p in worlds])
            row.minorticks_off()
            row.grid(alpha=0.3)
        panels[0][column].set(title=network, xlabel="ranks", ylim=(0, 1.04))
        panels[0][column].yaxis.set_major_formatter(PercentFormatter(1.0))
        for number, name in enumerate(dict.fromkeys(c.prediction.strategy for c in here)):
            line = sorted(
                (c for c in here if c.prediction.strategy == name),
                key=lambda case: case.prediction.world_size,
            )
            style = {"marker": _MARKERS[number % len(_MARKERS)], "label": name}
            panels[0][column].plot(
                [c.prediction.world_size for c in line],
                [c.prediction.efficiency for c in line],
                **style,
            )
            reached = [c for c in line if c.seconds_to_accuracy is not None]
            if timed:
                panels[1][column].plot(
                    [c.prediction.world_size for c in reached],
                    [c.seconds_to_accuracy for c in reached],
                    **style,
                )
        if timed:
            panels[1][column].set(xlabel="ranks", yscale="log")
    panels[0][0].set_ylabel("efficiency: compute / step")
    if timed:
        panels[1][0].set_ylabel("seconds to accuracy")
    panels[0][-1].legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ValueError(f"cannot draw into {path}: {error.strerror}") from error
