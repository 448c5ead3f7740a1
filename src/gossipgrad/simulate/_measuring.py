"""The measurements of a probe: chains of exchanges and of all-reduces, copying and mixing."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import Channel, Group, Outcome
from gossipgrad.errors import GossipError
from gossipgrad.topology import complete

from ._fitting import tells

__all__ = ["Exchanges", "Measured", "measure_all_reduce", "measure_memory"]

_MEMORY_BYTES = 32 << 20  # past any cache of a core
_MEMORY_REPEATS = 5
_FIRST_CHAIN, _LONGEST_CHAIN = 3, 16
_CHAINS = 3
_FIRST_PARTNERS = 2
_SHARE_OF_FIRST = 0.6  # of the time, where there are others


class _Chains(NamedTuple):
    """How many chains, and of how many exchanges; no chains where not one exchange fits."""

    count: int
    length: int


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
        self._found: list[Measured] = []
        self._usual: list[tuple[int, float]] = []  # of the pairs at each size: the median
        self._slowest: list[tuple[int, float]] = []  # and the longest

    def measure(self, sizes_bytes: tuple[int, ...], budget_seconds: float) -> list[Measured]:
        """The median of a few chains for partners and sizes, as long as there is time.

        First all sizes with a few partners, past their share of the time if no size tells a rate
        before. Each further partner then gets the smallest size and the largest that tells a rate
        and for which there is time with all of them.
        """
        schedule = complete(self._group.world_size, rotate=False)
        met = [schedule.peers(n, self._group.rank).send_to for n in range(schedule.period)]
        first, others = met[:_FIRST_PARTNERS], met[_FIRST_PARTNERS:]
        start = time.perf_counter()
        deadline = start + budget_seconds
        until = start + budget_seconds * (_SHARE_OF_FIRST if others else 1.0)
        self._found, self._usual, self._slowest = [], [], []
        for place, size in enumerate(sizes_bytes):
            enough = place >= 2 and tells(self._usual)
            left = self._left(until if enough else deadline) / len(first)
            expected = _expected(self._slowest, size)
            chains = _fitting(expected, left)
            late = expected is not None and expected > self._timeout_seconds / 2
            if place >= 2 and (late or chains.count == 0):
                break
            seconds = [one for partner in first for one in self._meet(partner, place, size, chains)]
            self._usual.append((size, median(seconds)))
            self._slowest.append((size, max(seconds)))
        self._meet_others(others, deadline)
        return self._found

    def _meet_others(self, partners: list[int | None], deadline: float) -> None:
        if not partners:
            return
        long_enough = [n for n in range(1, len(self._usual)) if tells(self._usual[: n + 1])]
        left = self._left(deadline) / len(partners)
        fitting = [n for n in long_enough if self._slowest[n][1] * _CHAINS <= left]
        largest = max(fitting, default=min(long_enough, default=len(self._usual) - 1))
        for turn, partner in enumerate(partners):
            left = self._left(deadline)
            if left <= 0:
                return
            for place in (0, largest):
                size, expected = self._slowest[place]
                self._meet(partner, place, size, _fitting(expected, left / (len(partners) - turn)))

    def _left(self, until: float) -> float:
        """Seconds until then, the same on all ranks."""
        return max(self._group.all_gather_object(until - time.perf_counter()))

    def _meet(self, partner: int | None, place: int, size: int, chains: _Chains) -> list[float]:
        """One turn of all ranks at one size: what an exchange took each that had a partner."""
        count, length = max(1, chains.count), max(1, chains.length)
        mine = None
        if partner is None:
            self._round += count * (1 + length)  # rounds count alike on all ranks
        else:
            mine = median(self._chain(partner, place + 1, length) for _ in range(count))
            pair = min(partner, self._group.rank), max(partner, self._group.rank)
            self._found.append(Measured("exchange", pair, size, mine))
        return [one for one in self._group.all_gather_object(mine) if one is not None]

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
        flat = torch.zeros(sizes_bytes[0] // 4)
        gloo.allreduce([flat]).wait()  # makes connections
        start = time.perf_counter()
        gloo.allreduce([flat]).wait()
        first = max(group.all_gather_object(time.perf_counter() - start))
        slowest: list[tuple[int, float]] = []
        for place, size in enumerate(sizes_bytes):
            left = max(group.all_gather_object(deadline - time.perf_counter()))
            chains = _fitting(_expected(slowest, size) if slowest else first, left)
            if place >= 2 and chains.count == 0:
                break
            length = max(1, chains.length)
            flat = torch.zeros(size // 4)
            times = []
            for _ in range(max(1, chains.count)):
                gloo.allreduce([torch.zeros(1)]).wait()
                start = time.perf_counter()
                for _ in range(length):
                    gloo.allreduce([flat]).wait()
                times.append((time.perf_counter() - start) / length)
            seconds = median(group.all_gather_object(median(times)))
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


def _fitting(expected_seconds: float | None, left_seconds: float) -> _Chains:
    """Chains for which a quarter of the time is enough; where it is short, fewer of one link."""
    if expected_seconds is None:
        return _Chains(_CHAINS, _FIRST_CHAIN)
    expected_seconds = max(expected_seconds, 1e-6)
    count = min(_CHAINS, max(0, int(left_seconds / expected_seconds)))
    length = int(left_seconds / 4 / _CHAINS / expected_seconds)
    return _Chains(count, max(1, min(_LONGEST_CHAIN, length)))


def measure_memory() -> tuple[float, float]:
    """Seconds a byte of copying a snapshot, and of mixing in what was received."""
    live, snapshot, received = (torch.zeros(_MEMORY_BYTES // 4) for _ in range(3))

    def copy() -> None:
        torch._foreach_copy_([snapshot], [live])

    def mix() -> None:
        delta = received - snapshot
        torch.dot(delta, delta)
        torch._foreach_add_([live], [delta], alpha=0.5)

    # In turns: what else the machine does meanwhile counts for both alike.
    copying, mixing = _seconds(copy, mix)
    return copying / _MEMORY_BYTES, mixing / _MEMORY_BYTES


def _seconds(*works: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(_MEMORY_REPEATS + 1):
        row = []
        for work in works:
            start = time.perf_counter()
            work()
            row.append(time.perf_counter() - start)
        times.append(row)
    return [median(column) for column in zip(*times[1:], strict=True)]
