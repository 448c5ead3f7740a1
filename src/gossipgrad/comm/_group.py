"""The collectives of a session, on a private Gloo group that nothing else talks on."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossipgrad.errors import GossipError

__all__ = ["Group"]

_POLL_SECONDS = 0.0005
_UNUSED_TAG = 1
_CHUNK_BYTES = 64 << 20


class Group:
    """A few collectives among the ranks of a run, away from the user's own groups and tags.

    Every method is a collective unless it says otherwise: all ranks call it, in the same order.
    When a rank has died or left, those waiting for it get a `GossipError`, and so does every later
    call; a rank that is merely late is awaited up to `timeout_seconds`. Waiting can be interrupted
    with Ctrl-C.

    Args:
        store: Where the ranks find each other; equal prefix on all ranks.
        rank: This rank.
        world_size: How many ranks there are.
        timeout_seconds: How long a collective waits for the others.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, timeout_seconds: float = 1800.0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self._broken: str | None = None
        self._lock = threading.Lock()
        timeout = timedelta(seconds=timeout_seconds)
        self._gloo: Any = None  # a ProcessGroupGloo, whose stub lacks its collectives
        if world_size > 1:
            try:
                self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
            except RuntimeError as error:
                raise GossipError(
                    f"rank {rank} waited in vain for the other {world_size - 1} ranks to enter "
                    f"gossip(): {_first_line(error)}"
                ) from error
            # One that leaves as soon as it is connected breaks those who are still connecting.
            self.barrier()

    @classmethod
    def from_process_group(
        cls, group: dist.ProcessGroup, *, timeout_seconds: float = 1800.0
    ) -> "Group":
        """A private group of the same ranks as `group`, whatever its backend.

        The n-th call on a rank meets the n-th call of the others. Nothing is sent on `group`
        itself: only its store is used.
        """
        rank, store = group.rank(), group.get_group_store()
        number = store.add(f"gossipgrad/groups/{rank}", 1)
        prefix = dist.PrefixStore(f"gossipgrad/{number}", store)
        return cls(prefix, rank, group.size(), timeout_seconds=timeout_seconds)

    @property
    def broken(self) -> str | None:
        """Why collectives are over, None while they are not; local."""
        return self._broken

    @torch.no_grad()
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks, in place; any floating or integer dtype, any device."""
        if self.world_size > 1:
            host = tensor if _plain(tensor) else tensor.detach().cpu().contiguous()
            self._run(lambda gloo: gloo.allreduce([host]))
            if host is not tensor:
                tensor.copy_(host)
        return tensor

    @torch.no_grad()
    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites `tensor` with that of rank `source`, in place; any dtype, any device."""
        if not 0 <= source < self.world_size:
            raise ValueError(f"source must lie in 0..{self.world_size - 1}, got {source}")
        if self.world_size > 1:
            host = tensor.detach().cpu().contiguous()
            flat = host.reshape(-1).view(torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = source
            options.rootTensor = 0
            for chunk in flat.split(_CHUNK_BYTES):
                self._run(lambda gloo, chunk=chunk: gloo.broadcast([chunk], options))
            if self.rank != source:
                tensor.copy_(host)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank has, in the order of ranks; values are those of JSON."""
        encoded = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(encoded)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        mine = torch.tensor([len(encoded)], dtype=torch.int64)
        self._run(lambda gloo: gloo.allgather([sizes], [mine]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        self._run(lambda gloo: gloo.allgather([parts], [padded]))
        return [
            json.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """What rank `source` has; a value of JSON."""
        return self.all_gather_object(value if self.rank == source else None)[source]

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        self.all_reduce_(torch.zeros(1))

    def close(self) -> None:
        """Leaves the group, without waiting for anyone; the others' collectives then fail."""
        with self._lock:
            self._broken = self._broken or "this rank has closed its session"
            self._gloo = None

    def _run(self, start: Callable[[Any], Any]) -> None:
        with self._lock:
            if self._broken is not None:
                raise GossipError(f"collectives are over: {self._broken}")
            try:
                work = start(self._gloo)
                while not work.is_completed():
                    time.sleep(_POLL_SECONDS)
                work.wait()
            except RuntimeError as error:
                self._broken = f"a rank has died or left ({_first_line(error)})"
                self._gloo = None
                raise GossipError(f"the collective did not come about: {self._broken}") from error
            except BaseException:
                self._broken = "this rank was interrupted in the middle of one"
                _break(self._gloo, other=int(self.rank == 0))
                raise


def _break(gloo: Any, other: int) -> None:
    """Ends what is under way, here and on the others; else letting go of it would wait for it.

    A deadline that expires is the one thing that makes Gloo do so.
    """
    with contextlib.suppress(RuntimeError):
        gloo.recv([torch.empty(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _first_line(error: BaseException) -> str:
    """The message of a Gloo error, less the place in its source and its parting words."""
    line = str(error).strip().split("\n", 1)[0].split(" This is typically")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line)
