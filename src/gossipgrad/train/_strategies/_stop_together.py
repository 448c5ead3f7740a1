"""Ranks that gossip stop after equally many steps, so that their states belong together."""

import time
from collections.abc import Callable, Sequence

from gossipgrad.comm import AskedStore, Group

# How long after its own a rank expects the others' word to stop.
_GRACE_SECONDS = 5.0
_STORE_SECONDS = 2.0


class StopTogether:
    """Where ranks that are told to stop at unequal times stop all the same, if they can.

    A rank that is told to stop writes the step it is about to take into the store, and trains on.
    Each waits for its partners, so nobody is ahead of another by more than a few steps: so many
    beyond the highest one written, all have read what all have written, and stop there. Who does
    not find the others' words in time, or cannot ask the store, stops alone; as long as none is
    told to stop, the store is not asked.

    Args:
        group: Whose store, and which rank.
        living: The ranks whose word is awaited.
        lead_steps: By how many steps a rank may be ahead of another.
    """

    def __init__(
        self, group: Group, living: Callable[[], Sequence[int]], *, lead_steps: int
    ) -> None:
        self._group = group
        self._living = living
        self._lead_steps = lead_steps
        self._store: AskedStore | None = None
        self._told_seconds = 0.0
        self._last: int | None = None

    def stops_before(self, step: int) -> bool:
        """Whether this rank, which has been told to stop, stops before `step`."""
        if len(self._living()) == 1:
            return True
        if self._last is None:
            try:
                self._last = self._ask(step)
            except RuntimeError:
                return True
        if self._last is not None:
            return step >= self._last
        return time.monotonic() > self._told_seconds + _GRACE_SECONDS

    def close(self) -> None:
        """Ask no more."""
        if self._store is not None:
            self._store.close()

    def _ask(self, step: int) -> int | None:
        """Before which step all stop, if that is known."""
        if self._store is None:
            self._store = AskedStore(self._group.store, timeout_seconds=_STORE_SECONDS)
            self._told_seconds = time.monotonic()
            key = self._key(self._group.rank)
            self._store.ask(lambda store: store.set(key, str(step)))
        keys = [self._key(rank) for rank in self._living()]
        if not self._store.ask(lambda store: store.check(keys)):
            return None
        told = self._store.ask(lambda store: [int(store.get(key)) for key in keys])
        return max(told) + self._lead_steps

    def _key(self, rank: int) -> str:
        return f"gossipgrad/stop/{rank}"
