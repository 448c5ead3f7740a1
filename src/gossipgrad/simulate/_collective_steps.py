"""When steps end with all-reduce, in every step or every so many, and without any."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ._dealing import by_layer, by_size
from ._setting import Setting, Steps, Strategy, check_counts, together
from ._workers import Pace

__all__ = ["AllReduce", "Local", "PeriodicAverage"]

Times = Float[np.ndarray, " rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(Strategy):
    """Gradients all-reduced in every step, behind the backward pass.

    An all-reduce begins when the last rank has its gradients and fewer than `at_once` are under
    way. Their start-ups pass side by side, their bytes one after another: each takes the links for
    as long as its bytes need. The update waits for the last.

    Attributes:
        buckets: `"size"` as DistributedDataParallel deals them, or `"layer"`, one a module, as
            strategy agd does.
        bucket_bytes: Where a bucket is full; not used with layers.
        first_bucket_bytes: Where the first one is; None: as the others, which is what
            DistributedDataParallel does when it is given a `bucket_cap_mb`.
        element_bytes: Of an element on the wire; None: as in the profile.
        at_once: All-reduces that are under way at once: torch's Gloo has two threads for them.
    """

    name: str = "allreduce"
    buckets: str = "size"
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int | None = 1 << 20
    element_bytes: int | None = None
    at_once: int = 2

    def __post_init__(self) -> None:
        if self.buckets not in ("size", "layer"):
            raise ValueError(f"no buckets by {self.buckets!r}: choose size or layer")
        check_counts(self, "bucket_bytes", "first_bucket_bytes", "element_bytes", "at_once")

    def begin(self, setting: Setting) -> "AllReduceSteps":
        """See `Strategy.begin`."""
        return AllReduceSteps(self, setting)


class AllReduceSteps(Steps):
    """See `AllReduce`."""

    def __init__(self, options: AllReduce, setting: Setting) -> None:
        super().__init__()
        profile, p = setting.profile, setting.world_size
        self._profile = profile
        if options.buckets == "layer":
            dealt = by_layer(profile)
        else:
            # DistributedDataParallel deals by the size of the gradients, whatever travels.
            sizes = [count * profile.element_bytes for count in profile.elements]
            dealt = by_size(sizes, options.bucket_bytes, options.first_bucket_bytes)
        width = options.element_bytes or profile.element_bytes
        done = profile.forward_seconds + np.cumsum(profile.backward_seconds)
        self._backward_seconds = float(done[-1])
        self._ready_seconds = [float(done[places[-1]]) for places in dealt]
        sizes = [width * sum(profile.elements[place] for place in places) for places in dealt]
        network = setting.network
        self._seconds = [network.all_reduce_seconds(size, p) for size in sizes]
        # A measured start-up may hide bytes: they take the link for as long as it needs for them.
        start_up = network.all_reduce_seconds(0, p)
        wire = network.exchange.beta_seconds_per_byte
        self._moving_seconds = [
            min(seconds, max(seconds - start_up, wire * setting.ring_bytes(size)))
            for size, seconds in zip(sizes, self._seconds, strict=True)
        ]
        self._at_once = options.at_once
        self._step_bytes = setting.ring_bytes(sum(sizes))
        self._alone = p == 1

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        # When the last so many are through; each ends later than the one before.
        ends = deque([-math.inf] * self._at_once, maxlen=self._at_once)
        if not self._alone:
            for ready, seconds, moving in zip(
                self._ready_seconds, self._seconds, self._moving_seconds, strict=True
            ):
                begin = max(float(pace.after(start, ready).max()), ends[0])
                ends.append(max(begin + seconds, ends[-1] + moving))
        self.bytes_sent += self._step_bytes
        backward = pace.after(start, self._backward_seconds)
        return np.maximum(backward, ends[-1]) + self._profile.optimizer_seconds * pace.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicAverage(Strategy):
    """Local steps, and every so many of them all replicas become their exact average.

    The ranks meet after the update, and the average hides behind nothing.

    Attributes:
        every: Steps between averages; `"log_p"` for `ceil(log2 p)`.
        state_copies: Tensors of optimizer state averaged with each parameter; None: as many as in
            the profile.
        bucket_bytes: Of one all-reduce.
    """

    name: str = "post-local-sgd"
    every: int | str = 16
    state_copies: int | None = 0
    bucket_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if isinstance(self.every, str):
            if self.every != "log_p":
                raise ValueError(f"every is {self.every!r}: give a number of steps, or 'log_p'")
        else:
            check_counts(self, "every")
        check_counts(self, "state_copies", least=0)
        check_counts(self, "bucket_bytes")

    def begin(self, setting: Setting) -> "PeriodicAverageSteps":
        """See `Strategy.begin`."""
        return PeriodicAverageSteps(self, setting)


class PeriodicAverageSteps(Steps):
    """See `PeriodicAverage`."""

    def __init__(self, options: PeriodicAverage, setting: Setting) -> None:
        super().__init__()
        profile, p = setting.profile, setting.world_size
        self._compute_seconds = profile.compute_seconds
        if isinstance(options.every, str):
            self.cycle = max(1, (p - 1).bit_length())
        else:
            self.cycle = options.every
        sizes = [count * profile.element_bytes for count in profile.elements]
        dealt = by_size(sizes, options.bucket_bytes)
        buckets = [float(sum(sizes[place] for place in places)) for places in dealt]
        given = options.state_copies
        buckets *= 1 + (profile.state_copies if given is None else given)
        self._average_seconds = setting.average_seconds(buckets)
        self._average_bytes = setting.ring_bytes(sum(buckets))

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        end = pace.after(start, self._compute_seconds)
        if (number + 1) % self.cycle == 0:
            end = together(end, self._average_seconds)
            self.bytes_sent += self._average_bytes
        return end


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Strategy):
    """No communication: the ceiling of all others."""

    name: str = "local"

    def begin(self, setting: Setting) -> "LocalSteps":
        """See `Strategy.begin`."""
        return LocalSteps(setting)


class LocalSteps(Steps):
    """See `Local`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._seconds = setting.profile.compute_seconds

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        return pace.after(start, self._seconds)
