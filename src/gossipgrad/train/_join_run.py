"""Joining a run under way: one call, some workers of this machine."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._join_launcher import launch_joiners
from ._joining import JoinConfig, find_run
from ._layout import RunDir
from ._living import take_part
from ._orphaned import put_together_if_orphaned
from ._outcome import exit_code_of
from ._progress import make_progress
from ._result import RunFailedError, after_checks

_POLL_SECONDS = 0.1
# For whoever puts the run together, when the last rank here has handed in.
_SUMMARY_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOutcome:
    """How joining a run ended.

    Attributes:
        exit_code: For the shell: 0 when all workers came to the end of the run; 130 if they left it
            after Ctrl-C, and 143 after SIGTERM; else 1 when one has failed, though others came to
            the end.
        run_dir: The folder of the run.
        parts: Of each worker that joined and came to its end: its "rank", its "steps" and
            "samples", whether it "left" before the others stopped, and whether it is "late": the
            run was put together without it, for it had ended as this worker came.
        summary: The content of the run's `summary.json`; None if it goes on, or was not put
            together in time.
        failures: Why workers did not come to their end, each in words that begin with which.
    """

    exit_code: int
    run_dir: Path
    parts: list[dict[str, Any]]
    summary: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)


def join_run(options: JoinConfig) -> JoinOutcome:
    """Start workers on this machine that join a run, and train in it to its end.

    Each takes weights, optimizer state and its place in the run from one living rank while the
    others keep stepping, then takes its share of the samples that are left. The run's options are
    those of its `config.json`. It goes on without these workers when they leave by Ctrl-C or
    SIGTERM, or die. If they outlive all processes that began the run, they train to its end, and
    put it together here.

    Like every program that starts processes with multiprocessing, a script that calls this keeps
    the call under `if __name__ == "__main__":`.

    Args:
        options: Which run, and what is this machine's own.

    Returns:
        How it ended.

    Raises:
        ValueError: The run cannot be joined; nothing was started.
        RunFailedError: No worker has joined, or all of them failed.
        GossipError: The data set is missing and could not be fetched.
    """
    config, run_dir, invitation = find_run(options)
    with take_part(run_dir):
        progress = make_progress(config, options.nproc)
        try:
            joiners = launch_joiners(options, config, run_dir, invitation, progress)
        except RunFailedError as error:
            if run_dir.invitation.exists():
                raise
            raise RunFailedError(
                f"the run in {run_dir.path} came to its end meanwhile ({error})"
            ) from error
        finally:
            progress.close()
        results, summary = joiners.results.values(), None
        if results:
            with after_checks():
                summary = put_together_if_orphaned(config, run_dir, joiners.results)
    if summary is None and not all(result.left for result in results):
        summary = _await_summary(run_dir)
    cut_short = not results or any(result.stopped for result in results)
    stopped_by = joiners.stopped_by if cut_short else None
    return JoinOutcome(
        exit_code=exit_code_of(stopped_by) or int(bool(joiners.failures)),
        run_dir=run_dir.path,
        parts=[
            {
                "rank": rank,
                "steps": result.steps,
                "samples": result.samples,
                "left": result.left,
                "late": summary is not None and rank not in _taken(summary),
            }
            for rank, result in sorted(joiners.results.items())
        ],
        summary=summary,
        failures=joiners.failures,
    )


def _taken(summary: dict[str, Any]) -> set[int]:
    """Whose results the run has, of those that joined it."""
    return {one["rank"] for one in summary["joined"] if one["end"] != "lost"}


def _await_summary(run_dir: RunDir) -> dict[str, Any] | None:
    deadline = time.monotonic() + _SUMMARY_SECONDS
    while not run_dir.summary.exists():
        if time.monotonic() > deadline or not run_dir.partial.exists():
            return None
        time.sleep(_POLL_SECONDS)
    return json.loads(run_dir.summary.read_text())
