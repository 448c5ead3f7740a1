"""How ranks that get the signal to stop at unequal times stop together."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import AskedStore, Group
from gossipgrad.errors import GossipError
from gossipgrad.topology import Schedule
from gossipgrad.train._result import PeerLostError

_VOTE_STEPS = 4


class LockstepStop:
    """Has ranks in lockstep stop before the same step, though they receive the signal at others."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._vote: tuple[torch.Tensor, dist.Work | None] | None = None

    def should_stop(self, step: int) -> bool:
        """Whether all stop before `step`; every rank asks before every step."""
        if step % _VOTE_STEPS:
            return False
        if self._vote is not None:
            votes, work = self._vote
            if work is not None:
                work.wait()
            if votes.item():
                return True
        votes = torch.tensor([float(self._stop.is_set())])
        self._vote = votes, dist.all_reduce(votes, async_op=True)
        return False


# How long a rank that has the signal waits for the others to have it.
_GRACE_SECONDS = 5.0
_STORE_SECONDS = 5.0


class RoundStop:
    """Has ranks of a session stop in the same round, so that their states make one checkpoint.

    A rank that has the signal writes its round into the store, and trains on. Each rank waits for
    its partners, so until the last of them writes, none can be in a round that is `beyond` the
    highest one in the store; by then all have read all rounds, and stop there. A rank that does not
    find the others' rounds in time, or cannot reach the store, stops alone; where a wait for a
    partner was cut short, one may be ahead all the same. Without a signal the store is not asked.
    """

    def __init__(
        self,
        group: Group,
        living: Callable[[], Sequence[int]],
        in_round: Callable[[], int],
        beyond: Callable[[int], int],
    ) -> None:
        self._group = group
        self._living = living
        self._in_round = in_round
        self._beyond = beyond
        self._store = AskedStore(group.store, timeout_seconds=_STORE_SECONDS)
        self._store.begin(lambda store: None)  # to connect may take seconds
        self._written_seconds: float | None = None
        self._last: int | None = None

    def should_stop(self) -> bool:
        """Whether this rank, which has the signal, stops before its next step."""
        if len(self._living()) == 1:
            return True
        if self._last is None:
            try:
                self._last = self._ask()
            except RuntimeError:
                return True
        if self._last is not None:
            return self._in_round() >= self._last
        assert self._written_seconds is not None
        return time.monotonic() > self._written_seconds + _GRACE_SECONDS

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
        rounds = self._store.ask(lambda store: [int(store.get(key)) for key in keys])
        return self._beyond(max(rounds))

    def _key(self, rank: int) -> str:
        return f"gossipgrad/stop/{rank}"


def first_beyond(schedule: Schedule, living: Sequence[int], here: int) -> int:
    """The first round that no rank can be in as long as any is in round `here`."""
    alive = np.array(living, np.int64)
    # Row: the rank that stays in round `here`. Column: whether one can not have come to `round`.
    held = np.eye(schedule.world_size, dtype=bool)
    round, most = here + 1, here + 4 * schedule.period + 2 * schedule.world_size
    while not held[np.ix_(alive, alive)].all() and round < most:
        source = schedule.round_peers(round).recv_from
        held |= held[:, source] & (source >= 0)
        round += 1
    return round


_FLAG_SECONDS = 2.0
_KEY = "gossipgrad/stopping"


class StopFlag:
    """Set once in the store by any rank of the start when the run stops; joiners poll it."""

    def __init__(self, store: dist.Store) -> None:
        self._asked = AskedStore(store, timeout_seconds=_FLAG_SECONDS)

    def set(self) -> None:
        """Set it, if the store can be reached."""
        with contextlib.suppress(RuntimeError):
            self._asked.ask(lambda store: store.set(_KEY, ""))

    def is_set(self) -> bool | None:
        """Whether the run stops; None if the store cannot be reached."""
        try:
            return self._asked.ask(lambda store: store.check([_KEY]))
        except RuntimeError:
            return None

    def close(self) -> None:
        """Poll no more."""
        self._asked.close()


def explain(error: RuntimeError, what: str) -> RuntimeError:
    """The error to raise for one that `what`, a collective of all ranks, has raised."""
    text = str(error)  # Gloo's errors are plain RuntimeErrors
    is_known = isinstance(error, dist.DistError | GossipError)
    if not is_known and "gloo" not in text and "Connection" not in text:
        return error
    return PeerLostError(f"{what} failed because a rank is gone ({first_line(error)})")
