"""The launcher's end of one worker process."""

import contextlib
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Protocol, runtime_checkable

from ._metrics import Event
from ._result import RankResult

_EXIT_GRACE_SECONDS = 10.0
# Beats come ten times as often; a busy machine may be late with them.
_AWAKE_SECONDS = 5.0
# Of a silence; more in one go is a launcher that stood still itself.
_MOST_AT_ONCE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a worker was lost."""

    rank: int
    cause: str
    """Goes on after "rank 3": "was killed by SIGKILL"."""
    started: bool
    """Whether it had begun to train."""
    is_consequence: bool = False
    """Whether it fell because another one had."""
    is_fatal: bool = False
    """Whether the others would fall for the same reason, or learn nothing."""
    was_killed: bool = False
    """Whether its process ended without a word of its own."""
    when_seconds: float = field(default_factory=lambda: time.time())
    """When that was noticed, in seconds since 1970."""


@runtime_checkable
class Listener(Protocol):
    """Whoever takes the events of workers."""

    def take(self, rank: int, event: Event, /) -> None:
        """Take an event of a worker."""


class WorkerHandle:
    """One worker, as the launcher sees it.

    Attributes:
        rank: Its rank.
        ready: Whether it has begun to train.
        silent_seconds: How long it has shown no sign of life.
        awaited_seconds: How much of that others have waited for it.
        heard: Whether it has shown one at all.
        result: What it handed in, at its end.
        failure: Why it was lost, if it was.
    """

    def __init__(self, process: ForkServerProcess, pipe: Connection, rank: int) -> None:
        self.rank = rank
        self.ready = False
        self.silent_seconds = 0.0
        self.awaited_seconds = 0.0
        self.heard = False
        self.result: RankResult | None = None
        self.failure: Failure | None = None
        self.pipe = pipe
        self._process = process
        self._looked_seconds = time.monotonic()

    @property
    def pid(self) -> int | None:
        """The id of its process."""
        return self._process.pid

    @property
    def over(self) -> bool:
        """Whether it has handed in its result or was lost."""
        return self.result is not None or self.failure is not None

    @property
    def shows_life(self) -> bool:
        """Whether it runs, and was heard just now."""
        return self.heard and not self.over and self.silent_seconds < _AWAKE_SECONDS

    def tell_to_stop(self) -> None:
        """Ask it to stop at the next step; one that is gone has stopped."""
        with contextlib.suppress(OSError):
            self.pipe.send("stop")

    def listen(self, progress: Listener, *, awaited: bool) -> None:
        """Take in what it has sent; the end of the pipe before a result is its end.

        Args:
            progress: Is told of it.
            awaited: Whether a silence of it holds others up.
        """
        now = time.monotonic()
        passed = min(now - self._looked_seconds, _MOST_AT_ONCE_SECONDS)
        self.silent_seconds += passed
        self.awaited_seconds += passed if awaited else 0.0
        self._looked_seconds = now
        try:
            while not self.over and self.pipe.poll():
                self._take(self.pipe.recv(), progress)
        except (EOFError, OSError):
            self._process.join(_EXIT_GRACE_SECONDS)
            self.failure = Failure(
                rank=self.rank,
                cause=_exit_cause(self._process.exitcode),
                started=self.ready,
                was_killed=True,
            )

    def _take(self, event: Event, progress: Listener) -> None:
        self.silent_seconds = self.awaited_seconds = 0.0
        self.heard = True
        if event["event"] == "ready":
            self.ready = True
        elif event["event"] == "result":
            self.result = RankResult.from_json(event["result"])
        elif event["event"] == "failed":
            self.failure = Failure(
                rank=self.rank,
                cause=f"failed: {event['cause']}",
                started=self.ready,
                is_consequence=event["is_consequence"],
                is_fatal=event["is_fatal"],
            )
        progress.take(self.rank, event)

    def give_up(self, cause: str) -> None:
        """End it at once, and say why."""
        self._process.kill()
        self.failure = Failure(rank=self.rank, cause=cause, started=self.ready, was_killed=True)

    def kill_unless_done(self) -> None:
        """End it at once if it has not handed in its result."""
        if self.result is None and self._process.is_alive():
            self._process.kill()

    def join(self) -> None:
        """Wait until it is gone; one that lingers after its result is killed in the end."""
        self._process.join(_EXIT_GRACE_SECONDS)
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _exit_cause(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe and hangs"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
