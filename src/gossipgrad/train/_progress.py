"""What a run shows during training: a live line, a line an epoch, or nothing."""

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


class Progress:
    """Takes the events of the rank that is shown: a bar on a terminal, and a line an epoch."""

    def __init__(self, config: TrainConfig) -> None:
        self._epochs, self._is_quiet = config.epochs, config.quiet
        self._bar: RichProgress | None = None
        self._metric: str | None = None
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
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = TextColumn("{task.description}"), BarColumn(bar_width=20)
        figures = TextColumn("{task.fields[figures]}")
        self._bar = RichProgress(
            *columns, figures, TimeRemainingColumn(), console=Console(), transient=True
        )
        self._task: TaskID = self._bar.add_task("starting", total=None, figures="")
        self._bar.start()

    def _figures(self, event: Event) -> list[str]:
        figures = _loss(event) + ([] if self._metric is None else [self._metric])
        if event["consensus_distance"] is not None:
            figures.append(f"distance ~{event['consensus_distance']:.3g}")
        samples = f"{event['samples_per_second']:,.0f} samples/s"
        return [*figures, samples, f"exposed {event['exposed_share']:.0%}"]

    def _show_epoch(self, event: Event) -> None:
        self._metric = show_metric(event)
        is_within = isinstance(event["epoch"], float)  # the share of epochs that is over
        done = f"{event['epoch']:.3g}" if is_within else event["epoch"] + 1
        parts = [f"epoch {done}/{self._epochs}", *_loss(event), self._metric]
        if event["consensus_distance"] is not None:
            parts.append(f"consensus distance {event['consensus_distance']:.3g}")
        line = "  ".join([*parts, f"{event['samples_per_second']:,.0f} samples/s"])
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
