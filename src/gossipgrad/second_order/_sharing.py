"""Roots computed on one rank and used on all; and state that one rank has alone."""

import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import (
    Channel,
    Group,
    Mailbox,
    Part,
    Transport,
    resolve_group,
    resolve_transport,
)
from gossipgrad.errors import GossipError
from gossipgrad.optim import distribute
from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._optimizer import FACTORS, SecondOrder
from gossipgrad.second_order._refresh import Job, Ready, Value
from gossipgrad.second_order._sharding import Sharding, check_alike

__all__ = ["RootSharing", "ShareStats", "share_roots"]

logger = logging.getLogger(__name__)

Spec = tuple[tuple[int, ...], torch.dtype]
Run = Callable[[], Job]

_LISTEN_SECONDS = 0.05
_CLOSE_SECONDS = 5.0


def share_roots(
    optimizer: Optimizer,
    *,
    shard: bool = False,
    patience_seconds: float = 10.0,
    process_group: dist.ProcessGroup | Group | None = None,
    transport: str | Callable[[Group], Transport] = "tcp",
    start_timeout_seconds: float = 30.0,
) -> "RootSharing | Sharding":
    """Share the roots of a second-order optimizer among ranks; a collective.

    Each unit, the left or right factors of equal blocks, belongs to one rank, which computes its
    roots from its own factors and sends them to all others. With DDP, where factors are equal,
    results equal those without sharing bit for bit, and each of p ranks computes 1/p of the roots.
    With gossip, where factors differ, ranks use equal bases for similar factors.

    No rank waits for a late or dead one: if a root has not arrived `patience_seconds` after its
    factors were copied, this rank computes it, counted in `stats.alone`. If
    replicas have to be equal bit for bit, all ranks need the same kind of processor and the same
    torch.

    With `shard=True`, for DDP alone, blocks belong to one rank with all of their state: it computes
    their update and broadcasts the new weights, so that memory of state and time of a step fall as
    1/p. Results equal those of one rank bit for bit. Every rank has to take every step, and a dead
    rank ends the run, as in DDP. Save the state with `torch.distributed.checkpoint`, or on each
    rank: a rank's `state_dict()` has its own blocks. A state is loaded on as many ranks as it was
    saved on.

    Args:
        optimizer: A `gg.SOAP`, `gg.KLShampoo` or `gg.Shampoo`.
        shard: See above. Call it before the first step and before `load_state_dict()`.
        patience_seconds: See above; must exceed the time of a refresh. After a rank was late,
            others do not wait for it until it has sent something.
        process_group: The ranks that take part; by default all. A `gg.Group` closes with the
            sharing. With `shard=True` a process group of torch.
        transport: As in `gg.gossip()`.
        start_timeout_seconds: How long this call waits for the other ranks.

    Returns:
        The sharing, which ends with `close()` or a `with` statement; afterwards each rank computes
        all roots. With `shard=True` it holds for the life of the optimizer, which its `close()`
        does not end.

    Raises:
        ValueError: For invalid settings, or another optimizer.
        AgreementError: The ranks' optimizers or settings differ.
        GossipError: A rank is missing after the timeout; the optimizer's roots are shared already;
            or, with `shard=True`, it has made a step or is in an open session.

    References:
        Asteria, arXiv:2605.16184, which exchanges a block only when it is due. Deviations: (1) one
        rank's root is used instead of the mean over ranks, as a mean of bases is no basis; (2) no
        rank waits for another.
    """
    if not isinstance(optimizer, SecondOrder):
        raise ValueError(
            f"{type(optimizer).__name__} has no roots to share: gg.SOAP, gg.KLShampoo and "
            "gg.Shampoo have"
        )
    if not 0 < patience_seconds < math.inf:
        raise ValueError(f"patience_seconds must be above 0 and finite, got {patience_seconds}")
    if optimizer.sharding is not None or (optimizer.refresher.share is not None and not shard):
        raise GossipError(
            "the optimizer's roots are shared already: call share_roots() once, or close() what it "
            "returned before"
        )
    if shard:
        if isinstance(process_group, Group):
            raise ValueError(
                "shard=True broadcasts by torch.distributed: give process_group= a process group "
                "of torch, or leave it out"
            )
        return Sharding(optimizer, process_group)
    links = resolve_transport(transport)
    group = resolve_group(
        process_group, asks="share_roots()", start_timeout_seconds=start_timeout_seconds
    )
    try:
        with group.limit(start_timeout_seconds):
            return RootSharing(optimizer, group, links, patience_seconds=patience_seconds)
    except BaseException:
        group.close()
        raise


@dataclass(slots=True)
class ShareStats:
    """The counters of a sharing.

    Attributes:
        computed: Number of roots computed by this rank.
        received: Number of roots that were received and used.
        alone: Number of roots of others that were computed here, as they were late or missing.
        sent_bytes: Bytes of roots sent to all ranks.
    """

    computed: int = 0
    received: int = 0
    alone: int = 0
    sent_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Awaited:
    """A root expected from its owner."""

    unit: int
    version: int
    run: Run
    job: Job
    deadline: float


class RootSharing:
    """The sharing that `share_roots()` returns; a context manager."""

    def __init__(
        self,
        optimizer: SecondOrder,
        group: Group,
        transport: Callable[[Group], Transport],
        *,
        patience_seconds: float,
    ) -> None:
        self.stats = ShareStats()
        self._optimizer, self._group = weakref.ref(optimizer), group
        self._patience = patience_seconds
        self._planned = [_names(unit) for unit in optimizer.plan() for _ in FACTORS]
        units = range(len(self._planned))
        self._specs = [optimizer.root_parts(unit) for unit in units]
        self._versions = [0] * len(units)
        costs = [math.prod(parts[0][0]) * float(parts[0][0][-1]) for parts in self._specs]
        self._owners = distribute(costs, [0.0] * group.world_size)
        described = f"{type(optimizer).__name__} with roots {self._specs}, {optimizer.refresh}"
        check_alike(group.all_gather_object(described))
        run = bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
        sizes = [sum(math.prod(s) * d.itemsize for s, d in parts) for parts in self._specs]
        self._channel = Channel(transport(group), run=run, plan=[])
        self._box = Mailbox(self._channel, [Part(torch.uint8, size) for size in sizes])
        self._peers = set(range(group.world_size)) - {group.rank}
        for peer in sorted(self._peers):
            self._channel.watch(peer)
        self._lock = threading.Lock()
        self._awaited: dict[int, _Awaited] = {}
        self._to_send: list[tuple[int, int, Ready]] = []
        self._late: dict[int, int] = {}  # by rank, the version of its late root
        self._is_closed = self._has_warned = False
        group.barrier()  # all ranks have a mailbox before the first mail arrives
        self._thread = threading.Thread(
            target=_listen, args=(weakref.ref(self),), name="gossipgrad-share-roots", daemon=True
        )
        self._thread.start()
        optimizer.refresher.share = self.submit

    @property
    def owners(self) -> list[int]:
        """The rank that computes the roots of each unit."""
        return list(self._owners)

    def submit(self, unit: int, run: Run) -> Job:
        """Return the job of a unit's root, of any rank; called by the optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        is_planned = unit < len(self._planned) and self._planned[unit] == _names(
            optimizer.plan()[unit // 2]
        )
        if self._is_closed or not is_planned:
            if not (self._is_closed or self._has_warned):
                self._has_warned = True
                shape = optimizer.plan()[unit // 2].shape
                warn(
                    f"roots of unit {unit} (blocks of shape {shape}) are not shared, as its layers "
                    "are not those of share_roots(): each rank computes them. This is said once; "
                    "call share_roots() when all layers that will be trained require gradients, "
                    "and after load_state_dict()"
                )
            return self._compute(run)
        # Not the step: with the state of an earlier one, versions would come a second time.
        version = self._versions[unit]
        self._versions[unit] += 1
        if self._owners[unit] == self._group.rank:
            job = self._compute(run)
            job.add_done_callback(lambda done: self._send_when_ready(unit, version, done))
            return job
        if self._is_late(unit):
            self.stats.alone += 1
            return self._compute(run)
        awaited = _Awaited(unit, version, run, Future(), time.monotonic() + self._patience)
        with self._lock:
            self._awaited[unit] = awaited
        return awaited.job

    def close(self) -> None:
        """Stop sharing: each rank computes all roots from now on; local, may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if (optimizer := self._optimizer()) is not None:
            optimizer.refresher.share = None
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        for awaited in [*self._awaited.values()]:
            self._go_alone(awaited)
        self._channel.close()
        self._group.close()

    def __enter__(self) -> "RootSharing":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self.close()

    def _is_late(self, unit: int) -> bool:
        """Whether the owner of the unit was late, and has sent none since."""
        source, mail = self._owners[unit], self._box.latest(unit)
        if mail is not None and mail.version > self._late.get(source, mail.version):
            del self._late[source]
        return source in self._late

    def _compute(self, run: Run) -> Job:
        self.stats.computed += 1
        return run()

    def _send_when_ready(self, unit: int, version: int, job: Job) -> None:
        """Send a root, or let the listening thread do so, if it has to wait for a device."""
        if job.cancelled() or job.exception() is not None:
            return
        if (ready := job.result()).mark is None:
            self._send(unit, version, ready)
        else:
            self._to_send.append((unit, version, ready))

    def _send(self, unit: int, version: int, ready: Ready) -> None:
        values, peers = _encode(ready.value), self._peers - self._channel.gone.keys()
        self._box.publish(unit, values, version=version, peers=peers)
        with self._lock:
            self.stats.sent_bytes += values.nbytes * len(peers)

    def _turn(self) -> None:
        """Send what is ready, receive briefly, and complete roots that have arrived."""
        while self._to_send:
            unit, version, ready = self._to_send.pop(0)
            ready.mark.synchronize()
            self._send(unit, version, ready)
        self._channel.poll(_LISTEN_SECONDS)
        gone, now = self._channel.gone, time.monotonic()
        for awaited in [*self._awaited.values()]:
            mail = self._box.take(awaited.unit, awaited.version)
            if mail is not None and self._forget(awaited):
                self.stats.received += 1
                value = _decode(mail.values, self._specs[awaited.unit])
                _complete(awaited.job, Ready(value))
            elif (source := self._owners[awaited.unit]) in gone or now > awaited.deadline:
                if source not in gone:
                    self._late.setdefault(source, awaited.version)
                self._go_alone(awaited)

    def _go_alone(self, awaited: _Awaited) -> None:
        """Compute the root here, unless it has arrived."""
        if not self._forget(awaited):
            return
        self.stats.alone += 1
        self._compute(awaited.run).add_done_callback(
            lambda done: _complete(awaited.job, done.exception() or done.result())
        )

    def _forget(self, awaited: _Awaited) -> bool:
        with self._lock:
            if self._awaited.get(awaited.unit) is not awaited:
                return False
            del self._awaited[awaited.unit]
            return True


def _names(unit: Unit) -> list[tuple[int, str]]:
    """Return what a unit's blocks are called in this process."""
    return [(id(block.parameter), block.number) for block in unit.blocks]


def _listen(reference: "weakref.ref[RootSharing]") -> None:
    while (sharing := reference()) is not None and not sharing._is_closed:
        try:
            sharing._turn()
        except Exception:
            logger.exception("sharing of roots ends: each rank computes all of its own")
            sharing.close()
        del sharing


def _complete(job: Job, result: Ready | BaseException) -> None:
    """Set the job's result, unless the optimizer has cancelled it."""
    if not job.set_running_or_notify_cancel():
        return
    if isinstance(result, BaseException):
        job.set_exception(result)
    else:
        job.set_result(result)


def _encode(value: Value) -> Tensor:
    parts = [part.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for part in value]
    return torch.cat(parts)


def _decode(values: Tensor, specs: Sequence[Spec]) -> Value:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    pieces = zip(values.split(sizes), specs, strict=True)
    return tuple(piece.clone().view(dtype).view(shape) for piece, (shape, dtype) in pieces)
