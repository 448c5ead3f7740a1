"""The measurements of a probe: chains of exchanges and of all-reduces, copying and mixing."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import Channel, Group, Outcome
from gossipgrad.errors import GossipError
from gossipgrad.topology import complete

__all__ = ["Exchanges", "Measured", "measure_all_reduce", "measure_memory"]

_MEMORY_BYTES = 32 << 20  # past any cache of a core
_MEMORY_REPEATS = 5
_FIRST_CHAIN, _LONGEST_CHAIN = 3, 16
_CHAINS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: what was measured, with how many bytes, and the median of its seconds.

    Attributes:
        what: `"exchange"` or `"all_reduce"`.
        ranks: The pair, or all.
        size_bytes: Of one message, or of the tensor that is reduced.
        seconds: Of one exchange, or one all-reduce.
    """

    what: str
    ranks: tuple[int, ...]
    size_bytes: int
    seconds: float


class Exchanges:
    """Chains of exchanges with one partner after another; rounds count on for all of them."""

    def __init__(self, group: Group, channel: Channel, timeout_seconds: float) -> None:
        self._group = group
        self._channel = channel
        self._timeout_seconds = timeout_seconds
        self._flats = [torch.zeros(part.numel, dtype=part.dtype) for part in channel.plan]
        self._round = 0

    def measure(self, sizes_bytes: tuple[int, ...], budget_seconds: float) -> list[Measured]:
        """The median of a few chains for each partner and size, as long as there is time."""
        schedule = complete(self._group.world_size, rotate=False)
        deadline = time.perf_counter() + budget_seconds
        found: list[Measured] = []
        for turn in range(schedule.period):
            partner = schedule.peers(turn, self._group.rank).send_to
            # All leave a share of the time to the partners to come, but meet the first two sizes.
            until = time.perf_counter() + (deadline - time.perf_counter()) / (
                schedule.period - turn
            )
            slowest: list[tuple[int, float]] = []
            for place, size in enumerate(sizes_bytes):
                length = self._chain_length(_expected(slowest, size), until)
                if place >= 2 and length == 0:
                    break
                length = max(1, length)
                mine = 0.0
                if partner is None:
                    self._round += _CHAINS * (1 + length)  # rounds count alike on all ranks
                else:
                    mine = median(self._chain(partner, place + 1, length) for _ in range(_CHAINS))
                    pair = min(partner, self._group.rank), max(partner, self._group.rank)
                    found.append(Measured("exchange", pair, size, mine))
                slowest.append((size, max(self._group.all_gather_object(mine))))
            if not self._all_have_time(deadline):
                break
        return found

    def _chain_length(self, expected_seconds: float | None, until: float) -> int:
        """How many exchanges of so many seconds fit, the same on all ranks; 0 for none."""
        if expected_seconds is None:
            return _FIRST_CHAIN
        left = max(self._group.all_gather_object(until - time.perf_counter()))
        return _fitting(expected_seconds, left)

    def _all_have_time(self, deadline: float) -> bool:
        return max(self._group.all_gather_object(deadline - time.perf_counter())) > 0

    def _chain(self, partner: int, bucket: int, length: int) -> float:
        """Seconds of one exchange in a chain, after a short one in which the two meet."""
        self._exchange(partner, 0)
        start = time.perf_counter()
        for _ in range(length):
            self._exchange(partner, bucket)
        return (time.perf_counter() - start) / length

    def _exchange(self, partner: int, bucket: int) -> None:
        exchange = self._channel.post(
            self._round, bucket, self._flats[bucket], send_to=partner, recv_from=partner
        )
        self._round += 1
        outcome = self._channel.take(exchange, self._timeout_seconds)
        if outcome is Outcome.LATE:
            raise GossipError(
                f"rank {partner} did not answer rank {self._group.rank} within "
                f"{self._timeout_seconds:g} s: is it running, and can messages reach it? A slow "
                "link needs a longer timeout_seconds"
            )
        if outcome is not Outcome.DELIVERED:
            raise GossipError(f"rank {partner} has died or left while it was measured")
        exchange.received = None


def measure_all_reduce(
    group: Group, sizes_bytes: tuple[int, ...], budget_seconds: float, timeout_seconds: float
) -> list[Measured]:
    """All-reduces over Gloo one after another, as DistributedDataParallel has them."""
    prefix = dist.PrefixStore(f"probe/{group.broadcast_object(secrets.token_hex(8))}", group.store)
    # Rings of tens of seconds are ordinary on slow links: the timeout is for one of their hops.
    timeout = timedelta(seconds=timeout_seconds * group.world_size)
    found: list[Measured] = []
    everyone = tuple(range(group.world_size))
    deadline = time.perf_counter() + budget_seconds
    try:
        gloo: Any = dist.ProcessGroupGloo(prefix, group.rank, group.world_size, timeout)
        slowest: list[tuple[int, float]] = []
        for place, size in enumerate(sizes_bytes):
            expected = _expected(slowest, size)
            left = max(group.all_gather_object(deadline - time.perf_counter()))
            length = _FIRST_CHAIN if expected is None else _fitting(expected, left)
            if place >= 2 and length == 0:
                break
            length = max(1, length)
            flat = torch.zeros(size // 4)
            times = []
            for _ in range(_CHAINS + 1):  # the first makes connections
                gloo.allreduce([torch.zeros(1)]).wait()
                start = time.perf_counter()
                for _ in range(length):
                    gloo.allreduce([flat]).wait()
                times.append((time.perf_counter() - start) / length)
            seconds = median(group.all_gather_object(median(times[1:])))
            found.append(Measured("all_reduce", everyone, size, seconds))
            slowest.append((size, seconds))
    except RuntimeError as error:
        if isinstance(error, GossipError):
            raise
        raise GossipError(
            f"an all-reduce did not come about: a rank is late, has died or left "
            f"({first_line(error)})"
        ) from error
    return found


def _expected(slowest: list[tuple[int, float]], size_bytes: int) -> float | None:
    """What the next size will take, by the line through the last two; None before any."""
    if not slowest:
        return None
    (earlier, before), (latest, seconds) = (
        slowest[-2] if len(slowest) > 1 else (0, 0.0),
        slowest[-1],
    )
    slope = max(0.0, (seconds - before) / (latest - earlier))
    return seconds + slope * (size_bytes - latest)


def _fitting(expected_seconds: float, left_seconds: float) -> int:
    """The length of chains for which a quarter of the time is enough; 0 if none fits at all."""
    if expected_seconds * _CHAINS > left_seconds:
        return 0
    fitting = int(left_seconds / 4 / _CHAINS / max(expected_seconds, 1e-6))
    return max(1, min(_LONGEST_CHAIN, fitting))


def measure_memory() -> tuple[float, float]:
    """Seconds a byte of copying a snapshot, and of mixing in what was received."""
    live, snapshot, received = (torch.zeros(_MEMORY_BYTES // 4) for _ in range(3))

    def copy() -> None:
        torch._foreach_copy_([snapshot], [live])

    def mix() -> None:
        delta = received - snapshot
        torch.dot(delta, delta)
        torch._foreach_add_([live], [delta], alpha=0.5)

    return _seconds(copy) / _MEMORY_BYTES, _seconds(mix) / _MEMORY_BYTES


def _seconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_MEMORY_REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[1:])
