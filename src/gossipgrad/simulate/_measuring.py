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

from gossipgrad._messages import first_line
from gossipgrad.comm import Channel, Group, Outcome
from gossipgrad.errors import GossipError
from gossipgrad.topology import complete

from ._fitting import shows_rate

__all__ = ["Exchanges", "Measured", "measure_all_reduce", "measure_memory"]

_MEMORY_BYTES = 32 << 20  # larger than any cache of a core
_MEMORY_REPEATS = 5
_FIRST_CHAIN, _LONGEST_CHAIN = 3, 16
_CHAINS = 3
_FIRST_PARTNERS = 2
_SHARE_OF_FIRST = 0.6  # of the time, where there are others

Points = list[tuple[int, float]]


class _Chains(NamedTuple):
    """How many chains, and of how many messages; no chains where there is no time for one."""

    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: the median time of a message between some ranks.

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
    """Chains of exchanges with one partner after another, in rounds of one sequence."""

    def __init__(self, group: Group, channel: Channel, timeout_seconds: float) -> None:
        self._group = group
        self._channel = channel
        self._timeout_seconds = timeout_seconds
        self._flats = [torch.zeros(part.numel, dtype=part.dtype) for part in channel.plan]
        self._round = 0

    def measure(self, sizes_bytes: tuple[int, ...], budget_seconds: float) -> list[Measured]:
        """The median of a few chains for partners and sizes, as long as there is time.

        First all sizes with a few partners, longer than their share of the time until a size shows
        a rate. Each further partner then gets the smallest size and the largest that shows a rate
        and for which there is time with all of them.
        """
        group, found = self._group, list[Measured]()
        schedule = complete(group.world_size, rotate=False)
        partners = [schedule.peers(n, group.rank).send_to for n in range(schedule.period)]
        first, others = partners[:_FIRST_PARTNERS], partners[_FIRST_PARTNERS:]
        start = time.perf_counter()
        deadline = start + budget_seconds
        until = start + budget_seconds * (_SHARE_OF_FIRST if others else 1.0)
        usual, slowest = Points(), Points()  # of the pairs at each size
        for index, size in enumerate(sizes_bytes):
            is_known = index >= 2 and shows_rate(usual)
            left = _seconds_left(group, until if is_known else deadline) / len(first)
            expected = _expected_seconds(slowest, size)
            chains = _chains_within(expected, left)
            is_late = expected is not None and expected > self._timeout_seconds / 2
            if index >= 2 and (is_late or chains.count == 0):
                break
            turns = [self._exchange_with(p, index, size, chains, found) for p in first]
            seconds = [each for turn in turns for each in turn]
            usual.append((size, median(seconds)))
            slowest.append((size, max(seconds)))
        self._measure_others(others, deadline, usual, slowest, found)
        return found

    def _measure_others(
        self,
        partners: list[int | None],
        deadline: float,
        usual: Points,
        slowest: Points,
        found: list[Measured],
    ) -> None:
        if not partners:
            return
        long_enough = [n for n in range(1, len(usual)) if shows_rate(usual[: n + 1])]
        left = _seconds_left(self._group, deadline) / len(partners)
        affordable = [n for n in long_enough if slowest[n][1] * _CHAINS <= left]
        largest = max(affordable, default=min(long_enough, default=len(usual) - 1))
        for turn, partner in enumerate(partners):
            left = _seconds_left(self._group, deadline)
            if left <= 0:
                return
            for index in (0, largest):
                size, expected = slowest[index]
                chains = _chains_within(expected, left / (len(partners) - turn))
                self._exchange_with(partner, index, size, chains, found)

    def _exchange_with(
        self, partner: int | None, index: int, size: int, chains: _Chains, found: list[Measured]
    ) -> list[float]:
        """One size between all pairs at once; the seconds of an exchange, of ranks with a partner.

        Rounds are counted alike on all ranks.
        """
        count, length = max(1, chains.count), max(1, chains.length)
        mine = None
        if partner is None:
            self._round += count * (1 + length)
        else:
            mine = median(self._chain(partner, index + 1, length) for _ in range(count))
            pair = min(partner, self._group.rank), max(partner, self._group.rank)
            found.append(Measured("exchange", pair, size, mine))
        return [each for each in self._group.all_gather_object(mine) if each is not None]

    def _chain(self, partner: int, bucket: int, length: int) -> float:
        """Seconds of one exchange in a chain, after a short one that synchronizes the two."""
        self._exchange(partner, 0)
        return _seconds_each(lambda: self._exchange(partner, bucket), length)

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
    ranks, found, slowest = tuple(range(group.world_size)), list[Measured](), Points()
    deadline = time.perf_counter() + budget_seconds
    try:
        gloo: Any = dist.ProcessGroupGloo(prefix, group.rank, group.world_size, timeout)

        def reduce(flat: torch.Tensor) -> None:
            gloo.allreduce([flat]).wait()

        smallest = torch.zeros(sizes_bytes[0] // 4)
        reduce(smallest)  # makes connections
        first = max(group.all_gather_object(_seconds_each(lambda: reduce(smallest))))
        for index, size in enumerate(sizes_bytes):
            expected = _expected_seconds(slowest, size) if slowest else first
            chains = _chains_within(expected, _seconds_left(group, deadline))
            if index >= 2 and chains.count == 0:
                break
            flat, times = torch.zeros(size // 4), []
            for _ in range(max(1, chains.count)):
                reduce(torch.zeros(1))  # synchronizes the ranks
                times.append(_seconds_each(lambda flat=flat: reduce(flat), max(1, chains.length)))
            seconds = median(group.all_gather_object(median(times)))
            found.append(Measured("all_reduce", ranks, size, seconds))
            slowest.append((size, seconds))
    except RuntimeError as error:
        if isinstance(error, GossipError):
            raise
        raise GossipError(
            f"an all-reduce failed: a rank is late, has died or left ({first_line(error)})"
        ) from error
    return found


def measure_memory() -> tuple[float, float]:
    """Seconds a byte of copying a snapshot, and of mixing in what was received."""
    live, snapshot, received = (torch.zeros(_MEMORY_BYTES // 4) for _ in range(3))

    def copy() -> None:
        torch._foreach_copy_([snapshot], [live])

    def mix() -> None:
        delta = received - snapshot
        torch.dot(delta, delta)
        torch._foreach_add_([live], [delta], alpha=0.5)

    # In turns: other work of the machine slows both alike.
    times = [(_seconds_each(copy), _seconds_each(mix)) for _ in range(_MEMORY_REPEATS + 1)]
    copying, mixing = (median(column) / _MEMORY_BYTES for column in zip(*times[1:], strict=True))
    return copying, mixing


def _seconds_each(work: Callable[[], None], count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def _seconds_left(group: Group, until: float) -> float:
    """The same on all ranks."""
    return max(group.all_gather_object(until - time.perf_counter()))


def _expected_seconds(slowest: Points, size_bytes: int) -> float | None:
    """Of the next size, by the line through the last two; None before any."""
    if not slowest:
        return None
    (earlier, before), (latest, seconds) = ((0, 0.0), *slowest)[-2:]
    slope = max(0.0, (seconds - before) / (latest - earlier))
    return seconds + slope * (size_bytes - latest)


def _chains_within(expected_seconds: float | None, left_seconds: float) -> _Chains:
    """Chains that take a quarter of the time; where it is short, fewer of one message."""
    if expected_seconds is None:
        return _Chains(_CHAINS, _FIRST_CHAIN)
    expected_seconds = max(expected_seconds, 1e-6)
    count = min(_CHAINS, max(0, int(left_seconds / expected_seconds)))
    length = int(left_seconds / 4 / _CHAINS / expected_seconds)
    return _Chains(count, max(1, min(_LONGEST_CHAIN, length)))
