"""Refresh policies: when and where roots of preconditioners are computed, and their age."""

import contextlib
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gossipgrad.comm import Recorder, has_peers
from gossipgrad.errors import GossipError

__all__ = [
    "Background",
    "Deterministic",
    "Policy",
    "RefreshStats",
    "Refresher",
    "Root",
    "Staggered",
    "Synchronous",
]

Value = tuple[Tensor, ...]
Compute = Callable[[], Value]
Run = Callable[[Compute], Future[Value]]
Share = Callable[[int, int, Compute, Run], Future[Value]]
OnBound = Literal["block", "synchronous", "graft-only"]


@dataclass(frozen=True)
class Synchronous:
    """Computes all roots in the step in which they are due, which waits for them.

    Args:
        every: Steps from one refresh to the next, at least 1.

    Raises:
        ValueError: For a number below 1.
    """

    every: int = 10

    def __post_init__(self) -> None:
        _check_whole("every", self.every, 1)


@dataclass(frozen=True)
class Staggered:
    """Computes the roots of a share of units in each step, so that no step computes all.

    Unit u is due in steps k with k mod every = u mod every, and in its first one.

    Args:
        every: Steps from one refresh of a unit to the next, at least 1.

    Raises:
        ValueError: For a number below 1.
    """

    every: int = 10

    def __post_init__(self) -> None:
        _check_whole("every", self.every, 1)


@dataclass(frozen=True)
class Background:
    """Computes roots in worker threads from a snapshot; a step waits only at the age bound.

    Units are due as in `Staggered`. A root in use is never older than `every - 1 + max_staleness`
    steps, counted from the step whose factors it was computed from. `max_staleness=0` is
    `Synchronous`, bit for bit.

    Args:
        every: Steps from one refresh of a unit to the next, at least 1.
        max_staleness: Steps that a root may take to compute, from 0 to `every`.
        workers: Threads, at least 1; each computes on one core.
        on_bound: Action of a step for a unit whose root would be too old: `"block"` waits for the
            worker, `"synchronous"` computes it in the step, and `"graft-only"` makes the step
            without a preconditioner.
        executor: Runs the jobs instead of the optimizer's own threads: an `Executor` of threads, or
            `Deterministic`. The caller has to shut it down.
        fixed_delay: True: a root is used from exactly `max_staleness` steps after its snapshot,
            so that a run repeats bit for bit and all ranks change roots in the same step. False: as
            soon as it is ready. None: True with several ranks in the default process group, or with
            shared roots. With `"graft-only"` it cannot be True.
        timeout_seconds: How long `"block"` waits before it raises.

    Raises:
        ValueError: For numbers out of range, or an unknown `on_bound`.
    """

    every: int = 10
    max_staleness: int = 5
    workers: int = 1
    on_bound: OnBound = "block"
    executor: Executor | None = None
    fixed_delay: bool | None = None
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        _check_whole("every", self.every, 1)
        _check_whole("max_staleness", self.max_staleness, 0)
        if self.max_staleness > self.every:
            raise ValueError(
                f"max_staleness={self.max_staleness} is above every={self.every}, and a unit "
                "computes one root at a time: the next would be due before this one, and steps "
                f"would wait. Give max_staleness={self.every} or less, or refresh less often"
            )
        _check_whole("workers", self.workers, 1)
        if self.on_bound not in get_args(OnBound):
            raise ValueError(
                f"on_bound={self.on_bound!r} is none of {', '.join(get_args(OnBound))}"
            )
        if self.executor is not None and not isinstance(self.executor, Executor):
            raise ValueError(
                f"executor={self.executor!r} is no concurrent.futures.Executor: give a "
                "ThreadPoolExecutor or gg.Deterministic, or leave it out for threads of its own"
            )
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(
                f"timeout_seconds must be above 0 and finite, got {self.timeout_seconds}"
            )


Policy = Synchronous | Staggered | Background


class Deterministic(Executor):
    """Completes jobs a given number of steps after their submission: reproducible staleness.

    For tests and studies of staleness. A job runs immediately, in the thread that submits it, and
    its root is applied later.

    Args:
        delay: Number of steps, or a function of unit and step.

    Raises:
        ValueError: For a delay below 0.

    Example:
        >>> from gossipgrad.second_order import Background, Deterministic
        >>> Background(every=10, max_staleness=5, executor=Deterministic(delay=3)).every
        10
    """

    def __init__(self, delay: int | Callable[[int, int], int] = 0) -> None:
        if not callable(delay):
            _check_whole("delay", delay, 0)
        self._delay = delay

    def delay(self, unit: int, step: int) -> int:
        """Return the steps from the submission of a unit's job to its completion."""
        return self._delay(unit, step) if callable(self._delay) else self._delay

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it now."""
        future: Future[Any] = Future()
        _run(future, lambda: fn(*args, **kwargs))
        return future


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """The result computed from the factors of a unit; replaced as a whole, never modified.

    Attributes:
        version: Number of the unit's root, from 1.
        step: The step whose factors it was computed from.
        value: Roots or bases; empty if `Refresher` passes them to `publish`.
    """

    version: int
    step: int
    value: tuple[Tensor, ...]


@dataclass(slots=True)
class RefreshStats:
    """The counters of a refresher.

    Attributes:
        refreshes: Number of applied roots.
        failed: Number of jobs that raised or whose result was not finite.
        waits: How often a step waited for a worker at the age bound.
        waited_seconds: Total time of these waits.
        synchronous: Number of roots that a step computed itself at the age bound.
        graft_only: Number of steps of a unit without a root, at the age bound.
        oldest: The highest age, in steps, of a used root.
    """

    refreshes: int = 0
    failed: int = 0
    waits: int = 0
    waited_seconds: float = 0.0
    synchronous: int = 0
    graft_only: int = 0
    oldest: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    step: int
    earliest: int
    compute: Compute
    future: Future[Value]


@dataclass(slots=True, eq=False)
class _Unit:
    root: Root | None = None
    job: _Job | None = None
    submitted: int = -1
    failures: int = 0
    error: BaseException | None = field(default=None, repr=False)


class Refresher:
    """Keeps the current root of each unit, and refreshes it by the policy.

    The optimizer's thread calls it: in each step and for each unit `is_due`, then `submit` if it is
    due, and `current`. The first root of a unit is always computed in its step.

    A job that raises, or whose result is not finite, leaves the old root, and is retried with the
    factors of the next step. The age bound of a unit whose jobs fail is `every` steps higher; past
    it `current` raises, or returns None with `on_bound="graft-only"`.

    Args:
        policy: One of the three policies.
        units: Number of units.
        publish: Called by the optimizer's thread with each applied root; the refresher then keeps
            only its version and step. For values in a `Store`.
        has_peers: Whether other ranks must apply roots in the same steps; None: determined at the
            first job by the default process group, or sharing.

    Attributes:
        policy: The refresh policy.
        stats: The counters.
        share: Shares the work among ranks: called for each job with unit, step, the job, and a
            function that runs it here; returns the future of its result. None: each rank computes
            all.
        recorder: Gets a span for each job, `"root"`, and for each wait, `"wait for root"`.
    """

    def __init__(
        self,
        policy: Policy,
        units: int,
        publish: Callable[[int, Root], None] | None = None,
        *,
        has_peers: bool | None = None,
    ) -> None:
        self.policy = policy
        self.share: Share | None = None
        self.recorder: Recorder | None = None
        self.stats = RefreshStats()
        self._units = [_Unit() for _ in range(units)]
        self._publish = publish
        is_late = isinstance(policy, Background) and policy.max_staleness > 0
        self._staleness = policy.max_staleness if is_late else 0
        self._bound = policy.every - 1 + self._staleness
        self._executor: Executor | _Workers | None = None
        self._is_fixed: bool | None = False
        if isinstance(policy, Background) and is_late:
            self._executor = policy.executor or _Workers(policy.workers)
            self._is_fixed = has_peers if policy.fixed_delay is None else policy.fixed_delay
            if isinstance(policy.executor, Deterministic):
                self._is_fixed = False
            self._check_fixed()
        self._spread = 1 if isinstance(policy, Synchronous) else policy.every
        if isinstance(policy, Background) and not is_late:
            self._spread = 1

    def grow(self, units: int) -> None:
        """Add units up to a total number; existing ones are unchanged."""
        self._units += [_Unit() for _ in range(units - len(self._units))]

    def is_due(self, unit: int, step: int) -> bool:
        """Whether the unit's root is due from the factors of this step.

        It is due in the unit's first step, in its phase of each window, after a failed job, and
        after skipped steps; never while a job is running. So a step that raised can be repeated.
        """
        held = self._units[unit]
        self._take_up(unit, step)
        if held.job is not None:
            return False
        last = held.submitted
        if held.root is None or held.failures or step - held.root.step > self._bound:
            return True
        return step >= last + 1 + (unit % self._spread - last - 1) % self.policy.every

    def submit(self, unit: int, step: int, compute: Compute) -> None:
        """Submit a unit's root: compute it here, or by a worker.

        Args:
            unit: Index of the unit.
            step: The current step.
            compute: Returns the new tensors; it must hold a snapshot, because it may run while
                later steps change the factors.

        Raises:
            GossipError: It failed, and the unit has no root yet.
        """
        held = self._units[unit]
        held.job = self._start(unit, step, compute, has_root=held.root is not None)
        held.submitted = step
        self._take_up(unit, step)
        if held.root is None:
            raise self._no_root(unit) from held.error

    def current(self, unit: int, step: int) -> Root | None:
        """Return the root to use in this step; None: make the step without one.

        Raises:
            GossipError: At the age bound with `on_bound="block"` the worker has not finished in
                `timeout_seconds`; or all jobs since have failed. Factors and weights are unchanged;
                a later step retries.
        """
        held, policy = self._units[unit], self.policy
        self._take_up(unit, step)
        if self._is_too_old(held, step) and held.job is not None:
            self._wait_or_compute(unit)
        if held.root is None or self._is_too_old(held, step):
            if isinstance(policy, Background) and policy.on_bound == "graft-only":
                self.stats.graft_only += 1
                return None
            raise self._no_root(unit) from held.error
        self.stats.oldest = max(self.stats.oldest, step - held.root.step)
        return held.root

    def drain(self) -> None:
        """Wait until all jobs are done; roots are still applied at their own time.

        Raises:
            GossipError: A worker has not finished in `timeout_seconds`.
        """
        seconds = self.policy.timeout_seconds if isinstance(self.policy, Background) else 0.0
        for unit, held in enumerate(self._units):
            if held.job is not None and self._await(unit, seconds) is not None:
                self._finish(unit)  # it failed

    def state_dict(self) -> dict[str, Any]:
        """Return versions and steps, -1 without a root, after `drain()`; without values."""
        self.drain()
        roots = [held.root for held in self._units]
        return {
            "versions": [-1 if root is None else root.version for root in roots],
            "steps": [-1 if root is None else root.step for root in roots],
            "submitted": [held.submitted for held in self._units],
            "failures": [held.failures for held in self._units],
        }

    def pending(self, unit: int) -> Value | None:
        """Return the unit's computed root that no step has applied yet, after `drain()`."""
        job = self._units[unit].job
        return None if job is None else job.future.result()

    def load_state_dict(
        self,
        state: dict[str, Any],
        values: Sequence[Value] | None = None,
        pending: Sequence[Value | None] = (),
    ) -> None:
        """Load versions and steps, and values, one tuple per unit, if they are not published.

        Args:
            state: The result of `state_dict()`.
            values: Values of the roots; None: they are published.
            pending: The result of `pending()` for each unit.

        Raises:
            ValueError: It has another number of units.
        """
        if len(state["versions"]) != len(self._units):
            raise ValueError(
                f"the state has {len(state['versions'])} units and the optimizer has "
                f"{len(self._units)}: load it into the same model with the same settings"
            )
        values = [()] * len(self._units) if values is None else values
        columns = (state[name] for name in ("versions", "steps", "submitted", "failures"))
        for unit, (version, step, submitted, failures) in enumerate(zip(*columns, strict=True)):
            root = None if version < 0 else Root(version, step, values[unit])
            self._units[unit] = _Unit(root, None, submitted, failures)
        for unit, value in enumerate(pending):
            if value is not None:
                compute, step = partial(tuple, value), self._units[unit].submitted
                job = _Job(step, self._earliest(unit, step), compute, _run_here(compute))
                self._units[unit].job = job

    def close(self) -> None:
        """End the refresher's own workers; their results are dropped. May be called twice."""
        for held in self._units:
            if held.job is not None:
                held.job.future.cancel()
                held.job = None
        if isinstance(self._executor, _Workers):
            self._executor.close()

    def _start(self, unit: int, step: int, compute: Compute, *, has_root: bool) -> _Job:
        is_here = self._executor is None or not has_root
        run = _run_here if is_here else self._run_by_executor
        if self.recorder is not None:
            compute = partial(_recorded, self.recorder, compute, unit, step)
        share = self.share
        future = run(compute) if share is None else share(unit, step, compute, run)
        if is_here:
            wait([future])
        return _Job(step, step if is_here else self._earliest(unit, step), compute, future)

    def _earliest(self, unit: int, step: int) -> int:
        """Return the step in which the root of a job of this step may be applied."""
        if isinstance(self._executor, Deterministic):
            return step + self._executor.delay(unit, step)
        if self._is_fixed is None:
            self._is_fixed = has_peers() or self.share is not None
            self._check_fixed()
        return step + self._staleness if self._is_fixed else step

    def _run_by_executor(self, compute: Compute) -> Future[Value]:
        assert self._executor is not None
        try:
            return self._executor.submit(_checked, compute)
        except RuntimeError as error:  # the executor is broken or shut down
            future: Future[Value] = Future()
            future.set_exception(error)
            return future

    def _check_fixed(self) -> None:
        policy = self.policy
        if self._is_fixed and isinstance(policy, Background) and policy.on_bound == "graft-only":
            raise ValueError(
                "on_bound='graft-only' depends on the speed of a rank, and replicas that must be "
                "equal would drift apart: use 'block' or 'synchronous', or fixed_delay=False if "
                "they need not be"
            )

    def _take_up(self, unit: int, step: int) -> None:
        """Publish the root of a finished job at its time; wait for a fixed delay."""
        job = self._units[unit].job
        if job is None or step < job.earliest:
            return
        if job.future.done():
            self._finish(unit)
        elif self._is_fixed:
            self._wait_or_compute(unit)

    def _finish(self, unit: int) -> None:
        """Publish the root of a finished job, or count its failure."""
        held = self._units[unit]
        job, held.job = held.job, None
        assert job is not None
        error = job.future.exception()
        if error is not None:
            held.failures += 1
            held.error = error
            self.stats.failed += 1
            return
        version = 1 if held.root is None else held.root.version + 1
        root = Root(version, job.step, job.future.result())
        if self._publish is not None:
            self._publish(unit, root)
            root = Root(version, job.step, ())
        held.root, held.failures, held.error = root, 0, None
        self.stats.refreshes += 1

    def _await(self, unit: int, seconds: float) -> BaseException | None:
        """Wait for the job; return its error."""
        job = self._units[unit].job
        assert job is not None
        try:
            return job.future.exception(seconds)
        except FutureTimeoutError:
            raise GossipError(
                f"the root of unit {unit}, of step {job.step}, was not there after {seconds:g} s: "
                "its worker hangs or is too slow. Weights and factors are intact. Give more "
                "workers or a higher max_staleness, or on_bound='graft-only' to train on without"
            ) from None

    def _wait_or_compute(self, unit: int) -> None:
        """Finish the job now, as `on_bound` says."""
        job, policy = self._units[unit].job, self.policy
        assert job is not None
        assert isinstance(policy, Background)
        if policy.on_bound == "block":
            start = time.perf_counter()
            try:
                self._await(unit, policy.timeout_seconds)
            finally:
                end = time.perf_counter()
                self.stats.waits += 1
                self.stats.waited_seconds += end - start
                if self.recorder is not None:
                    self.recorder.span("wait for root", start, end, unit=unit, step=job.step)
            self._finish(unit)
        if policy.on_bound != "synchronous":
            return
        job.future.cancel()  # the same snapshot gives the same result as the worker's
        job.future = Future()  # complete even after Ctrl-C: the job has then failed
        _run(job.future, partial(_checked, job.compute))
        self.stats.synchronous += 1
        self._finish(unit)

    def _is_too_old(self, held: _Unit, step: int) -> bool:
        if held.root is None:
            return False
        grace = self.policy.every if held.failures else 0
        return step - held.root.step > self._bound + grace

    def _no_root(self, unit: int) -> GossipError:
        held = self._units[unit]
        if not held.failures:
            return GossipError(
                f"unit {unit} has no root that is young enough, and none was submitted"
            )
        return GossipError(
            f"the root of unit {unit} failed {held.failures} times in a row, the last time with: "
            f"{held.error}. Look for gradients that are not finite, or damping that is too little"
        )


class _Workers:
    """Threads that compute one job at a time, on one core each, at lower priority than training."""

    # Daemons that `close` or the end of the process joins for some seconds: a job that hangs must
    # not keep a process from ending.

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end, self._jobs, self._threads, os.getpid())

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self._finalizer.alive:
            raise RuntimeError("the optimizer was closed")
        if not self._threads:
            for number in range(self._count):
                thread = threading.Thread(
                    target=_work, args=(self._jobs,), name=f"gossipgrad-roots-{number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._jobs.put((future, lambda: fn(*args)))
        return future

    def close(self) -> None:
        self._finalizer()


_CLOSE_SECONDS = 10.0
"""How long a running job may delay `close()`."""


def _end(jobs: "queue.SimpleQueue[Any]", threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:  # a forked child has none of the threads
        return
    with contextlib.suppress(queue.Empty):
        while True:
            jobs.get_nowait()
    for _ in threads:
        jobs.put(None)
    deadline = time.monotonic() + _CLOSE_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(jobs: "queue.SimpleQueue[Any]") -> None:
    torch.set_num_threads(1)  # for this thread only
    with contextlib.suppress(OSError, AttributeError):
        thread = threading.get_native_id()  # on Linux each thread has its own priority
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 5)
    while (job := jobs.get()) is not None:
        _run(*job)
        del job


def _run_here(compute: Compute) -> Future[Value]:
    future: Future[Value] = Future()
    _run(future, lambda: _checked(compute))
    return future


def _run(future: Future[Any], compute: Callable[[], Any]) -> None:
    """Run it and complete the future, unless that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = compute()
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # the thread continues, and the step gets the error
        future.set_exception(error)
        if threading.current_thread() is threading.main_thread():
            raise
    else:
        future.set_result(result)


def _recorded(recorder: Recorder, compute: Compute, unit: int, step: int) -> Value:
    start = time.perf_counter()
    try:
        return compute()
    finally:
        recorder.span("root", start, time.perf_counter(), unit=unit, step=step)


@torch.no_grad()
def _checked(compute: Compute) -> tuple[Tensor, ...]:
    """Its result, if finite; contiguous, so that products equal those of a copy bit for bit."""
    value = tuple(tensor.contiguous() for tensor in compute())
    for tensor in value:
        if not bool(tensor.isfinite().all()):
            raise ArithmeticError("the root is not finite")
    return value


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
