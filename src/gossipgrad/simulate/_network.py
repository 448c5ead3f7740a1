"""A network as the time model sees it: what a link costs, and what links share."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gossipgrad.planning import AffineCost, PiecewiseCost

__all__ = ["Network", "Racks", "shared_finish"]

Ranks = Int[np.ndarray, " flow"]
FlowTimes = Float[np.ndarray, " flow"]
_FORMAT = "gossipgrad network"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Racks:
    """Consecutive ranks behind one uplink.

    Attributes:
        size: Ranks in a rack; the last rack may have fewer.
        uplink_bits_per_second: Of the uplink, in each direction; all flows that leave the rack
            share it.
    """

    size: int
    uplink_bits_per_second: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a rack of {self.size} ranks: it must hold 1 or more")
        if not self.uplink_bits_per_second > 0:
            raise ValueError(
                f"uplink_bits_per_second is {self.uplink_bits_per_second}: give a rate above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What it costs to move bytes between ranks.

    Every host sends and receives at once, each at its own rate. `gossipgrad probe` measures one.

    Attributes:
        exchange: An exchange of equal messages with one partner, by the bytes of one of them.
        hop: One hop of a ring all-reduce, by its bytes; None: as `exchange`.
        all_reduce: A ring all-reduce over `world_size` ranks, as measured: replaces its hops at
            that number of ranks, where no link is slow or shared.
        collective: How all-reduce goes: `"ring"` as Gloo does it, or `"halving"` (recursive
            halving and doubling, with few start-ups), as good MPI libraries do it for many ranks.
        racks: Which ranks share an uplink; None: no links are shared.
        slow_hosts: How many times longer a byte takes on the links of these ranks.
        links: Costs of single pairs that differ from `exchange`; (a, b) stands for (b, a), too.
        snapshot_seconds_per_byte: Copying the payload, on the thread of the step.
        mix_seconds_per_byte: Mixing in what was received, on the thread of the step.
        world_size: How many ranks it was measured with; None if it was not.

    Raises:
        ValueError: A value is out of range, or `"halving"` is used with shared uplinks, which is
            not modelled.
    """

    exchange: AffineCost
    hop: AffineCost | None = None
    all_reduce: PiecewiseCost | None = None
    collective: str = "ring"
    racks: Racks | None = None
    slow_hosts: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], AffineCost] = field(default_factory=dict)
    snapshot_seconds_per_byte: float = 0.0
    mix_seconds_per_byte: float = 0.0
    world_size: int | None = None

    def __post_init__(self) -> None:
        if self.collective not in ("ring", "halving"):
            raise ValueError(f"no all-reduce {self.collective!r}: choose ring or halving")
        if self.collective == "halving" and self.racks is not None:
            raise ValueError(
                "all-reduce by halving over shared uplinks is not modelled: take collective='ring'"
            )
        for name in ("snapshot_seconds_per_byte", "mix_seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: it is finite, and 0 or more")
        for rank, factor in self.slow_hosts.items():
            if rank < 0 or not (math.isfinite(factor) and factor > 0):
                raise ValueError(
                    f"slow_hosts has {rank}: {factor}: give a rank, and a factor above 0"
                )
        if len({frozenset(pair) for pair in self.links}) < len(self.links):
            raise ValueError("links names a pair twice: (a, b) stands for (b, a), too")

    @property
    def bytes_per_second(self) -> float:
        """The rate of a plain link, in each direction."""
        beta = self.exchange.beta_seconds_per_byte
        return math.inf if beta == 0 else 1 / beta

    def link_costs(
        self, senders: Ranks, receivers: Ranks, base: AffineCost | None = None
    ) -> tuple[Float[np.ndarray, " flow"], Float[np.ndarray, " flow"]]:
        """Start-up time and time a byte of each flow that has its links to itself."""
        base = base or self.exchange
        alphas = np.full(senders.shape, base.alpha_seconds)
        betas = np.full(senders.shape, base.beta_seconds_per_byte)
        if self.links:
            costs = list(self.links.values())
            index, is_listed = self._find_links(senders, receivers)
            own = index[is_listed]
            alphas[is_listed] = np.array([cost.alpha_seconds for cost in costs])[own]
            betas[is_listed] = np.array([cost.beta_seconds_per_byte for cost in costs])[own]
        if self.slow_hosts:
            betas *= np.maximum(self._slowness(senders), self._slowness(receivers))
        return alphas, betas

    def all_reduce_seconds(self, size_bytes: float | int, world_size: int) -> float:
        """An all-reduce of all ranks, from when the last of them begins until all have the sum."""
        if world_size == 1:
            return 0.0
        as_measured = self.collective == "ring" and self.racks is None and not self.slow_hosts
        if self.all_reduce is not None and world_size == self.world_size and as_measured:
            largest = self.all_reduce.sizes[-1]
            # Past what was measured, where start-ups may have hidden bytes, a hop has its rate.
            hop = (self.hop or self.exchange).ring_all_reduce(world_size)
            past = hop.beta_seconds_per_byte * max(0.0, size_bytes - largest)
            within = self.all_reduce(min(size_bytes, largest))
            return max(self.all_reduce(size_bytes), within + past)
        if self.collective == "halving":
            alpha, beta = (float(each.max()) for each in self._ring_links(world_size))
            slowest = AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta)
            return slowest.halving_all_reduce(world_size)(size_bytes)
        return 2 * (world_size - 1) * self._slowest_hop_seconds(size_bytes / world_size, world_size)

    def all_gather_seconds(self, size_bytes: float | int, world_size: int) -> float:
        """A ring all-gather of `size_bytes` of each rank, from when the last of them begins."""
        if world_size == 1:
            return 0.0
        return (world_size - 1) * self._slowest_hop_seconds(size_bytes, world_size)

    def _slowest_hop_seconds(self, size_bytes: float | int, world_size: int) -> float:
        """The slowest link sets the pace of a ring: each hop waits for the one before."""
        alphas, betas = self._ring_links(world_size)
        return float((alphas + betas * size_bytes).max())

    def _ring_links(
        self, world_size: int
    ) -> tuple[Float[np.ndarray, " flow"], Float[np.ndarray, " flow"]]:
        ranks = np.arange(world_size)
        after = (ranks + 1) % world_size
        alphas, betas = self.link_costs(ranks, after, self.hop)
        if self.racks is not None:
            crossing = ranks // self.racks.size != after // self.racks.size
            uplink = 8 / self.racks.uplink_bits_per_second
            betas[crossing] = np.maximum(betas[crossing], uplink)
        return alphas, betas

    def meeting_seconds(self, world_size: int) -> float:
        """A few bytes of every rank brought to all others."""
        return (self.hop or self.exchange).ring_all_gather(world_size)(0)

    def check(self, world_size: int) -> None:
        """Raises unless all ranks that it names exist.

        Raises:
            ValueError: One does not.
        """
        named = [*self.slow_hosts, *(rank for pair in self.links for rank in pair)]
        if named and not 0 <= min(named) <= max(named) < world_size:
            raise ValueError(
                f"the network names rank {max(named)}, but there are {world_size} ranks, from 0 "
                f"to {world_size - 1}"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads."""
        curve = self.all_reduce
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "world_size": self.world_size,
            "exchange": asdict(self.exchange),
            "hop": None if self.hop is None else asdict(self.hop),
            "all_reduce": None if curve is None else [list(curve.sizes), list(curve.seconds)],
            "snapshot_seconds_per_byte": self.snapshot_seconds_per_byte,
            "mix_seconds_per_byte": self.mix_seconds_per_byte,
            "links": [[*pair, asdict(cost)] for pair, cost in self.links.items()],
            "slow_hosts": [list(item) for item in self.slow_hosts.items()],
            "racks": None if self.racks is None else asdict(self.racks),
            "collective": self.collective,
        }

    @classmethod
    def from_json(cls, value: object) -> "Network":
        """The network of `to_json`; further keys are ignored.

        Raises:
            ValueError: It is no network, or one of another version.
        """
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ValueError(
                f'not a network: it has no "format": "{_FORMAT}". `gossipgrad probe --out` '
                "writes one"
            )
        if value.get("version") != _VERSION:
            raise ValueError(
                f"a network of version {value.get('version')!r}, this reads version {_VERSION}: "
                "measure it anew"
            )
        try:
            curve, hop, racks = value["all_reduce"], value["hop"], value.get("racks")
            return cls(
                exchange=_cost(value["exchange"]),
                hop=None if hop is None else _cost(hop),
                all_reduce=None
                if curve is None
                else PiecewiseCost(
                    sizes=tuple(map(float, curve[0])), seconds=tuple(map(float, curve[1]))
                ),
                links={(a, b): _cost(cost) for a, b, cost in value["links"]},
                snapshot_seconds_per_byte=float(value["snapshot_seconds_per_byte"]),
                mix_seconds_per_byte=float(value["mix_seconds_per_byte"]),
                world_size=value["world_size"],
                # What is not measured may be missing.
                slow_hosts={rank: float(slow) for rank, slow in value.get("slow_hosts", [])},
                racks=None if racks is None else Racks(**racks),
                collective=value.get("collective", "ring"),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"a network with {error} missing or not as written") from error

    @classmethod
    def load(cls, path: Path) -> "Network":
        """The network in a file that `gossipgrad probe` wrote.

        Raises:
            ValueError: There is no such file, or it holds no network.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(
                f"no network {str(path)!r} ({error.strerror}): `gossipgrad probe --out {path}` "
                "measures one"
            ) from error
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from error

    def _find_links(
        self, senders: Ranks, receivers: Ranks
    ) -> tuple[Int[np.ndarray, " flow"], Bool[np.ndarray, " flow"]]:
        """For each flow the index of its pair in `links`, and whether the pair is in it at all."""
        pairs = np.sort(np.array(list(self.links), dtype=np.int64), axis=1)
        keys = pairs[:, 0] << 32 | pairs[:, 1]
        order = np.argsort(keys, kind="stable")
        wanted = np.minimum(senders, receivers) << 32 | np.maximum(senders, receivers)
        found = order[np.minimum(np.searchsorted(keys[order], wanted), keys.size - 1)]
        return found, keys[found] == wanted

    def _slowness(self, ranks: Ranks) -> Float[np.ndarray, " flow"]:
        factors = np.ones(ranks.shape)
        for rank, factor in self.slow_hosts.items():
            factors[ranks == rank] = factor
        return factors


def _cost(value: dict[str, float]) -> AffineCost:
    return AffineCost(
        alpha_seconds=float(value["alpha_seconds"]),
        beta_seconds_per_byte=float(value["beta_seconds_per_byte"]),
    )


def shared_finish(
    start: FlowTimes,
    uplink: Int[np.ndarray, " flow"],
    *,
    size_bytes: float,
    uplink_bytes_per_second: float,
    flow_bytes_per_second: float,
) -> FlowTimes:
    """When flows of one size end, of which those with the same uplink share it.

    At each moment every flow on an uplink moves at an equal part of its rate, but not above its
    own. Flows of one size end in the order in which they began, so the number that entered and the
    number that departed say which ones share: all uplinks go from event to event together.

    Args:
        start: When each flow begins.
        uplink: Number of the uplink of each.
        size_bytes: Of each flow.
        uplink_bytes_per_second: Of each uplink.
        flow_bytes_per_second: Of a flow that shares with no other.

    Returns:
        When the last byte of each flow has arrived.
    """
    if start.size == 0:
        return start.copy()
    order = np.lexsort((start, uplink))
    _, first, counts = np.unique(uplink[order], return_index=True, return_counts=True)
    uplinks, most = np.arange(counts.size), int(counts.max())
    column = np.arange(start.size) - np.repeat(first, counts)
    row = np.repeat(uplinks, counts)
    starts = np.full((counts.size, most + 1), np.inf)  # one more: no flow comes after the last
    starts[row, column] = start[order]
    entered = np.zeros((counts.size, most + 1))
    ends = np.zeros((counts.size, most + 1))
    arrived = np.zeros(counts.size, dtype=np.int64)
    departed = np.zeros(counts.size, dtype=np.int64)
    now = starts[:, 0].copy()
    served_bytes = np.zeros(counts.size)  # of a flow that is there from the start
    for _ in range(2 * most):
        present = arrived - departed
        busy = present > 0
        rate = np.minimum(flow_bytes_per_second, uplink_bytes_per_second / np.maximum(present, 1))
        arrival = starts[uplinks, arrived]
        to_go = entered[uplinks, departed] + size_bytes - served_bytes
        departure = np.where(busy, now + to_go / rate, np.inf)
        leaves = departure <= arrival
        moment = np.where(leaves, departure, arrival)
        live = np.isfinite(moment)
        span = np.where(live & busy, moment - now, 0.0)
        served_bytes += rate * span
        now = np.where(live, moment, now)
        goes, comes = live & leaves, live & ~leaves
        # What is left over of a flow that ends now is rounding: it counts as nothing.
        served_bytes[goes] = (entered[uplinks, departed] + size_bytes)[goes]
        ends[uplinks[goes], departed[goes]] = now[goes]
        departed[goes] += 1
        entered[uplinks[comes], arrived[comes]] = served_bytes[comes]
        arrived[comes] += 1
    finish = np.empty_like(start)
    finish[order] = ends[row, column]
    return finish
