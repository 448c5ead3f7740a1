"""When and where roots of factors are computed, and from which step they are used."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gossipgrad._messages import warn
from gossipgrad.comm import Recorder
from gossipgrad.errors import GossipError
from gossipgrad.second_order._roots import exact_products
from gossipgrad.second_order._streams import LateCount, SideStream, to_host
from gossipgrad.second_order._symmetric import unpack

__all__ = [
    "Job",
    "Ready",
    "Refresh",
    "RefreshStats",
    "Refresher",
    "Share",
    "Value",
    "Work",
    "completed",
    "is_due",
    "is_used",
    "phases_of",
]

Value = tuple[Tensor, ...]
Where = Literal["auto", "device", "host"]


@dataclass(frozen=True)
class Refresh:
    """When and where an optimizer computes the roots or bases of its factors.

    Matrices are cut into blocks, and equal blocks are stacked. The left and the right factors of a
    stack are each a unit. Units are spread over a window of `every` steps, in order, so that each
    step has an equal share of the cost. The first roots of all are computed in the first step
    (the second with SOAP and KL-Shampoo).

    A root is used from exactly `delay` steps after the copy of its factor, so that a run repeats
    bit for bit, and all ranks change roots in the same step. If it is not ready by then, the step
    waits for it.

    Args:
        every: Steps from one refresh of a unit to the next, at least 1.
        delay: Steps from the copy of a factor to the first use of its root, from 0 to `every`; 0:
            the step computes it.
        workers: Threads with `where="host"`, at least 1; each computes on one core. Where torch's
            threads, of all ranks of a machine, take all cores, a worker would only hold some of
            them up: then the step computes the root, which is used `delay` steps later all the
            same (`optimizer.refresh_stats.in_step` counts).
        where: `"device"`: on a stream of its own beside training; the host never waits, a late root
            holds the device up. `"host"`: in worker threads, from pinned copies. `"auto"`:
            `"device"` for parameters on an accelerator, else `"host"`.

    Raises:
        ValueError: For a number or name out of range.
    """

    every: int = 10
    delay: int = 0
    workers: int = 1
    where: Where = "auto"

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("delay", 0), ("workers", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if self.delay > self.every:
            raise ValueError(
                f"delay={self.delay} is above every={self.every}: a unit's next root would be due "
                f"before this one is in use. Give delay={self.every} or less, or refresh less often"
            )
        if self.where not in get_args(Where):
            raise ValueError(f"where={self.where!r} is none of {', '.join(get_args(Where))}")


@dataclass(slots=True)
class RefreshStats:
    """The counters of an optimizer's roots.

    Attributes:
        refreshes: Number of computed roots of units.
        failed: Number of blocks whose root failed or was not finite, and which kept the old one.
            On an accelerator it is some steps old.
        in_step: Number of roots that have a delay, and which the step itself computed, since
            torch's threads take all cores: there a delay only makes roots older.
        waits: How often a step waited for a worker thread or another rank.
        waited_seconds: Total time of these waits.
    """

    refreshes: int = 0
    failed: int = 0
    in_step: int = 0
    waits: int = 0
    waited_seconds: float = 0.0


class Work(NamedTuple):
    """What a unit's roots are computed from, and how."""

    find: Callable[..., Value]
    """Returns new roots, and for bases the old column of each new one; called with whole factors,
    the old roots, and `on_host=`."""
    factor: Tensor
    """Packed factors; training changes them."""
    old: Tensor
    """Roots or bases in use. They change only when the result is used."""
    is_ordered: bool
    """Whether `find` returns columns."""


class Ready(NamedTuple):
    """A job's result."""

    value: Value
    mark: Any = None
    """Of the side stream that computes it, if the host did not wait."""


Job = Future[Ready]
Share = Callable[[int, Callable[[], Job]], Job]


class Refresher:
    """Computes roots by a policy: in the step, by threads, or on a side stream."""

    def __init__(self, policy: Refresh) -> None:
        self.policy = policy
        self.stats = RefreshStats()
        self.share: Share | None = None
        self.recorder: Recorder | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0  # the one whose threads are in the pool
        self._sides: dict[torch.device, tuple[SideStream, LateCount]] = {}
        self._on_host_failed = 0
        self._error: Exception | None = None

    def is_on_host(self, device: torch.device) -> bool:
        """Whether roots of parameters on this device are computed in host memory."""
        where = self.policy.where
        return where == "host" or (where == "auto" and device.type == "cpu")

    def start(self, unit: int, step: int, work: Work, *, is_first: bool) -> Job:
        """Start to compute a root; complete on return if it is the first, or for delay 0."""
        device = work.factor.device
        is_now = is_first or self.policy.delay == 0
        self.stats.refreshes += 1
        if not self.is_on_host(device):
            if not is_now:  # here, as another rank's silence may make it run steps later
                work = work._replace(factor=work.factor.clone())
            run = partial(self._enqueue, work, is_now=is_now)
        else:
            compute = partial(self._on_host, *self._copies(work, copy=not is_now), unit, step)
            is_beside = not is_now and (device.type != "cpu" or _has_free_core())
            self.stats.in_step += not (is_now or is_beside)
            run = partial(self._submit if is_beside else _now, compute)
        return run() if self.share is None or is_first else self.share(unit, run)

    def finish(self, job: Job, device: torch.device) -> Value:
        """Return a job's value on a device; wait for it if it is not there."""
        if not job.done():
            start = time.perf_counter()
            self.wait(job)
            end = time.perf_counter()
            self.stats.waits += 1
            self.stats.waited_seconds += end - start
            if self.recorder is not None:
                self.recorder.span("wait for root", start, end)
        value, mark = job.result()
        if mark is not None:
            self._side_of(device)[0].wait(mark)
        self._look_at_failures()
        return tuple(each.to(device, non_blocking=True) for each in value)

    def wait(self, job: Job) -> None:
        """Wait until a job has ended."""
        if not job.done() and self._pool is not None and self._process != os.getpid():
            raise GossipError(
                "a forked child has none of the threads that compute roots: make the optimizer in "
                "the child, or give it Refresh(delay=0)"
            )
        job.exception()

    def close(self) -> None:
        """End the threads, after the roots that they compute. May be called twice."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _submit(self, compute: Callable[[], Ready]) -> Job:
        if self._pool is None:
            name, self._process = "gossipgrad-roots", os.getpid()
            self._pool = ThreadPoolExecutor(self.policy.workers, name, _on_one_core)
        return self._pool.submit(compute)

    def _side_of(self, device: torch.device) -> tuple[SideStream, LateCount]:
        if device not in self._sides:
            self._sides[device] = SideStream(device), LateCount(device)
        return self._sides[device]

    @staticmethod
    def _copies(work: Work, *, copy: bool) -> tuple[Work, Any]:
        """Return work on copies in host memory, and a mark behind them."""
        device = work.factor.device
        factor, old = to_host(work.factor, copy=copy), to_host(work.old, copy=False)
        mark = None
        if device.type == "cuda":
            mark = torch.cuda.current_stream(device).record_event()
        return work._replace(factor=factor, old=old), mark

    def _on_host(self, work: Work, mark: Any, unit: int, step: int) -> Ready:
        if mark is not None:
            mark.synchronize()
        start = time.perf_counter()
        value, failed = self._value(work, on_host=True)
        self._on_host_failed += int(failed)
        if self.recorder is not None:
            self.recorder.span("root", start, time.perf_counter(), unit=unit, step=step)
        return Ready(value)

    def _enqueue(self, work: Work, *, is_now: bool) -> Job:
        stream, failures = self._side_of(work.factor.device)
        with exact_products():
            if is_now:
                value, failed = self._value(work, on_host=False)
            else:
                with stream.behind():
                    value, failed = self._value(work, on_host=False)
        with stream.behind():
            failures.add(failed)
            mark = None if is_now else stream.mark()
        stream.keep(*((failed,) if is_now else (work.factor, work.old)))
        return completed(Ready(value, mark))

    @torch.no_grad()
    def _value(self, work: Work, *, on_host: bool) -> tuple[Value, Tensor]:
        """Return roots, with the old ones where they failed, and how many did."""
        old = work.old.to(work.factor.dtype)
        order = torch.arange(old.shape[-1], device=old.device).expand(len(old), -1)
        try:
            new, *orders = work.find(unpack(work.factor, old.shape[-1]), old, on_host=on_host)
        except Exception as error:  # LAPACK's, or of memory; the step continues with the old ones
            self._error = error
            new, orders = torch.full_like(old, torch.nan), [order]
        is_good = new.sum((1, 2)).isfinite()
        # Contiguous: products are then those of a received copy, bit for bit.
        new = torch.where(is_good[:, None, None], new, old).to(work.old.dtype).contiguous()
        failed = (~is_good).sum()
        if not work.is_ordered:
            return (new,), failed
        return (new, torch.where(is_good[:, None], orders[0], order)), failed

    def _look_at_failures(self) -> None:
        failed = self._on_host_failed + sum(late.read() for _, late in self._sides.values())
        before, self.stats.failed = self.stats.failed, failed
        if failed and not before:
            because = f": {self._error}" if self._error is not None else ", they were not finite"
            warn(
                f"roots of {failed} blocks failed{because}. The blocks keep their old ones and are "
                "tried again. This is said once; optimizer.refresh_stats.failed counts. If it "
                "stays, give more damping, or another root_method"
            )


def phases_of(costs: Sequence[float], every: int) -> list[int]:
    """Return the step of each window in which each unit is due, equal costs apart."""
    ends = list(accumulate(costs))
    return [int(every * (e - c / 2) / ends[-1]) for e, c in zip(ends, costs, strict=True)]


def is_due(call: int, phase: int, policy: Refresh) -> bool:
    """Whether a unit is due in this call, counted from its first one, 0."""
    return call == 0 or call % policy.every == phase


def is_used(call: int, phase: int, policy: Refresh) -> bool:
    """Whether a root from `delay` calls before is first used in this one."""
    copied = call - policy.delay
    return policy.delay > 0 and copied > 0 and is_due(copied, phase, policy)


def completed(ready: Ready) -> Job:
    """Return a job that has ended."""
    job: Job = Future()
    job.set_result(ready)
    return job


def _now(compute: Callable[[], Ready]) -> Job:
    with exact_products():
        return completed(compute())


def _has_free_core() -> bool:
    """Whether training, on all ranks of this machine, leaves a core to others."""
    cores = len(os.sched_getaffinity(0))
    is_bound = cores != os.cpu_count()  # then others have other cores
    ranks = 1 if is_bound else int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return ranks * torch.get_num_threads() < cores


def _on_one_core() -> None:
    # It sets this thread's number, and that of threads which start later. Another thread restores
    # the latter: in this one it would set both.
    restore = threading.Thread(target=torch.set_num_threads, args=(torch.get_num_threads(),))
    torch.set_num_threads(1)
    restore.start()
    restore.join()
