"""The collectives of a session, on a private Gloo group that nothing else talks on."""

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gossipgrad.comm._asked_store import AskedStore, Deadline, StoreSilentError
from gossipgrad.comm._membership import Loss, Membership
from gossipgrad.comm._rendezvous import LATE_SECONDS, GivenUpError, Rendezvous, explained, named
from gossipgrad.errors import GossipError

__all__ = ["Group"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.0005
_MOST_POLL_SECONDS = 0.005
_POLL_SHARE = 1 / 40  # of the wait so far: looking costs the ranks of one machine their processors
_AT_ONCE_BYTES = 1024  # of one packet
_CHUNK_BYTES = 8 << 20  # each within the time that a collective may take, on slow networks too
_LISTEN_SECONDS = 0.05
_STORE_SECONDS = 10.0
_CLOSED = "this rank has closed its session"
_LAST_BYTES_SECONDS = 1.0  # for those of a collective that all members have come to


class Group:
    """A few collectives among the ranks of a run, away from the user's own groups and tags.

    Every method is a collective unless it says otherwise: all ranks call it, in the same order.
    When a rank has died or left, those waiting for it get a `GossipError`, and so does every later
    call until the living `enter` a generation without it; a rank that is merely late is awaited up
    to `timeout_seconds`. Waiting can be interrupted with Ctrl-C.

    Args:
        store: Where the ranks find each other; equal prefix on all ranks.
        rank: This rank.
        world_size: How many ranks there are.
        timeout_seconds: How long a collective waits for the others.
        start_timeout_seconds: How long the others are awaited here; None: as long as later.
        members: Those of the ranks that come to the start, rising; None: all.
        gone: Asked, while waiting, who is not to be awaited any more, and why; local.
        call: What the user calls to come here.

    Attributes:
        rank: This rank, the same in all generations.
        world_size: How many ranks there were at the start.
        members: Those that take part now, rising.
        generation: The generation of the membership that they are the members of.
        broken_by: The ranks whose connections ended first when a collective broke, as far as known.
        at_once_bytes: Messages of `all_gather_into_` up to this size go to all members at once, so
            that none waits for another; larger ones go round a ring, where they do not meet on any
            link. Equal on all members.
        unless: Called while members are awaited to the first collective of a generation. A
            `GossipError` that it raises ends the wait, and nothing else: it comes from the
            collective, which this rank may come to later.
        call: What this rank calls, for the warning that names members which do not come to it.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        timeout_seconds: float = 1800.0,
        start_timeout_seconds: float | None = None,
        members: Sequence[int] | None = None,
        gone: Callable[[], Mapping[int, Loss]] = dict,
        call: str = "gossipgrad.Group(...)",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.members = tuple(range(world_size) if members is None else members)
        self.generation = 0
        self.at_once_bytes = _AT_ONCE_BYTES
        self.unless: Callable[[], object] = lambda: None
        self.broken_by: tuple[int, ...] = ()
        self.call = call
        self._number = 0  # of the next collective, among those of a generation
        self._named: set[tuple[str, tuple[int, ...]]] = set()  # of whom it was said that they miss
        self._broken: str | None = None
        self._closed = False
        self._lock = threading.RLock()  # a signal handler may close in the middle of a collective
        self._under_way = False
        self._timeout_seconds = timeout_seconds
        self._gone = gone
        self._newest: Callable[[], Membership | None] = lambda: None
        self._listen: Callable[[], object] = lambda: None
        self._listened_seconds = -math.inf
        self._name = "start"
        self._gloo: Any = None  # a ProcessGroupGloo, whose stub lacks its collectives
        self._rendezvous = self._meet()
        if (size := len(self.members)) > 1:
            with self.limit(start_timeout_seconds or timeout_seconds):
                try:
                    self._gloo = self._connect()
                except RuntimeError as error:
                    raise GossipError(
                        f"rank {rank} waited in vain for the other {size - 1} ranks to enter "
                        f"the session: {explained(error)}"
                    ) from error
                # One that leaves as soon as it is connected breaks those still connecting.
                self.barrier()

    @classmethod
    def from_process_group(
        cls,
        group: dist.ProcessGroup,
        *,
        timeout_seconds: float = 1800.0,
        start_timeout_seconds: float | None = None,
        call: str = "gossipgrad.Group(...)",
    ) -> "Group":
        """A private group of the same ranks as `group`, whatever its backend.

        The n-th call on a rank meets the n-th call of the others. Nothing is sent on `group`
        itself: only its store is used.
        """
        rank, store = group.rank(), group.get_group_store()
        number = store.add(f"gossipgrad/groups/{rank}", 1)
        prefix = dist.PrefixStore(f"gossipgrad/{number}", store)
        limits = {
            "timeout_seconds": timeout_seconds,
            "start_timeout_seconds": start_timeout_seconds,
        }
        return cls(prefix, rank, group.size(), call=call, **limits)

    @property
    def broken(self) -> str | None:
        """Why collectives are over, None while they are not; local."""
        return self._broken

    @contextlib.contextmanager
    def limit(self, timeout_seconds: float) -> Iterator[None]:
        """Inside, a collective waits for the others no longer than this; local."""
        before = self._timeout_seconds
        self._timeout_seconds = min(before, timeout_seconds)
        try:
            yield
        finally:
            self._timeout_seconds = before

    @torch.no_grad()
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks, in place; any floating or integer dtype, any device."""
        if len(self.members) > 1:
            plain = tensor.device.type == "cpu" and tensor.is_contiguous()
            host = tensor if plain else tensor.detach().cpu().contiguous()
            self._run(lambda gloo: gloo.allreduce([host]))
            if host is not tensor:
                tensor.copy_(host)
        return tensor

    @torch.no_grad()
    def mean_(self, tensor: Tensor) -> Tensor:
        """Makes `tensor` its mean over all ranks, in place; any floating dtype, any device."""
        return self.all_reduce_(tensor).div_(len(self.members))

    @torch.no_grad()
    def all_gather_into_(self, gathered: Tensor, mine: Tensor) -> Tensor:
        """Fills `gathered` with what every member has as `mine`, one after another.

        Args:
            gathered: Contiguous, in host memory, of as many times the elements as there are
                members, in whose order their parts come.
            mine: Contiguous, in host memory, of as many elements on every member.
        """
        if len(self.members) == 1:
            return gathered.copy_(mine)
        if mine.nbytes <= self.at_once_bytes:
            copies = mine.repeat(len(self.members))
            self._run(lambda gloo: gloo.alltoall_base(gathered, copies, [], []))
        else:
            self._run(lambda gloo: gloo._allgather_base(gathered, mine))
        return gathered

    @torch.no_grad()
    def broadcast_(self, tensor: Tensor, source: int | None = None) -> Tensor:
        """Overwrites `tensor` with that of rank `source`, in place; any dtype, any device.

        By default the source is the lowest member.
        """
        place = self._place(source)
        if len(self.members) > 1:
            host = tensor.detach().cpu().contiguous()
            flat = host.reshape(-1).view(torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = place
            options.rootTensor = 0
            for chunk in flat.split(_CHUNK_BYTES):
                self._run(lambda gloo, chunk=chunk: gloo.broadcast([chunk], options))
            if self.rank != self.members[place]:
                tensor.copy_(host)
        return tensor

    def all_gather_object(self, value: Any, *, meets: bool = False) -> list[Any]:
        """What every member has, in the order of `members`; values are those of JSON.

        Args:
            value: What this rank has.
            meets: Members may come late to this one; it fails soon, too, when some have gone on to
                another generation instead.
        """
        encoded = json.dumps(value).encode()
        if len(self.members) == 1:
            return [json.loads(encoded)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.members]
        mine = torch.tensor([len(encoded)], dtype=torch.int64)
        self._run(lambda gloo: gloo.allgather([sizes], [mine]), meets=meets)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in self.members]
        self._run(lambda gloo: gloo.allgather([parts], [padded]), meets=meets)
        return [
            json.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def broadcast_object(self, value: Any, source: int | None = None) -> Any:
        """What rank `source` has, by default the lowest member; a value of JSON."""
        place = self._place(source)
        mine = value if self.rank == self.members[place] else None
        return self.all_gather_object(mine)[place]

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        self.all_reduce_(torch.zeros(1))

    def ask(self, question: Callable[[dist.Store], T]) -> T:
        """What `question` returns for the group's store, called in a thread with it; local.

        Raises:
            GossipError: The store does not answer within ten seconds, or fails.
        """
        try:
            return self._asked.ask(question)
        except GossipError:
            raise
        except RuntimeError as error:
            why = explained(error)
            raise GossipError(
                f"rank {self.rank} cannot reach the rendezvous store: {why}"
            ) from error

    def close(self) -> None:
        """Leaves the group, without waiting for anyone; the others' collectives then fail.

        So does one that another thread of this rank is in, or this one, in a signal handler.
        """
        self._closed = True
        with self._lock:
            if not self._under_way:  # else it is this thread's own, which does it on its way out
                self._broken = self._broken or _CLOSED
                self._gloo = None
                self._asked.close()

    def abandon(self) -> None:
        """Breaks the collective that this rank cannot finish, between two of its steps; local.

        The others' collective fails at once then, and this rank's next one is not taken for it.
        """
        with self._lock:
            if self._broken is None and len(self.members) > 1:
                self._broken = "this rank was interrupted in the middle of one"
                self._break()

    def enter(self, generation: int, members: Sequence[int]) -> None:
        """From now on collectives are among the members of another generation; local.

        The first of them connects those, through the store, and so waits for all of them.

        Args:
            generation: Its number, later than the one before.
            members: Its members; this rank is one.
        """
        with self._lock:
            assert generation > self.generation, f"generation {generation} is no later one"
            assert self.rank in members, f"rank {self.rank} is not one of {members}"
            self._gloo = None
            self._broken, self.broken_by = _CLOSED if self._closed else None, ()
            self.generation, self.members = generation, tuple(members)
            self._number = 0
            self._rendezvous = self._meet()

    def follow(
        self, newest: Callable[[], Membership], name: str, *, listen: Callable[[], object]
    ) -> None:
        """Belongs to the membership of that name from now on; local.

        Args:
            newest: The newest generation that is known; asked while members are awaited, some of
                whom may be gone, or have gone on to it.
            name: Sets its generations apart from those of others in the store.
            listen: Called now and then while members are awaited; hears of links that break.
        """
        self._newest, self._name, self._listen = newest, name, listen
        self.generation = 0
        self._rendezvous = self._meet()

    def _why(self, *, left: bool) -> str | None:
        """Why a member is not awaited, None while all are; `left`: one that left counts, too."""
        if time.monotonic() - self._listened_seconds > _LISTEN_SECONDS:
            self._listened_seconds = time.monotonic()
            self._listen()
        newest = self._newest()
        for rank, loss in {**self._gone(), **(newest.gone if newest else {})}.items():
            if rank in self.members and (left or not loss.left):
                return f"rank {rank} has left" if loss.left else f"rank {rank} was lost: {loss.why}"
        return None

    def _superseded(self) -> str | None:
        """Whether members may have gone on to a later generation, in words."""
        newest = self._newest()
        if newest is None or newest.generation <= self.generation:
            return None
        of = f"from generation {self.generation} to {newest.generation}"
        return f"the members have gone on {of}"

    def _place(self, source: int | None) -> int:
        if source is None:
            return 0
        if source not in self.members:
            ranks = f"0..{self.world_size - 1}"
            if len(self.members) < self.world_size:
                ranks = f"{', '.join(map(str, self.members))}, the living"
            raise ValueError(f"source must lie in {ranks}, got {source}")
        return self.members.index(source)

    def _meet(self) -> Rendezvous:
        name = f"{self._name}/generation/{self.generation}"
        # A store that hangs would hold this rank up for as long. Each generation has a thread of
        # its own: that of the last one may still try to connect to a rank that died meanwhile.
        limit = min(_STORE_SECONDS, self._timeout_seconds)
        self._asked = AskedStore(self.store, timeout_seconds=limit)
        return Rendezvous(self._asked, name, self.rank, self.members)

    def _connect(self) -> Any:
        """A Gloo group of the members, made by them with nothing but the store."""
        end_in_vain = self._end_in_vain(connects=True, meets=True)
        gloo = self._rendezvous.connect(
            self._timeout_seconds, listen=end_in_vain, unless=self.unless, late=self._warn_of
        )
        gloo._set_default_timeout(timedelta(seconds=self._timeout_seconds))
        return gloo

    def _run(self, start: Callable[[Any], Any], *, meets: bool = False) -> None:
        with self._lock:
            if self._under_way:  # in a signal handler
                raise GossipError("no collective in the middle of another of the same thread")
            if self._broken is not None:
                raise GossipError(f"collectives are over: {self._broken}")
            self._under_way = True
            try:
                if self._gloo is None:
                    self._gloo = self._connect()
                self._number += 1
                self._wait(start(self._gloo), meets=meets)
            except GossipError:  # of `unless`
                raise
            except RuntimeError as error:
                self._broken = explained(error)
                if not isinstance(error, StoreSilentError | dist.DistNetworkError):
                    if self._gloo is not None and not isinstance(error, GivenUpError):
                        ended = self._rendezvous.ended(self._gloo)
                        self.broken_by = self._rendezvous.first_report(ended)
                        self._break()  # for those who wait for this rank
                    who = f": {named(self.broken_by)}" if self.broken_by else ""
                    why = f"({self._broken})"
                    self._broken = f"a rank has died, left or broken it off{who} {why}"
                self._gloo = None
                raise GossipError(f"the collective did not come about: {self._broken}") from error
            except BaseException:
                self._broken = "this rank was interrupted in the middle of one"
                self._break()
                raise
            finally:
                self._under_way = False
                if self._closed:
                    self.close()

    def _wait(self, work: Any, *, meets: bool) -> None:
        # Of one that has left or died Gloo knows by itself, of one that hangs it does not.
        start, deadline = time.monotonic(), Deadline(self._timeout_seconds)
        end_in_vain = self._end_in_vain(connects=False, meets=meets)
        missing = self._rendezvous.name_missing(self._number)
        try:
            while not work.is_completed():
                waited_seconds = time.monotonic() - start
                poll_seconds = max(_POLL_SECONDS, _POLL_SHARE * waited_seconds)
                time.sleep(min(poll_seconds, _MOST_POLL_SECONDS))
                end_in_vain()
                self._warn_of(next(missing))
                if deadline.is_over():
                    missing, limit = self._rendezvous.call_roll("wait"), self._timeout_seconds
                    why = f"it took over {limit:g} s; no answer from {named(missing)}"
                    raise GivenUpError(why)
        except GivenUpError:
            self._break()
            raise
        work.wait()

    def _warn_of(self, missing: Sequence[int]) -> None:
        """Says who has not come to what this rank calls; once."""
        said = self.call, tuple(missing)
        if missing and said not in self._named:
            self._named.add(said)
            logger.warning(
                "rank %d has waited %g s for %s in %s, and waits on: every rank must call it, so "
                "never inside `if rank == 0:`",
                *(self.rank, LATE_SECONDS, named(missing), self.call),
            )

    def _end_in_vain(self, *, connects: bool, meets: bool) -> Callable[[], None]:
        """What ends a wait by a `GivenUpError` when members that are awaited will not come.

        They get a moment for the last bytes of what all have come to, if they have connected.
        """
        hopeless_seconds = math.inf

        def check() -> None:
            nonlocal hopeless_seconds
            why = _CLOSED if self._closed else self._why(left=True) if connects else None
            if why is not None:
                raise GivenUpError(why)
            why = self._why(left=False) or (self._superseded() if meets else None)
            if why is not None:
                hopeless_seconds = min(hopeless_seconds, time.monotonic() + _LAST_BYTES_SECONDS)
                if time.monotonic() > hopeless_seconds:
                    raise GivenUpError(why)

        return check

    def _break(self) -> None:
        """Ends what is under way, here and on the others."""
        if self._gloo is not None:
            self._rendezvous.end(self._gloo)
