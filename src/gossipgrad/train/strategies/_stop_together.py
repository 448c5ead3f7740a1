"""Ranks of a session stop in the same round, so that their states belong together."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from gossipgrad.comm import AskedStore, Group
from gossipgrad.topology import Schedule

# How long after its own a rank expects the others' word to stop.
_GRACE_SECONDS = 5.0
_STORE_SECONDS = 5.0
_CONNECT_SECONDS = 30.0


class StopTogether:
    """Where ranks that are told to stop at unequal times stop all the same, if they can.

    A rank that is told to stop writes into the store which round it is in, and trains on. Each
    waits for its partners, so while the last of them writes nobody can have come to a round that is
    `beyond` the highest one written; by then all have read what all have written, and stop as they
    come to it. Who does not find the others' words in time, or cannot ask the store, stops alone,
    and where a wait for a partner was cut short, one may be ahead all the same. As long as none is
    told to stop, the store is not asked; the connection to it is made at the start, since that
    alone may take seconds where names of hosts are looked up slowly.

    Args:
        group: Whose store, and which rank.
        living: The ranks whose word is awaited.
        in_round: Which round this rank is in.
        beyond: The first round that no rank can have come to as long as any is in a given one, or
            before it.
        alone: Whether this rank has nobody to stop with; it then stops at once.
    """

    def __init__(
        self,
        group: Group,
        living: Callable[[], Sequence[int]],
        in_round: Callable[[], int],
        beyond: Callable[[int], int],
        alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group = group
        self._living = living
        self._in_round = in_round
        self._beyond = beyond
        self._alone = alone
        self._store = AskedStore(group.store, timeout_seconds=_STORE_SECONDS)
        self._connected = self._store.begin(lambda store: None)
        self._told_seconds: float | None = None
        self._written_seconds: float | None = None
        self._last: int | None = None

    def stops_now(self) -> bool:
        """Whether this rank, which has been told to stop, does so before its next step."""
        if len(self._living()) == 1 or self._alone():
            return True
        now = time.monotonic()
        if not self._connected.done():  # until then it is as if it had not been told
            self._told_seconds = now if self._told_seconds is None else self._told_seconds
            return now > self._told_seconds + _CONNECT_SECONDS
        if self._last is None:
            try:
                self._last = self._ask()
            except RuntimeError:
                return True
        if self._last is not None:
            return self._in_round() >= self._last
        assert self._written_seconds is not None
        return now > self._written_seconds + _GRACE_SECONDS

    def close(self) -> None:
        """Ask no more."""
        self._store.close()

    def _ask(self) -> int | None:
        """In which round all stop, if that is known."""
        if self._written_seconds is None:
            self._written_seconds = time.monotonic()
            key, here = self._key(self._group.rank), str(self._in_round())
            self._store.ask(lambda store: store.set(key, here))
        keys = [self._key(rank) for rank in self._living()]
        if not self._store.ask(lambda store: store.check(keys)):
            return None
        told = self._store.ask(lambda store: [int(store.get(key)) for key in keys])
        return self._beyond(max(told))

    def _key(self, rank: int) -> str:
        return f"gossipgrad/stop/{rank}"


def first_beyond(schedule: Schedule, living: Sequence[int], here: int) -> int:
    """The first round that no rank can have come to as long as any is in round `here`.

    A rank comes to the round after the next only when its partner of the next has come to that.

    Args:
        schedule: Who meets whom.
        living: The ranks that take part.
        here: A round.

    Returns:
        That round. Where the schedule does not connect all, one that is far enough for the parts.

    Example:
        >>> from gossipgrad.topology import dissemination, ring
        >>> first_beyond(dissemination(2), [0, 1], 10)
        12
        >>> first_beyond(dissemination(4, rotate=False), range(4), 10)
        13
    """
    alive = np.array(living, np.int64)
    # Row: the rank that stays in round `here`. Column: whether one can not have come to `round`.
    held = np.eye(schedule.world_size, dtype=bool)
    round, most = here + 1, here + 4 * schedule.period + 2 * schedule.world_size
    while not held[np.ix_(alive, alive)].all() and round < most:
        source = schedule.round_peers(round).recv_from
        held |= held[:, source] & (source >= 0)
        round += 1
    return round
