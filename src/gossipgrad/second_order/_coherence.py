"""Sharing of roots: computed on one rank, and used on all."""

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

from gossipgrad.comm import (
    Channel,
    Group,
    Mailbox,
    Part,
    Transport,
    check_timeout,
    here,
    resolve_group,
    resolve_transport,
)
from gossipgrad.errors import AgreementError
from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._optimizer import SecondOrder
from gossipgrad.second_order._refresh import Compute, Run, Value

__all__ = ["RootSharing", "ShareStats", "share_roots"]

logger = logging.getLogger(__name__)

Spec = tuple[tuple[int, ...], torch.dtype]

_LISTEN_SECONDS = 0.05
_CLOSE_SECONDS = 5.0


def share_roots(
    optimizer: Optimizer,
    *,
    every: int = 1,
    nodes: Sequence[Sequence[int]] | None = None,
    patience_seconds: float = 10.0,
    process_group: dist.ProcessGroup | Group | None = None,
    transport: str | Callable[[Group], Transport] = "tcp",
    start_timeout_seconds: float = 30.0,
) -> "RootSharing":
    """Share the roots of a second-order optimizer among ranks; a collective.

    Each unit of blocks belongs to one rank, which computes its roots from its own factors and sends
    them to all others. With DDP, where factors are equal, results equal those
    without sharing bit for bit, and each of p ranks computes 1/p of the roots. With gossip, where
    factors differ, ranks use equal bases for similar factors.

    No rank waits for a late or dead one: if a root has not arrived `patience_seconds` after its
    factors were copied, this rank computes it, counted in `stats.alone`. If
    replicas have to be equal bit for bit, all ranks need the same kind of processor and the same
    torch.

    Args:
        optimizer: A `gg.SOAP`, `gg.KLShampoo` or `gg.Shampoo`.
        every: Refreshes of a unit between two shared ones; in between each rank uses its own root.
        nodes: The ranks of each node, each rank once. A root is sent once to each other node, to
            its first rank. None: ranks of the same host form a node.
        patience_seconds: See above; must exceed the time of a refresh. After a rank was late,
            others do not wait for it until it has sent something.
        process_group: The ranks that take part; by default all. A `gg.Group` closes with the
            sharing.
        transport: As in `gg.gossip()`.
        start_timeout_seconds: How long this call waits for the other ranks.

    Returns:
        The sharing, which ends with `close()` or a `with` statement; afterwards each rank computes
        all roots.

    Raises:
        ValueError: For invalid settings, or another optimizer.
        AgreementError: The ranks' optimizers or settings differ.
        GossipError: A rank is missing after the timeout.

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
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
    if not 0 < patience_seconds < math.inf:
        raise ValueError(f"patience_seconds must be above 0 and finite, got {patience_seconds}")
    check_timeout(start_timeout_seconds)
    links = resolve_transport(transport)
    group = resolve_group(
        process_group, asks="share_roots()", start_timeout_seconds=start_timeout_seconds
    )
    try:
        with group.limit(start_timeout_seconds):
            return RootSharing(
                optimizer,
                group,
                links,
                every=every,
                nodes=_resolve_nodes(nodes, group),
                patience_seconds=patience_seconds,
            )
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
        sent_bytes_to_other_nodes: Bytes of these to other nodes.
    """

    computed: int = 0
    received: int = 0
    alone: int = 0
    sent_bytes: int = 0
    sent_bytes_to_other_nodes: int = 0


@dataclass(slots=True, eq=False)
class _Awaited:
    """A root expected from its owner."""

    unit: int
    step: int
    compute: Compute
    run: Run
    future: Future[Value]
    deadline: float


class RootSharing:
    """The sharing that `share_roots()` returns; a context manager."""

    def __init__(
        self,
        optimizer: SecondOrder,
        group: Group,
        transport: Callable[[Group, int], Transport],
        *,
        every: int,
        nodes: Sequence[Sequence[int]],
        patience_seconds: float,
    ) -> None:
        self.stats = ShareStats()
        self._optimizer, self._group = weakref.ref(optimizer), group
        self._every, self._patience = every, patience_seconds
        self._nodes = [tuple(node) for node in nodes]
        self._rank = group.rank
        self._node = next(n for n, ranks in enumerate(self._nodes) if group.rank in ranks)
        plan = optimizer.plan()
        self._specs = [optimizer.root_parts(unit) for unit in plan]
        self._owners = _deal([_cost(unit) for unit in plan], group.world_size)
        described = [str(self._specs), every, self._nodes, type(optimizer).__name__]
        said = group.all_gather_object(str(described))
        if len(set(said)) > 1:
            other = next(rank for rank, each in enumerate(said) if each != said[0])
            raise AgreementError(
                f"rank {other} shares {said[other]}, and rank 0 {said[0]}: build the same "
                "optimizer and settings on every rank"
            )
        run = bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
        sizes = [sum(math.prod(s) * d.itemsize for s, d in parts) for parts in self._specs]
        largest = max(sizes, default=1)
        self._channel = Channel(transport(group, largest), run=run, plan=[])
        self._box = Mailbox(self._channel, [Part(torch.uint8, size) for size in sizes])
        for peer in sorted((self._near() | self._leaders()) - {self._rank}):
            self._channel.watch(peer)
        self._lock = threading.Lock()
        self._awaited: dict[int, _Awaited] = {}
        self._late: dict[int, int] = {}  # by rank, the step of its late root
        self._passed_on = [-1] * len(plan)
        self._is_closed = False
        group.barrier()  # all ranks have a mailbox before the first mail arrives
        self._thread = threading.Thread(
            target=_listen, args=(weakref.ref(self),), name="gossipgrad-share-roots", daemon=True
        )
        self._thread.start()
        optimizer.sharing = self

    @property
    def owners(self) -> list[int]:
        """The rank that computes the roots of each unit."""
        return list(self._owners)

    def submit(self, unit: int, step: int, compute: Compute, run: Run) -> Future[Value]:
        """Return the future of a unit's root, of any rank; called by the optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        is_planned = unit < len(self._specs) and self._specs[unit] == optimizer.parts(unit)
        is_due = step // optimizer.refresh.every % self._every == 0
        if self._is_closed or not is_planned or not is_due:
            return self._compute(compute, run)
        if self._owners[unit] == self._rank:
            future = self._compute(compute, run)
            future.add_done_callback(lambda f: self._publish(unit, step, f))
            return future
        if self._is_late(unit):
            self.stats.alone += 1
            return self._compute(compute, run)
        deadline = time.monotonic() + self._patience
        awaited = _Awaited(unit, step, compute, run, Future(), deadline)
        with self._lock:
            self._awaited[unit] = awaited
        return awaited.future

    def _is_late(self, unit: int) -> bool:
        """Whether the owner of the unit was late, and has sent none since."""
        source, mail = self._owners[unit], self._box.latest(unit)
        if mail is not None and mail.version > self._late.get(source, mail.version):
            del self._late[source]
        return source in self._late

    def close(self) -> None:
        """Stop sharing: each rank computes all roots from now on; local, may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if (optimizer := self._optimizer()) is not None:
            optimizer.sharing = None
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

    # -- what is sent ------------------------------------------------------------------------------

    def _compute(self, compute: Compute, run: Run) -> Future[Value]:
        self.stats.computed += 1
        return run(compute)

    def _publish(self, unit: int, step: int, future: Future[Value]) -> None:
        """Send a root of this rank to its own node and the first ranks of others."""
        if not future.cancelled() and future.exception() is None:
            self._send(unit, step, _encode(future.result()), self._near() | self._leaders())

    def _send(self, key: int, version: int, values: Tensor, peers: set[int]) -> None:
        peers = peers - {self._rank} - self._channel.gone.keys()
        self._box.publish(key, values, version=version, peers=peers)
        self.stats.sent_bytes += values.nbytes * len(peers)
        self.stats.sent_bytes_to_other_nodes += values.nbytes * len(peers - self._near())

    def _near(self) -> set[int]:
        return set(self._nodes[self._node])

    def _leaders(self) -> set[int]:
        return {node[0] for node in self._nodes}

    # -- what arrives ------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Receive briefly, forward roots that others need, and complete arrived ones."""
        self._channel.poll(_LISTEN_SECONDS)
        if self._rank in self._leaders():
            for unit in range(len(self._specs)):
                self._pass_on(unit)
        gone, now = self._channel.gone, time.monotonic()
        for awaited in [*self._awaited.values()]:
            mail = self._box.take(awaited.unit, awaited.step)
            if mail is not None and self._forget(awaited):
                self.stats.received += 1
                _complete(awaited.future, _decode(mail.values, self._specs[awaited.unit]))
            elif (source := self._owners[awaited.unit]) in gone or now > awaited.deadline:
                if source not in gone:
                    self._late.setdefault(source, awaited.step)
                self._go_alone(awaited)

    def _pass_on(self, unit: int) -> None:
        """Forward a root of another node to the rest of this one."""
        mail = self._box.latest(unit)
        if mail is None or mail.version <= self._passed_on[unit] or mail.sender in self._near():
            return
        self._passed_on[unit] = mail.version
        near = self._near() - {self._rank}
        self.stats.sent_bytes += mail.values.nbytes * len(near)
        self._channel.send_mail(unit, mail.version, mail.values, near)

    def _go_alone(self, awaited: _Awaited) -> None:
        """Compute the root here, if its owner has not sent it in the meantime."""
        if not self._forget(awaited):
            return
        self.stats.alone += 1
        self._compute(awaited.compute, awaited.run).add_done_callback(
            lambda f: _complete(awaited.future, f.exception() or f.result())
        )

    def _forget(self, awaited: _Awaited) -> bool:
        with self._lock:
            if self._awaited.get(awaited.unit) is not awaited:
                return False
            del self._awaited[awaited.unit]
            return True


def _listen(reference: "weakref.ref[RootSharing]") -> None:
    while (sharing := reference()) is not None and not sharing._is_closed:
        try:
            sharing._turn()
        except Exception:
            logger.exception("sharing of roots ends: each rank computes all of its own")
            sharing.close()
        del sharing


def _complete(future: Future[Value], result: Value | BaseException) -> None:
    """Set the future's result, unless the optimizer has cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _encode(value: Value) -> Tensor:
    parts = [part.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for part in value]
    return torch.cat(parts)


def _decode(values: Tensor, specs: Sequence[Spec]) -> Value:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    pieces = zip(values.split(sizes), specs, strict=True)
    return tuple(piece.clone().view(dtype).view(shape) for piece, (shape, dtype) in pieces)


def _cost(unit: Unit) -> float:
    m, n = unit.shape
    return len(unit.blocks) * (float(m) ** 3 + float(n) ** 3)


def _deal(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign an owner to each unit, the largest first, to the rank with the least work so far."""
    owners, loads = [0] * len(costs), [0.0] * ranks
    for unit in sorted(range(len(costs)), key=lambda unit: -costs[unit]):
        owners[unit] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[unit]] += costs[unit]
    return owners


def _resolve_nodes(nodes: Sequence[Sequence[int]] | None, group: Group) -> list[list[int]]:
    """Return the ranks of each node, by default those of one host (a collective)."""
    if nodes is None:
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(group.all_gather_object(here())):
            by_host.setdefault(host, []).append(rank)
        return [*by_host.values()]
    if sorted(rank for node in nodes for rank in node) != list(range(group.world_size)):
        raise ValueError(
            f"nodes={nodes!r} must name each of the ranks 0..{group.world_size - 1} once"
        )
    return [list(node) for node in nodes if node]
