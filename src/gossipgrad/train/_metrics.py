"""Metrics of one rank: counted while it trains, written as one JSON object a line."""

import errno
import json
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from ._loggers import Loggers, scalars_of

Event = dict[str, Any]


class Metrics:
    """Counts what a rank has done and writes it down as it happens."""

    def __init__(
        self,
        path: Path,
        *,
        loggers: Loggers,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        self.steps = 0
        self.samples = 0
        self.epochs = 0
        # Above 0 where another number of ranks made the earlier steps: figures count from it.
        self.counted_from = 0
        self.train_seconds = 0.0
        self._start = perf_counter()
        self._loss_sum = 0.0
        self.epoch_samples = 0
        self._epoch_seconds = 0.0
        if resumed is not None:
            self._take_up(resumed)
        # Later steps of the last start are made again; the last line may be a part of one.
        offset = None if resumed is None else resumed["offset"]
        self._file = path.open("ab", buffering=0)
        self._file.truncate(path.read_bytes()[: offset or 0].rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)
        self._left_out = 0
        self._error: OSError | None = None
        self._loggers = loggers

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as problem:  # of a network's disk: the model is still to be written
            self._leave_out(problem)
        self._loggers.close()

    @property
    def notes(self) -> list[str]:
        """What could not be written, in words."""
        notes = list(self._loggers.notes)
        if self._error is not None:
            notes.append(
                f"events that the metrics lack: {self._left_out}, because of {self._error}"
            )
        return notes

    @property
    def seconds(self) -> float:
        """Since the start."""
        return perf_counter() - self._start

    def count_step(self, samples: int, step_seconds: float) -> None:
        """Add a finished step of `samples` samples."""
        self.steps += 1
        self.samples += samples
        self.train_seconds += step_seconds
        self.epoch_samples += samples
        self._epoch_seconds += step_seconds

    def count_loss(self, loss: float, samples: int) -> None:
        """Add the mean loss of `samples` samples, as soon as it is read from the device."""
        self._loss_sum += loss * samples

    def state(self, *, epoch_batches: int) -> dict[str, Any]:
        """What was counted and written so far; an epoch has `epoch_batches` batches."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "epochs": self.epochs,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "loss_sum": self._loss_sum,
            "epoch_samples": self.epoch_samples,
            "epoch_seconds": self._epoch_seconds,
            "epoch_batches": epoch_batches,
            "counted_from": self.counted_from,
            "offset": self._file.tell(),
        }

    def _take_up(self, state: Mapping[str, Any]) -> None:
        self.steps, self.samples = state["steps"], state["samples"]
        self.epochs, self.train_seconds = state["epochs"], state["train_seconds"]
        self._start = perf_counter() - state["seconds"]
        self._loss_sum, self.epoch_samples = state["loss_sum"], state["epoch_samples"]
        self._epoch_seconds = state["epoch_seconds"]
        self.counted_from = state["counted_from"]

    def begin_epoch(self) -> None:
        """Forget the sums of the epoch before."""
        self._loss_sum = self._epoch_seconds = 0.0
        self.epoch_samples = 0

    @property
    def epoch_loss(self) -> float:
        """Mean training loss of the epoch so far, NaN before its first step."""
        return self._loss_sum / self.epoch_samples if self.epoch_samples else math.nan

    @property
    def samples_per_second(self) -> float:
        """Of this rank, in the epoch so far, evaluations left out."""
        return self.epoch_samples / self._epoch_seconds if self._epoch_seconds else 0.0

    def write(self, event: str, **values: Any) -> Event:
        """Write one event and return it; numbers that are not finite become null."""
        record = {"event": event, **{name: _plain(value) for name, value in values.items()}}
        line, size_bytes = f"{json.dumps(record)}\n".encode(), self._file.tell()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size_bytes)
                self._file.seek(size_bytes)
            self._leave_out(error)
        self._loggers.log(self.steps, scalars_of(record))
        return record

    def _leave_out(self, error: OSError) -> None:
        self._left_out += 1
        if self._error is None:
            warnings.warn(
                f"an event is left out of the metrics ({error}); training continues, and they do "
                "as soon as there is room. (Said once; a note counts.)",
                stacklevel=3,
            )
        self._error = error


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
