"""What one rank hands back, how a run ends, and what can end it."""

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossipgrad.errors import GossipError


class RunFailedError(GossipError):
    """A run ended before its end and left nothing to keep; the message names the rank and why."""


class PeerLostError(GossipError):
    """This rank could not continue because another one is gone."""


class DivergedError(GossipError):
    """The loss is no longer finite; what this rank holds spoils all others."""


def short_cause(error: BaseException) -> str:
    """An exception in one line; its type is left out where the message is meant for the user."""
    lines = str(error).strip().splitlines() or ["no message"]
    if isinstance(error, (ValueError, GossipError)):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Figures of one rank, plain values that travel as JSON."""

    rank: int
    steps: int
    epochs: int
    """Epochs finished."""
    steps_counted: int
    """The last of `steps`, in which samples, times of steps and bytes were counted."""
    samples: int
    seconds: float
    """From the first step to the end of the last evaluation."""
    train_seconds: float
    """`seconds` less the evaluations between epochs."""
    accuracy: float
    """Of the model this rank holds for export, on the whole test part; share of 1."""
    own_accuracy: float
    """Of this rank's replica, on the whole test part; share of 1."""
    is_consensus: bool
    """Whether the model for export stands for all ranks."""
    consensus_distance: float | None
    stopped: bool
    """Whether the rank stopped before its last step."""
    parameters: int
    gradient_bytes: int
    bytes_sent: int
    exposed_seconds: float
    mixing_seconds: float | None
    extra_memory_bytes: int | None
    outcomes: dict[str, int]
    metric_name: str = "accuracy"
    metric_format: str = ".2%"
    late_rounds: int = 0
    """Rounds whose part had not come when it was due."""
    void_rounds: int = 0
    """Rounds that one of the two ends gave up, or that the rank jumped over."""
    best: dict[str, Any] | None = None
    """Accuracy, epoch and step of the best evaluation, where its model is kept."""
    shuffle_bytes_sent: int = 0
    """Samples of the ring shuffle; not in `bytes_sent`."""
    shuffle_late_rounds: int = 0
    shares: dict[str, Any] | None = None
    """`ElasticStats`, if batches are elastic."""
    lost: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ranks that the others took for dead, with when and why, as this rank knew of them."""
    joined: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ranks that joined the run under way, from whom and when, as this rank knew of them."""
    left: bool = False
    """Whether it had joined the run, and left before the others stopped."""
    notes: tuple[str, ...] | list[str] = ()
    """What the user should know of this rank's end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What `run` gives back.

    Attributes:
        exit_code: For the shell: 0 when the run reached its end, also when ranks were lost on the
            way, and when only others got the signal; 130 after Ctrl-C and 143 after SIGTERM.
        begun: Whether a rank has begun to train.
        run_dir: The folder of the run; None on ranks that did not put it together.
        summary: The content of `summary.json`; None when nothing was reached.
        report: The page to open.
    """

    exit_code: int
    begun: bool = True
    run_dir: Path | None = None
    summary: dict[str, Any] | None = None
    report: Path | None = None


def exit_code_of(stopped_by: signal.Signals | None) -> int:
    """The shell's code for a run ended by a signal, 0 for None."""
    return 0 if stopped_by is None else 128 + stopped_by
