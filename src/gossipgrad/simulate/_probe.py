"""Measuring a network between live workers, and the costs that follow."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import Channel, Group, Outcome, Part, TCPTransport, Transport
from gossipgrad.errors import GossipError
from gossipgrad.planning import AffineCost
from gossipgrad.topology import complete

from ._network import Network

__all__ = ["SIZES_BYTES", "Measured", "Probe", "check_sizes", "probe"]

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Of the messages that `probe` sends, by default."""

_CHAINS, _LONGEST_CHAIN = 3, 16
_SHARE_OF_EXCHANGES = 0.6  # of the time, all-reduce gets the rest
_OUTWEIGHS = 3  # start-ups in the largest message, below which its rate is a guess
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: the median time of a message between some ranks.

    Attributes:
        what: `"exchange"` or `"all-reduce"`.
        ranks: The pair, or all.
        size_bytes: Of one message, or of the tensor that is reduced.
        seconds: Of one exchange, or one all-reduce.
    """

    what: str
    ranks: tuple[int, ...]
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of `probe`, the same on all ranks.

    Attributes:
        network: Start-up and rate of the usual exchange, the median over pairs, and of a hop.
        all_reduce: Cost of an all-reduce over all ranks.
        pairs: Cost of an exchange of each pair that was measured.
        measured: The figures that were fitted.
    """

    network: Network
    all_reduce: AffineCost
    pairs: dict[tuple[int, int], AffineCost]
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """The network as `Network.from_json` reads it, and the figures beside it."""
        return self.network.to_json() | {
            "measured": [
                [one.what, list(one.ranks), one.size_bytes, one.seconds] for one in self.measured
            ]
        }

    def doubts(self) -> list[str]:
        """A sentence on each rate that the messages were too short to show."""
        costs = {"exchange": self.network.exchange, "all-reduce": self.all_reduce}
        doubts = []
        for what, cost in costs.items():
            size = max(one.size_bytes for one in self.measured if one.what == what)
            if cost(size) < _OUTWEIGHS * cost.alpha_seconds:
                doubts.append(
                    f"an {what} of {size:,} bytes, the largest that was measured, is mostly "
                    "start-up: the rate is a guess. Measure longer, or larger messages"
                )
        return doubts


def probe(
    group: Group,
    *,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    budget_seconds: float = 20.0,
    timeout_seconds: float = 30.0,
    transport: Callable[[Group], Transport] = TCPTransport,
    clock: Clock = time.perf_counter,
) -> Probe:
    """Measures the cost of exchanges and all-reduces between the workers of a group.

    A collective: all ranks call it alike. Pairs exchange equal messages as gossip does, all
    disjoint pairs at once, one partner after another until 0.6 of the time is over. The rest goes
    to ring all-reduces over Gloo. Each figure is the median of a few chains, in which an exchange
    begins when the one before it has arrived; sizes for which there is no time are left out.
    A start-up time and a time a byte are fitted to the medians. torch's default group is not used.

    When a worker is late by `timeout_seconds` or dies, this raises on the others, and so does
    every later collective of `group`.

    Args:
        group: The workers, at least two; only its collectives and its store are used.
        sizes_bytes: Of the messages, rising, each a multiple of 4, at least two.
        budget_seconds: Roughly how long to measure.
        timeout_seconds: How long to wait for one message.
        transport: Moves the messages of exchanges, as in `gossipgrad.gossip`.
        clock: Seconds that have passed, of this rank.

    Returns:
        The costs, equal on all ranks.

    Raises:
        ValueError: There is one worker, or the sizes or times are out of range.
        GossipError: A worker is late, or has died or left; the message names it where it is known.
    """
    if group.world_size < 2:
        raise ValueError(
            "one worker has no link to measure: start two or more (gossipgrad probe --nproc 4, or "
            "inside torchrun or Slurm)"
        )
    check_sizes(sizes_bytes)
    if not budget_seconds > 0 or not timeout_seconds > 0:
        raise ValueError(
            f"budget {budget_seconds} s and timeout {timeout_seconds} s must be above 0"
        )
    try:
        run = bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
        plan = [Part(torch.float32, 1), *(Part(torch.float32, size // 4) for size in sizes_bytes)]
        channel = Channel(transport(group), run=run, plan=plan)
        try:
            exchanges = _Exchanges(group, channel, timeout_seconds, clock)
            mine = exchanges.measure(sizes_bytes, budget_seconds * _SHARE_OF_EXCHANGES)
        finally:
            channel.close(0.5)
        left_seconds = budget_seconds * (1 - _SHARE_OF_EXCHANGES)
        reduces = _measure_all_reduce(group, sizes_bytes, left_seconds, timeout_seconds, clock)
        plain = [(one.ranks, one.size_bytes, one.seconds) for one in mine]
        gathered = [row for rows in group.all_gather_object(plain) for row in rows]
        return _fitted(group.world_size, gathered, reduces)
    except BaseException:
        group.close()  # the others must not wait for this one
        raise


def check_sizes(sizes_bytes: tuple[int, ...]) -> None:
    """Raises unless messages of these sizes can be sent and a cost be fitted to them."""
    if len(sizes_bytes) < 2 or list(sizes_bytes) != sorted(set(sizes_bytes)):
        raise ValueError(f"sizes {sizes_bytes} must rise, and be two or more")
    if any(size < 4 or size % 4 for size in sizes_bytes):
        raise ValueError(f"sizes {sizes_bytes} must be multiples of 4 bytes, above 0")


class _Exchanges:
    """Chains of exchanges with one partner after another, in rounds of one sequence."""

    def __init__(
        self, group: Group, channel: Channel, timeout_seconds: float, clock: Clock
    ) -> None:
        self._group = group
        self._channel = channel
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._flats = [torch.zeros(part.numel, dtype=part.dtype) for part in channel.plan]
        self._round = 0

    def measure(self, sizes_bytes: tuple[int, ...], budget_seconds: float) -> list[Measured]:
        """All sizes with one partner after another, as long as there is time."""
        group, found = self._group, list[Measured]()
        schedule, deadline = complete(group.world_size, rotate=False), self._clock()
        deadline += budget_seconds
        share = budget_seconds / schedule.period / len(sizes_bytes)
        for number in range(schedule.period):
            partner = schedule.peers(number, group.rank).send_to
            timer = _Timer(share)
            for index, size in enumerate(sizes_bytes):
                left = max(group.all_gather_object(deadline - self._clock()))
                if number and left <= 0:
                    return found
                if index >= 2 and timer.expected(size) * (1 + timer.length(size)) > left:
                    break
                length, mine = timer.length(size), None
                if partner is None:
                    self._round += _CHAINS * (1 + length)
                else:
                    chains = [self._chain(partner, index + 1, length) for _ in range(_CHAINS)]
                    mine = median(chains)
                    pair = min(partner, group.rank), max(partner, group.rank)
                    found.append(Measured("exchange", pair, size, mine))
                timer.took(size, max(group.all_gather_object(mine or 0.0)))
        return found

    def _chain(self, partner: int, bucket: int, length: int) -> float:
        """Seconds of one exchange in a chain, after a short one that synchronizes the two."""
        self._exchange(partner, 0)
        begun = self._clock()
        for _ in range(length):
            self._exchange(partner, bucket)
        return (self._clock() - begun) / length

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


class _Timer:
    """How many messages of a size fit into a share of the time, by the size before."""

    def __init__(self, share_seconds: float) -> None:
        self._share_seconds = share_seconds
        self._last: tuple[int, float] | None = None

    def took(self, size_bytes: int, seconds: float) -> None:
        """The slowest rank needed that long for a message of that size."""
        self._last = size_bytes, seconds

    def expected(self, size_bytes: int) -> float:
        """Seconds of a message at most: as the last one, were it all bytes."""
        return 0.0 if self._last is None else self._last[1] * size_bytes / self._last[0]

    def length(self, size_bytes: int) -> int:
        """Messages of a chain."""
        if self._last is None:
            return _CHAINS
        fit = self._share_seconds / _CHAINS / max(self.expected(size_bytes), 1e-6)
        return max(1, min(_LONGEST_CHAIN, int(fit)))


def _measure_all_reduce(
    group: Group,
    sizes_bytes: tuple[int, ...],
    budget_seconds: float,
    timeout_seconds: float,
    clock: Clock,
) -> list[Measured]:
    """All-reduces over Gloo one after another, as DistributedDataParallel has them."""
    prefix = dist.PrefixStore(f"probe/{group.broadcast_object(secrets.token_hex(8))}", group.store)
    # Rings of tens of seconds are ordinary on slow links: the timeout is for one of their hops.
    timeout = timedelta(seconds=timeout_seconds * group.world_size)
    ranks, found = tuple(range(group.world_size)), list[Measured]()
    deadline, timer = clock() + budget_seconds, _Timer(budget_seconds / len(sizes_bytes))
    try:
        gloo: Any = dist.ProcessGroupGloo(prefix, group.rank, group.world_size, timeout)
        gloo.allreduce([torch.zeros(1)]).wait()  # makes connections
        for index, size in enumerate(sizes_bytes):
            left = max(group.all_gather_object(deadline - clock()))
            if index >= 2 and timer.expected(size) * (1 + timer.length(size)) > left:
                break
            flat, times, length = torch.zeros(size // 4), list[float](), timer.length(size)
            for _ in range(_CHAINS):
                gloo.allreduce([torch.zeros(1)]).wait()  # synchronizes the ranks
                begun = clock()
                for _ in range(length):
                    gloo.allreduce([flat]).wait()
                times.append((clock() - begun) / length)
            seconds = median(group.all_gather_object(median(times)))
            found.append(Measured("all-reduce", ranks, size, seconds))
            timer.took(size, seconds)
    except RuntimeError as error:
        if isinstance(error, GossipError):
            raise
        raise GossipError(
            f"an all-reduce failed: a rank is late, has died or left ({first_line(error)})"
        ) from error
    return found


def _fitted(
    world_size: int, rows: Sequence[tuple[Sequence[int], int, float]], reduces: list[Measured]
) -> Probe:
    """The costs, of rows of a pair, bytes and seconds, and of the figures of all-reduces."""
    both_ends: dict[tuple[tuple[int, ...], int], list[float]] = {}
    for pair, size, seconds in rows:
        both_ends.setdefault((tuple(pair), size), []).append(seconds)
    exchanges = [
        Measured("exchange", pair, size, sum(of_ends) / len(of_ends))
        for (pair, size), of_ends in sorted(both_ends.items())
    ]
    by_pair: dict[tuple[int, int], list[Measured]] = {}
    for one in exchanges:
        by_pair.setdefault((one.ranks[0], one.ranks[1]), []).append(one)
    sizes = sorted({one.size_bytes for one in exchanges})
    usual = [
        # The median over pairs at each size, so that one bad link spoils nothing.
        median(one.seconds for one in exchanges if one.size_bytes == size)
        for size in sizes
    ]
    all_reduce = _fit(reduces)
    network = Network(
        exchange=AffineCost.fit(sizes, usual),
        hop=all_reduce.hop_of_ring(world_size),
        world_size=world_size,
    )
    pairs = {pair: _fit(of_pair) for pair, of_pair in by_pair.items() if len(of_pair) > 1}
    return Probe(network, all_reduce, pairs, (*exchanges, *reduces))


def _fit(measured: list[Measured]) -> AffineCost:
    return AffineCost.fit([m.size_bytes for m in measured], [m.seconds for m in measured])
