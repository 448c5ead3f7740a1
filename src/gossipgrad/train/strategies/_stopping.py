"""How ranks that get the signal to stop at unequal times stop together."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import AskedStore, Group
from gossipgrad.errors import GossipError
from gossipgrad.topology import Schedule
from gossipgrad.train._result import PeerLostError, RunStopped

# A step may take longer than the grace: others hear the word in it, and write at its end.
_GRACE_STEPS = 2


class LockstepStop:
    """Has ranks in lockstep stop before the same step, though they receive the signal at others.

    A rank that has the signal writes the step that it is about to take into the store, and goes on
    training. No rank finishes a step that another has not begun, so a rank that is past the highest
    step in the store finds the steps of all ranks there, and stops. Without a signal the store is
    not asked.

    A rank whose peers do not get the signal in time disconnects from them; they find its step in
    the store.

    Attributes:
        is_disconnected: Whether this rank has left the others, or they have left it.

    Args:
        store: Where the ranks write; the n-th object of a rank belongs to the n-th of the others.
        rank: This rank.
        world_size: How many there are.
        disconnect: Ends this rank's connections, so that no one waits for it.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, disconnect: Callable[[], None]
    ) -> None:
        self.is_disconnected = False
        self._disconnect = disconnect
        self._rank = rank
        number = store.add(f"gossipgrad/stops/{rank}", 1)
        self._store = dist.PrefixStore(f"gossipgrad/stop/{number}", store)
        self._keys = [str(rank) for rank in range(world_size)]
        self._written: tuple[int, float] | None = None

    def should_stop(self, step: int) -> bool:
        """Whether this rank, which has the signal, stops before `step`."""
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
            self.disconnect()
            return True
        first, at_seconds = self._written
        if step < first + _GRACE_STEPS or time.monotonic() < at_seconds + _GRACE_SECONDS:
            return False
        self.disconnect()
        return True

    def is_requested(self) -> bool:
        """Whether any rank has the signal, as far as the store can be reached."""
        try:
            return any(self._store.check([key]) for key in self._keys)
        except RuntimeError:
            return False

    def disconnect(self) -> None:
        """Leave the others, who may have left already."""
        if not self.is_disconnected:
            self.is_disconnected = True
            self._disconnect()


# How long a rank that has the signal waits for the others to have it.
_GRACE_SECONDS = 5.0
_STORE_SECONDS = 5.0
_CONNECT_SECONDS = 30.0


class RoundStop:
    """Has ranks of a session stop in the same round, so that their states make one checkpoint.

    A rank that has the signal writes its round into the store, and trains on. Each rank waits for
    its partners, so until the last of them writes, none can be in a round that is `beyond` the
    highest one in the store; by then all have read all rounds, and stop there. A rank that does not
    find the others' rounds in time, or cannot reach the store, stops alone; where a wait for a
    partner was cut short, one may be ahead all the same. Without a signal the store is not asked;
    the connection to it is made at the start, since that alone may take seconds.

    Args:
        group: Whose store, and which rank.
        living: The ranks whose rounds are awaited.
        in_round: Which round this rank is in.
        beyond: The first round that no rank can be in as long as any is in a given one, or before.
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
        self._signal_seconds: float | None = None
        self._written_seconds: float | None = None
        self._last: int | None = None

    def should_stop(self) -> bool:
        """Whether this rank, which has the signal, stops before its next step."""
        if len(self._living()) == 1 or self._alone():
            return True
        now = time.monotonic()
        if not self._connected.done():  # until then it is as if there was no signal
            self._signal_seconds = now if self._signal_seconds is None else self._signal_seconds
            return now > self._signal_seconds + _CONNECT_SECONDS
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
        rounds = self._store.ask(lambda store: [int(store.get(key)) for key in keys])
        return self._beyond(max(rounds))

    def _key(self, rank: int) -> str:
        return f"gossipgrad/stop/{rank}"


def first_beyond(schedule: Schedule, living: Sequence[int], here: int) -> int:
    """The first round that no rank can be in as long as any is in round `here`.

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


_FLAG_SECONDS = 2.0
_KEY = "gossipgrad/stopping"


class StopFlag:
    """Set once in the store by any rank of the start when the run stops; those who joined poll it.

    Args:
        store: That of the session, with the same prefix on all ranks.
    """

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


# The signal and the loss of a peer that had it first arrive by different ways.
_STOP_GRACE_SECONDS = 2.0


def explain(
    error: RuntimeError,
    stop: threading.Event,
    what: str,
    *,
    is_requested: Callable[[], bool] = lambda: False,
) -> RuntimeError:
    """The error to raise for one that `what`, a collective of all ranks, has raised.

    A failed collective means that the run stops if this rank has the signal, too, which may take a
    moment, or if `is_requested`; else that a peer is lost.
    """
    if not _is_lost_peer(error):
        return error
    if is_requested() or stop.wait(_STOP_GRACE_SECONDS):
        return RunStopped("the run was told to stop")
    return PeerLostError(f"{what} failed because a rank is gone ({first_line(error)})")


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether Gloo raised this: its errors are plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError | GossipError) or "gloo" in text or "Connection" in text
