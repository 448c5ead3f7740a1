"""What a run shows while it goes on: a live line, a line an epoch, or nothing."""

import os
import sys
from typing import TYPE_CHECKING

from ._config import TrainConfig
from ._metrics import Event

if TYPE_CHECKING:
    from rich.progress import TaskID

# Bar and remaining time beside all figures take so much.
_WIDE_COLUMNS = 120


class Progress:
    """Takes the events of the rank that is shown; shows nothing itself but what went wrong."""

    def __init__(self, config: TrainConfig) -> None:
        self._epochs, self._job = config.epochs, config.job

    def take(self, event: Event) -> None:
        """Take an event."""
        kind = event["event"]
        if kind in ("checkpoint", "members"):
            self.notice(event["text"])
        elif kind == "ready":
            self._show_start(event["total_steps"])
        elif kind == "progress":
            self._show_step(event)
        elif kind == "epoch":
            self._show_epoch(event)

    def notice(self, text: str) -> None:
        """Tell the user something that happened, on stderr."""
        print(f"gossipgrad: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _show_start(self, total_steps: int) -> None:
        pass

    def _show_step(self, event: Event) -> None:
        pass

    def _show_epoch(self, event: Event) -> None:
        pass

    def _epoch_line(self, event: Event) -> str:
        parts = [
            f"epoch {event['epoch'] + 1}/{self._epochs}",
            *_loss(event),
            show_metric(event["accuracy"], self._job),
        ]
        if event["consensus_distance"] is not None:
            parts.append(f"consensus distance {event['consensus_distance']:.3g}")
        parts.append(f"{event['samples_per_second']:,.0f} samples/s")
        return "  ".join(parts)


class PlainProgress(Progress):
    """One plain line an epoch, for logs."""

    def _show_epoch(self, event: Event) -> None:
        print(self._epoch_line(event), flush=True)


class LiveProgress(Progress):
    """A line an epoch above a bar that moves with the steps, for terminals.

    A narrow terminal gets the figures alone, in short words.
    """

    def __init__(self, config: TrainConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__(config)
        console = Console()
        self._is_narrow = console.width < _WIDE_COLUMNS
        self._accuracy: float | None = None
        columns = [TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")]
        if not self._is_narrow:
            columns = [columns[0], BarColumn(bar_width=20), columns[1], TimeRemainingColumn()]
        self._bar = RichProgress(*columns, console=console, transient=True)
        self._task: TaskID = self._bar.add_task("starting", total=None, figures="")
        self._bar.start()

    def notice(self, text: str) -> None:
        """Tell the user something that happened, above the bar."""
        self._bar.console.print(f"gossipgrad: {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _show_start(self, total_steps: int) -> None:
        self._bar.update(self._task, total=total_steps)

    def _show_step(self, event: Event) -> None:
        figures = _loss(event)
        if self._accuracy is not None:
            figures.append(
                show_metric(self._accuracy, self._job, digits=1, is_short=self._is_narrow)
            )
        if event["consensus_distance"] is not None:
            word = "dist" if self._is_narrow else "distance"
            figures.append(f"{word} ~{event['consensus_distance']:.3g}")
        figures.append(
            f"{event['samples_per_second']:,.0f}{'' if self._is_narrow else ' samples'}/s"
        )
        figures.append(f"exposed {event['exposed_share']:.0%}")
        self._bar.update(
            self._task,
            completed=event["step"],
            description=f"epoch {event['epoch'] + 1}/{self._epochs}",
            figures="  ".join(figures),
        )

    def _show_epoch(self, event: Event) -> None:
        self._accuracy = event["accuracy"]
        self._bar.console.print(self._epoch_line(event), markup=False, highlight=False)
        self._bar.update(self._task, completed=event["step"])


def make_progress(config: TrainConfig) -> Progress:
    """Live on a terminal, plain elsewhere and in CI, silent with `quiet`."""
    if config.quiet:
        return Progress(config)
    if sys.stdout.isatty() and not os.environ.get("CI"):
        try:
            return LiveProgress(config)
        except ModuleNotFoundError:
            pass
    return PlainProgress(config)


def show_metric(value: float, job: str | None, *, digits: int = 2, is_short: bool = False) -> str:
    """What an evaluation found, in words: of a user's job it may be any number."""
    if job is not None:
        return f"metric {value:.4g}"
    return f"acc {value:.1%}" if is_short else f"accuracy {value:.{digits}%}"


def _loss(event: Event) -> list[str]:
    """The loss in words, nothing before the first step of an epoch."""
    return [] if event["loss"] is None else [f"loss {event['loss']:.4f}"]
