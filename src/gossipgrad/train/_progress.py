"""What a run shows while it goes on: a live line, a line an epoch, or nothing."""

import math
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._config import TrainConfig
from ._metrics import Event

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# Bar and remaining time beside all figures take so much.
_WIDE_COLUMNS = 120


class Progress:
    """Takes the events of the rank that is shown."""

    def __init__(self, config: TrainConfig) -> None:
        self._epochs, self._is_quiet = config.epochs, config.quiet
        self._bar: RichProgress | None = None
        self._accuracy: str | None = None
        self._wants_bar = sys.stdout.isatty() and not os.environ.get("CI") and not config.quiet

    def take(self, event: Event) -> None:
        """Take an event."""
        kind = event["event"]
        if self._wants_bar and find_spec("rich") is not None:
            self._wants_bar = False
            self._open_bar()
        if kind in ("checkpoint", "members"):
            self.notice(event["text"])
        elif kind == "ready" and self._bar is not None:
            self._bar.update(self._task, total=event["total_steps"])
        elif kind == "progress" and self._bar is not None:
            self._bar.update(
                self._task,
                completed=event["step"],
                description=f"epoch {event['epoch'] + 1}/{self._epochs}",
                figures="  ".join(self._figures(event)),
            )
        elif kind == "epoch" and not self._is_quiet:
            self._show_epoch(event)

    def notice(self, text: str) -> None:
        """Tell the user something that happened: above the bar, else on stderr."""
        text = f"gossipgrad: {text}"
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._wants_bar = False
        if self._bar is not None:
            self._bar.stop()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        console = Console()
        self._is_narrow = console.width < _WIDE_COLUMNS
        columns: list[ProgressColumn]
        columns = [TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")]
        if not self._is_narrow:
            columns = [columns[0], BarColumn(bar_width=20), columns[1], TimeRemainingColumn()]
        self._bar = RichProgress(*columns, console=console, transient=True)
        self._task: TaskID = self._bar.add_task("starting", total=None, figures="")
        self._bar.start()

    def _figures(self, event: Event) -> list[str]:
        figures, is_narrow = _loss(event), self._is_narrow
        if self._accuracy is not None:
            figures.append(
                self._accuracy.replace("accuracy", "acc") if is_narrow else self._accuracy
            )
        if event["consensus_distance"] is not None:
            word = "dist" if is_narrow else "distance"
            figures.append(f"{word} ~{event['consensus_distance']:.3g}")
        figures.append(f"{event['samples_per_second']:,.0f}{'' if is_narrow else ' samples'}/s")
        figures.append(f"exposed {event['exposed_share']:.0%}")
        return figures

    def _show_epoch(self, event: Event) -> None:
        self._accuracy = show_metric(event)
        is_within = isinstance(event["epoch"], float)  # the share of epochs that is over
        done = f"{event['epoch']:.3g}" if is_within else event["epoch"] + 1
        parts = [
            f"epoch {done}/{self._epochs}",
            *_loss(event),
            self._accuracy,
        ]
        if event["consensus_distance"] is not None:
            parts.append(f"consensus distance {event['consensus_distance']:.3g}")
        parts.append(f"{event['samples_per_second']:,.0f} samples/s")
        line = "  ".join(parts)
        if self._bar is None:
            print(line, flush=True)
            return
        self._bar.console.print(line, markup=False, highlight=False)
        self._bar.update(self._task, completed=event["step"])


def show_metric(found: Mapping[str, Any]) -> str:
    """What an evaluation found, in words: an epoch event, or a summary.

    Example:
        >>> show_metric({"metric_name": "error", "metric_format": ".3g", "accuracy": 25.04})
        'error 25'
        >>> show_metric({"metric_name": "error", "metric_format": ".3g", "accuracy": None})
        'error nan'
    """
    value = math.nan if found["accuracy"] is None else found["accuracy"]
    return f"{found['metric_name']} {value:{found['metric_format']}}"


def _loss(event: Event) -> list[str]:
    """The loss in words, nothing before the first step of an epoch."""
    return [] if event["loss"] is None else [f"loss {event['loss']:.4f}"]
