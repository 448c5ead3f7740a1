"""Ranks in lockstep agree on the step before which all of them stop."""

import time
from collections.abc import Callable

import torch.distributed as dist

# How long after its own a rank expects the others' word to stop.
_GRACE_SECONDS = 2.0
# A step may take longer than the grace: others hear the word in it, and write at its end.
_GRACE_STEPS = 2


class StopAccord:
    """Where ranks that are told to stop at unequal times stop all the same.

    A rank that is told to stop writes the step that it is about to take into the store, and goes on
    training. Nobody finishes a step that another has not begun: who comes to the step after the
    highest one written finds there what all have written, and stops. So all stop before the same
    step, and as long as none is told to stop the store is not asked.

    A rank whose peers are not told in time leaves without them; they find its word in the store.

    Attributes:
        apart: Whether this rank has left the others, or they have left it.

    Args:
        store: Where the ranks write; the n-th accord of a rank meets the n-th of the others.
        rank: This rank.
        world_size: How many there are.
        part: Ends this rank's connections, so that no one waits for it.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, part: Callable[[], None]
    ) -> None:
        self.apart = False
        self._part = part
        self._rank = rank
        number = store.add(f"gossipgrad/stops/{rank}", 1)
        self._store = dist.PrefixStore(f"gossipgrad/stop/{number}", store)
        self._keys = [str(rank) for rank in range(world_size)]
        self._written: tuple[int, float] | None = None

    def stops_before(self, step: int) -> bool:
        """Whether this rank, which has been told to stop, stops before `step`."""
        if len(self._keys) == 1:
            return True
        try:
            if self._written is None:
                self._store.set(str(self._rank), str(step))
                self._written = step, time.monotonic()
            if self._store.check(self._keys):
                return step > max(int(self._store.get(key)) for key in self._keys)
        except RuntimeError:
            # The store is gone, and with it the rank that had it.
            self.leave()
            return True
        first, at_seconds = self._written
        if step < first + _GRACE_STEPS or time.monotonic() < at_seconds + _GRACE_SECONDS:
            return False
        self.leave()
        return True

    def is_called(self) -> bool:
        """Whether any rank was told to stop, as far as the store can be asked."""
        try:
            return any(self._store.check([key]) for key in self._keys)
        except RuntimeError:
            return False

    def leave(self) -> None:
        """Part from the others, or take it that they have."""
        if not self.apart:
            self.apart = True
            self._part()
