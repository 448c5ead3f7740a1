"""The rendezvous of a generation's members in the store, and which members are missing."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm._asked_store import AskedStore, Deadline, StoreSilentError
from gossipgrad.comm._interface import (
    BIND,
    GLOO,
    gloo_interface,
    here,
    is_address,
)
from gossipgrad.errors import GossipError

__all__ = ["LATE_SECONDS", "GivenUpError", "Rendezvous", "explained", "named"]

LATE_SECONDS = 5.0  # in a collective, before a warning names the missing members

_UNUSED_TAG = 1
_CONNECT_SECONDS = 15.0
_MEMBER_SECONDS = 1.0  # more to connect for each member
_POLL_SECONDS = 0.005
_MOST_POLL_SECONDS = 0.5
_POLL_SHARE = 1 / 40  # of the wait so far: each of many ranks polls for all others
_ROLL_CALL_SECONDS = 2.0  # between timeouts of ranks that waited for the same member
_SHOWS_SECONDS = 1.0  # in a collective, before a rank reports that it waits
_NO_STORE = "the process that holds the rendezvous store, rank 0 by default, has failed or hangs"


class GivenUpError(RuntimeError):
    """This rank stopped waiting, for the reason given."""


class Rendezvous:
    """Connects the members of a generation through a store."""

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
        """Connect the members in a Gloo group.

        Calls `listen` and `unless` while it waits; after an error of `unless` this rank is absent.
        `late` gets the members that are missing after a few seconds, once.
        """
        asked, here = self._asked, self._keys("here")
        connect_seconds = _CONNECT_SECONDS + _MEMBER_SECONDS * len(self._members)
        connect = timedelta(seconds=min(connect_seconds, timeout_seconds))
        index, size = self._members.index(self._rank), len(self._members)
        deadline, soon, pause = Deadline(timeout_seconds), Deadline(LATE_SECONDS), _Pause()
        has_named = False
        if (gave_up := asked.ask(self._arrive, listen=listen)) is not None:
            raise GivenUpError(f"rank {gave_up} waited for this rank, and gave up")
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
                asked.ask(lambda store: store.set(self._vain, str(self._rank)))
                raise GivenUpError(f"waited {timeout_seconds:g} s for {missing}")
            pause()

        one_host = not asked.ask(lambda store: store.check([f"{self._name}/hosts"]), listen=listen)
        interface = gloo_interface(one_host=one_host)
        tried = f"{GLOO}={os.environ.get(GLOO)}" if interface is None else interface
        way_out = (
            f"this rank tried {tried}: set {GLOO}, or {BIND}, on each host to the interface that "
            "the others reach, such as eth1, and unset it where it names none"
        )

        def make(store: dist.Store) -> Any:
            options: Any = connect
            if interface is not None:
                which = "hostname" if is_address(interface) else "interface"
                options = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]
                options._timeout = connect
                options._devices = [dist.ProcessGroupGloo.create_device(**{which: interface})]
            return dist.ProcessGroupGloo(dist.PrefixStore(self._name, store), index, size, options)

        limit = connect.total_seconds() + asked.timeout_seconds
        try:
            gloo = asked.ask(make, timeout_seconds=limit, listen=listen)
        except GivenUpError:
            raise
        except StoreSilentError as error:
            raise GivenUpError(f"ranks did not connect within {limit:g} s; {way_out}") from error
        except RuntimeError as error:
            missing = self.call_roll("connect")
            who = named(missing) if missing else "ranks"
            raise GivenUpError(f"{who} did not connect ({first_line(error)}); {way_out}") from error
        asked.begin(lambda store: store.delete_key(here[self._rank]))  # all members have read it
        return gloo

    @property
    def _vain(self) -> str:
        """The key of a member that has waited in vain."""
        return f"{self._name}/vain"

    def _arrive(self, store: dist.Store) -> int | None:
        """Report that this member is present; return a member that has given up waiting, if any."""
        if store.check([self._vain]):
            if (gave_up := int(store.get(self._vain))) != self._rank:
                return gave_up  # or this rank would look for the cause in the network
            store.delete_key(self._vain)  # it waits once more
        host = here()
        if store.compare_set(f"{self._name}/host", "", host).decode() != host:
            store.set(f"{self._name}/hosts", "")
        store.set(self._keys("here")[self._rank], "")
        return None

    def call_roll(self, occasion: str) -> list[int]:
        """Return members that do not soon report a timeout of their own."""
        keys, deadline, pause = self._keys(occasion), Deadline(_ROLL_CALL_SECONDS), _Pause()
        self._asked.ask(lambda store: store.set(keys[self._rank], ""))
        while not deadline.is_over() and self._missing(keys):
            pause()
        return self._missing(keys)

    def waiting(self) -> "Waiting":
        """Begin to wait for the others in a collective."""
        return Waiting(self._asked, self._keys("waits"), self._rank)

    def first_report(self, ended: Sequence[int]) -> tuple[int, ...]:
        """Return the first report, by any member, of connections that ended in a collective."""
        # A member that sees a broken connection ends its own, so later reports name living ranks.
        key, report = f"{self._name}/broken", json.dumps([*ended])
        try:
            first = self._asked.ask(
                lambda store: store.compare_set(key, "", report),
                timeout_seconds=_ROLL_CALL_SECONDS,
            ).decode()
        except RuntimeError:
            first = report  # the store may have died with one of them
        return tuple(rank for rank in json.loads(first) if rank != self._rank)

    def ended(self, gloo: Any) -> list[int]:
        """Return members whose connections to this rank have ended."""
        ended = []
        for index, rank in enumerate(self._members):
            if rank != self._rank:
                try:
                    gloo.recv([torch.empty(1, device="cpu")], index, _UNUSED_TAG)
                except RuntimeError:  # immediately on a connection that has ended
                    ended.append(rank)
        return ended

    def end(self, gloo: Any) -> None:
        """End the running collective, here and on the others; otherwise its destructor would wait.

        Only an expired deadline makes Gloo do so, but on no broken connection: each is tried.
        """
        for index, rank in enumerate(self._members):
            if rank != self._rank:
                with contextlib.suppress(RuntimeError):
                    receiving = gloo.recv([torch.empty(1, device="cpu")], index, _UNUSED_TAG)
                    receiving.wait(timedelta(milliseconds=1))

    def _keys(self, occasion: str) -> dict[int, str]:
        """Return the key under which each member reports that it is present."""
        return {rank: f"{self._name}/{occasion}/{rank}" for rank in self._members}

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        def absent(store: dist.Store) -> list[int]:
            if store.check([*keys.values()]):
                return []
            return [rank for rank, key in keys.items() if not store.check([key])]

        return self._asked.ask(absent)


class _Pause:
    """Sleeps between two questions to the store, longer after a long wait."""

    def __init__(self) -> None:
        self._start_seconds = time.monotonic()

    def __call__(self) -> None:
        waited_seconds = time.monotonic() - self._start_seconds
        time.sleep(min(max(_POLL_SECONDS, _POLL_SHARE * waited_seconds), _MOST_POLL_SECONDS))


class Waiting:
    """A rank that waits in a collective: it reports that, and finds who does not; never blocks.

    It reports after a second, and after a few seconds reads which others have.
    """

    def __init__(self, asked: AskedStore, keys: Mapping[int, str], rank: int) -> None:
        self._asked, self._keys, self._rank = asked, keys, rank
        self._shows, self._late = Deadline(_SHOWS_SECONDS), Deadline(LATE_SECONDS)
        self._has_shown = False
        self._answer: Future[list[int]] | None = None

    def missing(self) -> list[int]:
        """Return the members that have not entered the collective, as far as is known."""
        if not self._has_shown and self._shows.is_over():
            self._has_shown = True
            self._asked.begin(lambda store: store.set(self._keys[self._rank], ""))
        if self._answer is None and self._late.is_over():
            self._answer = self._asked.begin(self._absent)
        if self._answer is None or not self._answer.done() or self._answer.exception():
            return []
        return self._answer.result()

    def end(self) -> None:
        """The collective is over."""
        if self._has_shown:
            self._asked.begin(lambda store: store.delete_key(self._keys[self._rank]))

    def _absent(self, store: dist.Store) -> list[int]:
        return [rank for rank, key in self._keys.items() if not store.check([key])]


def named(ranks: Collection[int]) -> str:
    """Return ranks as text."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "no rank"


def explained(error: RuntimeError) -> str:
    """Return an error's first line, with its meaning if it is the store's."""
    lost = isinstance(error, StoreSilentError | dist.DistNetworkError)
    return f"{first_line(error)}{f': {_NO_STORE}' if lost else ''}"
