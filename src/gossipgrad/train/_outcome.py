"""How a run ended."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What `run` gives back.

    Attributes:
        exit_code: For the shell: 0 when the run came to its end, also when ranks were lost on the
            way, and when only others were told to stop; 130 after Ctrl-C and 143 after SIGTERM.
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
