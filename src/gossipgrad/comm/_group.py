"""The collectives of a session, on a private Gloo group."""

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gossipgrad.comm._asked_store import AskedStore, Deadline, StoreSilentError
from gossipgrad.comm._membership import Membership
from gossipgrad.comm._rendezvous import LATE_SECONDS, GivenUpError, Rendezvous, explained, named
from gossipgrad.errors import GossipError

__all__ = ["Group"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05  # between two looks for lost members while a collective runs
_AT_ONCE_BYTES = 1024  # of one packet
_CHUNK_BYTES = 8 << 20  # each within the time that a collective may take, on slow networks too
_LISTEN_SECONDS = 0.05
_STORE_SECONDS = 10.0
_CLOSED = "this rank has closed its session"
_LAST_BYTES_SECONDS = 1.0  # for a collective that all members have entered


class Group:
    """A few collectives among the ranks of a run, away from the user's own groups and tags.

    Every method is a collective unless it says otherwise: all ranks call it, in the same order.
    When a rank has died or left, ranks that wait for it get a `GossipError`, and so does every
    later call until the living ranks `enter` a generation without it. A late rank is awaited up to
    `timeout_seconds`. Waiting can be interrupted with Ctrl-C.

    Args:
        store: The rendezvous store; equal prefix on all ranks.
        rank: This rank.
        world_size: How many ranks there are.
        timeout_seconds: How long a collective waits for the others.
        start_timeout_seconds: How long the constructor waits for the others; None: as long as
            later.
        members: The ranks that take part at the start, ascending; None: all.
        call: The user's call that creates the group, for messages.

    Attributes:
        rank: This rank, the same in all generations.
        world_size: How many ranks there were at the start.
        members: The ranks that take part now, ascending.
        generation: The generation of the membership.
        broken_by: The ranks whose connections ended first when a collective broke, if known.
        unless: Called while waiting for members in the first collective of a generation. A
            `GossipError` that it raises ends the wait and leaves the collective intact: this rank
            may enter it later.
        call: This rank's current call, for the warning that names missing members.
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
        call: str = "gossipgrad.Group(...)",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.members = tuple(range(world_size) if members is None else members)
        self.generation = 0
        self.unless: Callable[[], object] = lambda: None
        self.broken_by: tuple[int, ...] = ()
        self.call = call
        self._named: set[tuple[str, tuple[int, ...]]] = set()  # members already named in a warning
        self._broken: str | None = None
        self._closed, self._process = False, os.getpid()
        self._lock = threading.RLock()  # a signal handler may close in the middle of a collective
        self._under_way = 0  # collectives that were begun and have not ended
        self._timeout_seconds = self._unlimited_seconds = timeout_seconds
        self._newest: Callable[[], Membership | None] = lambda: None
        self._listen: Callable[[], object] = lambda: None
        self._listened_seconds = -math.inf
        self._name = "start"
        self._gloo: Any = None  # a ProcessGroupGloo, whose stub lacks its collectives
        # A store that hangs would block this rank, so a thread asks it. At the start it uses the
        # connection of the caller: the store looks up the name of each host that connects, and
        # answers nobody until the name server has answered.
        store_seconds = min(_STORE_SECONDS, timeout_seconds)
        self._asked = AskedStore(lambda: store, timeout_seconds=store_seconds)
        self._rendezvous = self._meet()
        if (size := len(self.members)) > 1:
            with self.limit(start_timeout_seconds or timeout_seconds):
                try:
                    self._gloo = self._connect()
                except GossipError:
                    raise
                except RuntimeError as error:
                    raise GossipError(
                        f"rank {rank} waited in vain for the other {size - 1} ranks to enter "
                        f"the session: {explained(error)}. Look there for what went wrong; "
                        "start_timeout_seconds sets how long a rank waits"
                    ) from error
                # A rank that leaves as soon as it is connected breaks ranks still connecting.
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

        The n-th call on a rank matches the n-th call of the others. Nothing is sent on `group`
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
        """Why collectives are over, None while they work; local."""
        return self._broken

    @contextlib.contextmanager
    def limit(self, timeout_seconds: float) -> Iterator[None]:
        """Limit how long a start waits for other ranks inside; local.

        The store has as long: it answers slowly while many ranks start at once.
        """
        before = self._timeout_seconds
        usual_seconds = self._asked.timeout_seconds
        self._timeout_seconds = min(before, timeout_seconds)
        self._asked.timeout_seconds = max(usual_seconds, self._timeout_seconds)
        try:
            yield
        finally:
            self._timeout_seconds, self._asked.timeout_seconds = before, usual_seconds

    @torch.no_grad()
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place; any floating or integer dtype, any device."""
        if len(self.members) > 1:
            host = _in_host_memory(tensor)
            self._run(lambda gloo: gloo.allreduce([host]))
            if host is not tensor:
                tensor.copy_(host)
        return tensor

    @torch.no_grad()
    def mean_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its mean over all ranks, in place; any floating dtype, any device."""
        return self.all_reduce_(tensor).div_(len(self.members))

    @torch.no_grad()
    def means_(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Replace each tensor by its mean over all ranks, and yield it; one is sent ahead.

        A tensor is asked for before the one before it is yielded, so two are in use at a time.
        """
        pairs = ((tensor, _in_host_memory(tensor)) for tensor in tensors)
        if len(self.members) == 1:
            yield from (tensor for tensor, _ in pairs)
            return
        sent: deque[tuple[Tensor, Tensor, Any]] = deque()
        try:
            for tensor, host in pairs:
                work = self._begin(lambda gloo, host=host: gloo.allreduce([host]), ahead=bool(sent))
                sent.append((tensor, host, work))
                if len(sent) > 1:
                    yield self._mean_of(*sent.popleft())
            while sent:
                yield self._mean_of(*sent.popleft())
        finally:
            if sent:  # left in the middle
                self._under_way = 0
                self.abandon()

    def _mean_of(self, tensor: Tensor, host: Tensor, work: Any) -> Tensor:
        self._finish(work)
        host.div_(len(self.members))
        return tensor if host is tensor else tensor.copy_(host)

    @torch.no_grad()
    def all_gather_into_(self, gathered: Tensor, mine: Tensor) -> Tensor:
        """Gather every member's `mine` into `gathered`.

        Args:
            gathered: Contiguous, in host memory, of as many times the elements as there are
                members, in the members' order.
            mine: Contiguous, in host memory, of as many elements on every member.
        """
        if len(self.members) == 1:
            return gathered.copy_(mine)
        # Small messages go directly to all members, so that none waits for another; larger ones
        # go round a ring, where no two share a link.
        if mine.nbytes <= _AT_ONCE_BYTES:
            return self.all_to_all_into_(gathered, mine.repeat(len(self.members)))
        self._run(lambda gloo: gloo._allgather_base(gathered, mine))
        return gathered

    @torch.no_grad()
    def all_to_all_into_(self, received: Tensor, mine: Tensor) -> Tensor:
        """Send the i-th part of `mine` to the i-th member, and receive a part of each.

        Args:
            received: Contiguous, in host memory, of the size of `mine`; gets the members' parts in
                their order.
            mine: Contiguous, in host memory: a part of equal size for each member, in their order.
        """
        if len(self.members) == 1:
            return received.copy_(mine)
        flat, out = mine.view(-1), received.view(-1)
        self._run(lambda gloo: gloo.alltoall_base(out, flat, [], []))
        return received

    @torch.no_grad()
    def broadcast_(self, tensor: Tensor, source: int | None = None) -> Tensor:
        """Overwrite `tensor` with that of rank `source`, in place; any dtype, any device.

        By default the source is the lowest member.
        """
        index = self._index_of(source)
        if len(self.members) > 1:
            host = tensor.detach().cpu().contiguous()
            flat = host.reshape(-1).view(torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = index
            options.rootTensor = 0
            for chunk in flat.split(_CHUNK_BYTES):
                self._run(lambda gloo, chunk=chunk: gloo.broadcast([chunk], options))
            if self.rank != self.members[index]:
                tensor.copy_(host)
        return tensor

    def all_gather_object(self, value: Any, *, meets: bool = False) -> list[Any]:
        """Return every member's value, in the order of `members`; values are those of JSON.

        Args:
            value: This rank's value.
            meets: Members may enter this one late; it also fails soon when some have entered
                another generation instead.
        """
        encoded = json.dumps(value).encode()
        if len(self.members) == 1:
            return [json.loads(encoded)]
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in self.members]
        mine = torch.tensor([len(encoded)], dtype=torch.int64, device="cpu")
        self._run(lambda gloo: gloo.allgather([sizes], [mine]), meets=meets)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in self.members]
        self._run(lambda gloo: gloo.allgather([parts], [padded]), meets=meets)
        return [
            json.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def broadcast_object(self, value: Any, source: int | None = None) -> Any:
        """Return the value of rank `source`, by default the lowest member; a value of JSON."""
        index = self._index_of(source)
        mine = value if self.rank == self.members[index] else None
        return self.all_gather_object(mine)[index]

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self.all_reduce_(torch.zeros(1, device="cpu"))

    def ask(self, question: Callable[[dist.Store], T]) -> T:
        """Return `question(store)` for the group's store, called in a thread; local.

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
        """Leave the group without waiting; the others' collectives then fail.

        So does a collective that another thread of this rank is in, or that a signal handler
        interrupted.
        """
        if os.getpid() != self._process:
            return  # a forked child: Gloo's threads and connections belong to its parent
        self._closed = True
        with self._lock:
            if not self._under_way:  # otherwise this thread's own collective does it when it ends
                self._broken = self._broken or _CLOSED
                self._gloo = None
                self._asked.close()

    def abandon(self) -> None:
        """Break a collective that this rank cannot finish, between two of its steps; local.

        The others' collective then fails immediately, and does not match this rank's next one.
        """
        with self._lock:
            if self._broken is None and len(self.members) > 1:
                self._broken = "this rank was interrupted in the middle of one"
                self._break()

    def enter(self, generation: int, members: Sequence[int]) -> None:
        """Run later collectives among the members of another generation; local.

        The first collective connects the members through the store, and so waits for all of them.

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
            self._rendezvous = self._meet()

    def follow(
        self, newest: Callable[[], Membership], name: str, *, listen: Callable[[], object]
    ) -> None:
        """Follow the membership of that name from now on; local.

        Args:
            newest: Returns the newest known generation; called while waiting for members, some of
                which may be gone, or have entered it.
            name: Distinguishes its generations from those of others in the store.
            listen: Called now and then while waiting for members; notices links that break.
        """
        self._newest, self._name, self._listen = newest, name, listen
        self.generation = 0
        self._asked.close()
        self._asked = AskedStore(self.store, timeout_seconds=self._asked.timeout_seconds)
        self._rendezvous = self._meet()

    def _why(self, *, left: bool) -> str | None:
        """Why a member will not come, None if all may; `left`: one that left counts, too."""
        if time.monotonic() - self._listened_seconds > _LISTEN_SECONDS:
            self._listened_seconds = time.monotonic()
            self._listen()
        newest = self._newest()
        for rank, loss in ({} if newest is None else newest.gone).items():
            if rank in self.members and (left or not loss.left):
                return f"rank {rank} has left" if loss.left else f"rank {rank} was lost: {loss.why}"
        return None

    def _superseded(self) -> str | None:
        """Describe that members may have entered a later generation, None if not."""
        newest = self._newest()
        if newest is None or newest.generation <= self.generation:
            return None
        of = f"from generation {self.generation} to {newest.generation}"
        return f"the members have moved {of}"

    def _index_of(self, source: int | None) -> int:
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
        # The thread of the last generation may still try to connect to a rank that has died since.
        if self._asked.is_busy:
            self._asked = AskedStore(self.store, timeout_seconds=self._asked.timeout_seconds)
        return Rendezvous(self._asked, name, self.rank, self.members)

    def _connect(self) -> Any:
        """Connect the members in a Gloo group, through the store."""
        end_in_vain = self._end_in_vain(connects=True, meets=True)
        gloo = self._rendezvous.connect(
            self._timeout_seconds,
            listen=end_in_vain,
            unless=self.unless,
            late=self._warn_of,
        )
        # `limit` may hold now, and not in later collectives; `_wait` applies it.
        gloo._set_default_timeout(timedelta(seconds=self._unlimited_seconds))
        return gloo

    def _run(self, start: Callable[[Any], Any], *, meets: bool = False) -> None:
        self._finish(self._begin(start), meets=meets)

    def _begin(self, start: Callable[[Any], Any], *, ahead: bool = False) -> Any:
        """Begin a collective; `ahead`, before the last one has ended."""
        with self._lock:
            if self._under_way and not ahead:  # in a signal handler
                raise GossipError("no collective in the middle of another of the same thread")
            if self._broken is not None:
                raise GossipError(f"collectives are over: {self._broken}")
            with self._breaking():
                if self._gloo is None:
                    self._gloo = self._connect()
                return start(self._gloo)

    def _finish(self, work: Any, *, meets: bool = False) -> None:
        with self._lock, self._breaking(ends=True):
            self._wait(work, meets=meets)

    @contextlib.contextmanager
    def _breaking(self, *, ends: bool = False) -> Iterator[None]:
        """Break the collective on all ranks if it fails inside; `ends`, it is over after this."""
        self._under_way += not ends
        try:
            yield
        except BaseException as error:
            self._under_way, ends = 0, True
            if isinstance(error, GossipError):  # of `unless`
                raise
            if not isinstance(error, RuntimeError):
                self._broken = "this rank was interrupted in the middle of one"
                self._break()
                raise
            self._broken = explained(error)
            if not isinstance(error, StoreSilentError | dist.DistNetworkError):
                if self._gloo is not None and not isinstance(error, GivenUpError):
                    ended = self._rendezvous.ended(self._gloo)
                    self.broken_by = self._rendezvous.first_report(ended)
                    self._break()  # for ranks that wait for this one
                who = f": {named(self.broken_by)}" if self.broken_by else ""
                why = f"({self._broken})"
                self._broken = f"a rank has died, left or broken it off{who} {why}"
            self._gloo = None
            raise GossipError(f"the collective did not come about: {self._broken}") from error
        finally:
            self._under_way = max(0, self._under_way - ends)
            if self._closed and not self._under_way:
                self.close()

    def _wait(self, work: Any, *, meets: bool) -> None:
        # Gloo itself notices a rank that left or died, but not one that hangs.
        deadline, look = Deadline(self._timeout_seconds), timedelta(seconds=_LOOK_SECONDS)
        end_in_vain = self._end_in_vain(connects=False, meets=meets)
        waiting = self._rendezvous.waiting()
        try:
            while True:
                try:
                    work.wait(look)
                    break
                except RuntimeError:
                    if work.is_completed():  # it has failed; else it runs on
                        break
                end_in_vain()
                self._warn_of(waiting.missing())
                if deadline.is_over():
                    missing, limit = self._rendezvous.call_roll("wait"), self._timeout_seconds
                    why = f"it took over {limit:g} s; no answer from {named(missing)}"
                    raise GivenUpError(why)
        except GivenUpError:
            self._break()
            raise
        finally:
            waiting.end()
        work.wait()

    def _warn_of(self, missing: Sequence[int]) -> None:
        """Warn once of members that have not entered this rank's call; the lowest one does."""
        said = self.call, tuple(missing)
        is_lowest = self.rank == min({*self.members} - {*missing}, default=self.rank)
        if missing and is_lowest and said not in self._named:
            self._named.add(said)
            logger.warning(
                "rank %d has waited %g s for %s in %s, and waits on: every rank must call it, so "
                "never inside `if rank == 0:`",
                *(self.rank, LATE_SECONDS, named(missing), self.call),
            )

    def _end_in_vain(self, *, connects: bool, meets: bool) -> Callable[[], None]:
        """Return a check that raises `GivenUpError` when awaited members will not come."""
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
        """End the running collective, here and on the others."""
        if self._gloo is not None:
            self._rendezvous.end(self._gloo)


def _in_host_memory(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in host memory: `tensor` itself if it is one."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor if plain else tensor.detach().cpu().contiguous()
