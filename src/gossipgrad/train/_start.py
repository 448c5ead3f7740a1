"""The start of a run: all ranks wait for each other, and one that is missing ends it."""

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import AskedStore
from gossipgrad.errors import GossipError

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Prefix of what the ranks of a run write into the store.
MAILBOX = "gossipgrad/train"
# For ranks that have arrived, and may fetch a data set.
_LOADING_SECONDS = 1800.0
_POLL_SECONDS = 0.05
_SEEN_SECONDS = 10.0
_NAMED_SECONDS = 15.0


class StartFailedError(GossipError):
    """Another rank has ended the start; no message if it alone says why."""


class Start:
    """The start of a run, as one rank sees it in the store."""

    def __init__(self, store: AskedStore, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def arrive(self, where: str) -> None:
        """Say that this rank has come so far: "here", or "ready" with its data."""
        self.ask(lambda store: (store.set(f"{where}{self._rank}", ""), store.add(where, 1)))

    def await_all(self, where: str, seconds: float = _LOADING_SECONDS) -> None:
        """Wait until all ranks have come so far, for `seconds` from the last that has.

        After some seconds the lowest of those that wait names the ones that are missing.
        """
        count, deadline = 0, time.monotonic() + seconds
        name_at = time.monotonic() + min(_NAMED_SECONDS, seconds / 2)
        while True:
            self.check()
            if (now := self.ask(lambda store: store.add(where, 0))) >= self._world_size:
                return
            if time.monotonic() > name_at:
                name_at = math.inf
                self._name_missing(where, seconds)
            if now > count:
                count, deadline = now, time.monotonic() + seconds
            elif time.monotonic() > deadline:
                missing = ", ".join(map(str, self._missing(where)))
                raise GossipError(
                    f"rank {self._rank} waited {seconds:g} s for these ranks to be {where}: "
                    f"{missing}. Look there for what went wrong, and start again."
                )
            time.sleep(_POLL_SECONDS)

    def _name_missing(self, where: str, seconds: float) -> None:
        missing = self._missing(where)
        if missing and self._rank == min(set(range(self._world_size)) - {*missing}):
            logger.warning(
                "waiting for these ranks to be %s: %s (for %g s from the last that comes)",
                *(where, ", ".join(map(str, missing)), seconds),
            )

    def _missing(self, where: str) -> list[int]:
        ranks = range(self._world_size)
        return self.ask(lambda store: [r for r in ranks if not store.check([f"{where}{r}"])])

    def open(self, content: Any) -> None:
        """Say what is run."""
        self.ask(lambda store: store.set("run", json.dumps(content)))

    def await_opened(self) -> Any:
        """What `open` was given."""
        deadline = time.monotonic() + _LOADING_SECONDS
        while not self.ask(lambda store: store.check(["run"])):
            self.check()
            if time.monotonic() > deadline:
                raise GossipError(
                    f"rank {self._rank} waited {_LOADING_SECONDS:g} s for rank 0 to say what is "
                    "run: look there for what went wrong, and start again"
                )
            time.sleep(_POLL_SECONDS)
        return json.loads(self.ask(lambda store: store.get("run")))

    def begin(self) -> None:
        """Say that the ranks train."""
        self.ask(lambda store: store.set("begun", ""))

    def has_begun(self) -> bool:
        """Whether the ranks train, or did."""
        return self.ask(lambda store: store.check(["begun"]))

    def check(self) -> None:
        """Raise `StartFailedError` if another rank has ended the start."""
        if self.ask(lambda store: store.check(["failed"])):
            cause = json.loads(self.ask(lambda store: store.get("failed")))
            with suppress(GossipError):
                self.ask(lambda store: store.add("seen", 1))
            raise StartFailedError(cause)

    def fail(self, cause: str) -> None:
        """End the start for all; no cause if this rank alone says why."""
        with suppress(GossipError):
            self.ask(lambda store: store.compare_set("failed", "", json.dumps(cause)))

    def await_failure_seen(self) -> None:
        """Keep the store, which is in this process, until all ranks know of the failure."""
        deadline = time.monotonic() + _SEEN_SECONDS
        with suppress(GossipError):
            while self.ask(lambda store: store.add("seen", 0)) < self._world_size - 1:
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)

    def ask(self, question: Callable[[dist.Store], T]) -> T:
        """What `question` returns for the store."""
        try:
            return self._store.ask(question)
        except RuntimeError as error:
            raise GossipError(
                f"rank {self._rank} cannot reach the rendezvous store any more: has the process "
                f"that holds it failed, rank 0 by default? ({first_line(error)})"
            ) from error
