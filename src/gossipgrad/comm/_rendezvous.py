"""How the members of one generation find each other in the store, and who was missing there."""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm._asked_store import AskedStore, Deadline, StoreSilentError
from gossipgrad.errors import GossipError

__all__ = ["LATE_SECONDS", "GivenUpError", "Rendezvous", "explained", "named"]

LATE_SECONDS = 5.0  # in a collective, before those who have not come are named

_UNUSED_TAG = 1
_CONNECT = timedelta(seconds=30)
_POLL_SECONDS = 0.005
_ROLL_CALL_SECONDS = 2.0  # between ranks that have waited in vain for the same
_SHOWS_SECONDS = 1.0  # in a collective, before a rank says that it waits
_NO_STORE = "the process that holds the rendezvous store, rank 0 by default, has failed or hangs"


class GivenUpError(RuntimeError):
    """This rank does not wait any longer, for a reason that it knows."""


class Rendezvous:
    """Connects the members of a generation, with nothing but a store.

    Args:
        asked: The store; the same prefix on all members.
        name: Sets this generation apart from all others in the store.
        rank: This rank.
        members: All that are awaited, rising, this rank among them.
    """

    def __init__(self, asked: AskedStore, name: str, rank: int, members: Sequence[int]) -> None:
        self._asked, self._name, self._rank = asked, name, rank
        self._members = tuple(members)

    def connect(
        self,
        timeout_seconds: float,
        *,
        listen: Callable[[], object],
        unless: Callable[[], object],
        late: Callable[[list[int]], object] = lambda missing: None,
    ) -> Any:
        """A Gloo group of the members.

        Args:
            timeout_seconds: How long they are awaited, and then to connect.
            listen: Called in between; ends the wait by what it raises.
            unless: Called in between; by a `GossipError` of this one the rank takes back that it
                was here. Others who come while it is elsewhere wait for it as long as they like.
            late: Called once with the members that have not come within a few seconds.

        Raises:
            GivenUpError: Some did not come, or did not connect; they are named.
            RuntimeError: As the store does.
        """
        asked, here = self._asked, self._keys("here")
        connect = min(_CONNECT, timedelta(seconds=timeout_seconds))
        place, size = self._members.index(self._rank), len(self._members)
        deadline, soon = Deadline(timeout_seconds), Deadline(LATE_SECONDS)
        has_named = False
        asked.ask(lambda store: store.set(here[self._rank], ""), listen=listen)
        while not asked.ask(lambda store: store.check([*here.values()]), listen=listen):
            listen()
            try:
                unless()
            except GossipError:
                asked.begin(lambda store: store.delete_key(here[self._rank]))
                raise
            if not has_named and soon.is_over():
                has_named = True
                late(self._missing(here))
            if deadline.is_over():
                missing = named(self._missing(here))
                raise GivenUpError(f"waited {timeout_seconds:g} s for {missing} to come to it")
            time.sleep(_POLL_SECONDS)

        def make(store: dist.Store) -> Any:
            return dist.ProcessGroupGloo(dist.PrefixStore(self._name, store), place, size, connect)

        try:
            limit = connect.total_seconds() + asked.timeout_seconds
            gloo = asked.ask(make, timeout_seconds=limit, listen=listen)
        except (StoreSilentError, GivenUpError):
            raise
        except RuntimeError as error:
            missing = named(self.call_roll("connect"))
            raise GivenUpError(f"{missing} did not connect ({first_line(error)})") from error
        asked.begin(lambda store: store.delete_key(here[self._rank]))  # all have seen it
        return gloo

    def call_roll(self, occasion: str) -> list[int]:
        """Members that do not say soon that they, too, have waited in vain."""
        keys, deadline = self._keys(occasion), Deadline(_ROLL_CALL_SECONDS)
        self._asked.ask(lambda store: store.set(keys[self._rank], ""))
        while not deadline.is_over() and self._missing(keys):
            time.sleep(_POLL_SECONDS)
        return self._missing(keys)

    def name_missing(self, number: int) -> Iterator[list[int]]:
        """Yields the members that have not entered a collective, once; else empty lists.

        A rank that waits for a second says so in the store, and after a few seconds asks who else
        does; it awaits no answer. Most collectives are over before that.

        Args:
            number: Of the collective among those of these members, equal on all of them.
        """
        asked, keys = self._asked, self._keys("waits")
        shows, late = Deadline(_SHOWS_SECONDS), Deadline(LATE_SECONDS)

        def absent(store: dist.Store) -> list[int]:
            def waits(key: str) -> bool:
                return store.check([key]) and int(store.get(key)) >= number

            return [rank for rank, key in keys.items() if not waits(key)]

        while not shows.is_over():
            yield []
        asked.begin(lambda store: store.set(keys[self._rank], str(number)))
        while not late.is_over():
            yield []
        answer = asked.begin(absent)
        while not answer.done():
            yield []
        yield [] if answer.exception() else answer.result()
        while True:
            yield []

    def first_report(self, ended: Sequence[int]) -> tuple[int, ...]:
        """Whose connections ended, by the first member that saw a collective break.

        Whoever sees that ends its own connections, and so on: later reports name the living, too.

        Args:
            ended: Those that ended as far as this rank sees; the answer if the store has none.
        """
        key, report = f"{self._name}/broken", json.dumps([*ended])
        try:
            first = self._asked.ask(
                lambda store: store.compare_set(key, "", report),
                timeout_seconds=_ROLL_CALL_SECONDS,
            ).decode()
        except RuntimeError:
            first = report  # the store may have ended with one of them
        return tuple(rank for rank in json.loads(first) if rank != self._rank)

    def ended(self, gloo: Any) -> list[int]:
        """Members whose connections to this rank have ended."""
        ended = []
        for place, rank in enumerate(self._members):
            if rank != self._rank:
                try:
                    gloo.recv([torch.empty(1)], place, _UNUSED_TAG)
                except RuntimeError:  # at once on a connection that has ended
                    ended.append(rank)
        return ended

    def end(self, gloo: Any) -> None:
        """Ends what is under way, here and on the others; else letting go of it would wait for it.

        A deadline that expires is the one thing that makes Gloo do so. It does not expire on a
        connection that is broken already, so each is tried.
        """
        for place, rank in enumerate(self._members):
            if rank != self._rank:
                with contextlib.suppress(RuntimeError):
                    receiving = gloo.recv([torch.empty(1)], place, _UNUSED_TAG)
                    receiving.wait(timedelta(milliseconds=1))

    def _keys(self, occasion: str) -> dict[int, str]:
        """Where each member says in the store that it is there."""
        return {rank: f"{self._name}/{occasion}/{rank}" for rank in self._members}

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        def absent(store: dist.Store) -> list[int]:
            if store.check([*keys.values()]):
                return []
            return [rank for rank, key in keys.items() if not store.check([key])]

        return self._asked.ask(absent)


def named(ranks: Collection[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "no rank"


def explained(error: RuntimeError) -> str:
    """What an error says, and what it means if it is one of the store."""
    lost = isinstance(error, StoreSilentError | dist.DistNetworkError)
    return f"{first_line(error)}{f': {_NO_STORE}' if lost else ''}"
