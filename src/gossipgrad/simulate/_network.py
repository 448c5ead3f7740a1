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

__all__ = ["Network", "Racks"]

Ranks = Int[np.ndarray, " flow"]
_FORMAT = "gossipgrad network"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Racks:
    """Consecutive ranks behind one uplink.

    Attributes:
        size: Ranks in a rack; the last rack has what is left.
        uplink_bits_per_second: Of the uplink, in each direction; what leaves the rack shares it.
    """

    size: int
    uplink_bits_per_second: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a rack of {self.size} ranks: it must hold 1 or more")
        if not self.uplink_bits_per_second > 0:
            raise ValueError(
                f"an uplink of {self.uplink_bits_per_second} bits a second moves nothing: give "
                "one above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What it costs to move bytes between ranks.

    Every host sends and receives at once, each at its own rate. `gossipgrad probe` measures one.

    Attributes:
        exchange: An exchange of equal messages with one partner, by the bytes of one of them.
        hop: One hop of a ring all-reduce, by its bytes; None: as `exchange`.
        all_reduce: A ring all-reduce over `world_size` ranks, as measured: stands in place of its
            hops at that number of ranks, where no link is slow or shared.
        collective: How all-reduce goes: `"ring"` as Gloo does it, or `"halving"` (recursive
            halving and doubling, with few start-ups), as good MPI libraries do it for many ranks.
        racks: Which ranks share an uplink; None: no links are shared.
        slow_hosts: Ranks whose links take so many times longer for a byte.
        links: Costs of single pairs, in place of `exchange`; (a, b) stands for (b, a), too.
        snapshot_seconds_per_byte: Copying the payload, on the thread of the step.
        mix_seconds_per_byte: Mixing in what was received, on the thread of the step.
        world_size: How many ranks it was measured with; None if it was not.

    Raises:
        ValueError: A value is out of range, or `"halving"` meets shared uplinks, over which this
            model cannot lay it.
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
                    f"slow host {rank} takes {factor} times longer: give a rank and a factor "
                    "above 0"
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
            cost_of, found = self._own_costs(senders, receivers)
            costs = list(self.links.values())
            alphas[found] = np.array([cost.alpha_seconds for cost in costs])[cost_of[found]]
            betas[found] = np.array([cost.beta_seconds_per_byte for cost in costs])[cost_of[found]]
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
            alphas, betas = self._ring_links(world_size)
            worst = AffineCost(
                alpha_seconds=float(alphas.max()), beta_seconds_per_byte=float(betas.max())
            )
            return worst.halving_all_reduce(world_size)(size_bytes)
        return 2 * (world_size - 1) * self._slowest_hop_seconds(size_bytes / world_size, world_size)

    def all_gather_seconds(self, size_bytes: float | int, world_size: int) -> float:
        """A ring all-gather of what all ranks bring, from when the last of them begins.

        Args:
            size_bytes: That each of them brings.
            world_size: How many they are.
        """
        if world_size == 1:
            return 0.0
        return (world_size - 1) * self._slowest_hop_seconds(size_bytes, world_size)

    def _slowest_hop_seconds(self, size_bytes: float | int, world_size: int) -> float:
        """A ring goes at the pace of its slowest link: each hop waits for the one before."""
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
        """Raise unless the ranks that are named are there.

        Raises:
            ValueError: One is not.
        """
        named = [*self.slow_hosts, *(rank for pair in self.links for rank in pair)]
        if named and not 0 <= min(named) <= max(named) < world_size:
            raise ValueError(
                f"the network names rank {max(named)}, but there are {world_size} ranks, from 0 "
                f"to {world_size - 1}"
            )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads; plain values."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "world_size": self.world_size,
            "exchange": _plain(self.exchange),
            "hop": None if self.hop is None else _plain(self.hop),
            "all_reduce": None
            if self.all_reduce is None
            else [list(self.all_reduce.sizes), list(self.all_reduce.seconds)],
            "snapshot_seconds_per_byte": self.snapshot_seconds_per_byte,
            "mix_seconds_per_byte": self.mix_seconds_per_byte,
            "links": [[one, other, _plain(cost)] for (one, other), cost in self.links.items()],
            "slow_hosts": [[rank, factor] for rank, factor in self.slow_hosts.items()],
            "racks": None if self.racks is None else asdict(self.racks),
            "collective": self.collective,
        }

    @classmethod
    def from_json(cls, value: object) -> "Network":
        """The network that `to_json` gave; keys beyond its own are left alone.

        Raises:
            ValueError: It is none, or one of another version.
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
            return cls(
                exchange=_cost(value["exchange"]),
                hop=None if value["hop"] is None else _cost(value["hop"]),
                all_reduce=_curve(value["all_reduce"]),
                links={(a, b): _cost(cost) for a, b, cost in value["links"]},
                snapshot_seconds_per_byte=float(value["snapshot_seconds_per_byte"]),
                mix_seconds_per_byte=float(value["mix_seconds_per_byte"]),
                world_size=value["world_size"],
                # What is not measured may be missing.
                slow_hosts={rank: float(slow) for rank, slow in value.get("slow_hosts", [])},
                racks=None if value.get("racks") is None else Racks(**value["racks"]),
                collective=value.get("collective", "ring"),
            )
        except (KeyError, TypeError, ValueError) as error:
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

    def _own_costs(
        self, senders: Ranks, receivers: Ranks
    ) -> tuple[Int[np.ndarray, " flow"], Bool[np.ndarray, " flow"]]:
        """For each flow the place of its pair in `links`, and whether it is there at all."""
        pairs = np.sort(np.array(list(self.links), dtype=np.int64), axis=1)
        keys = pairs[:, 0] << 32 | pairs[:, 1]
        order = np.argsort(keys, kind="stable")
        asked = np.minimum(senders, receivers) << 32 | np.maximum(senders, receivers)
        places = order[np.minimum(np.searchsorted(keys[order], asked), keys.size - 1)]
        return places, keys[places] == asked

    def _slowness(self, ranks: Ranks) -> Float[np.ndarray, " flow"]:
        factors = np.ones(ranks.shape)
        for rank, factor in self.slow_hosts.items():
            factors[ranks == rank] = factor
        return factors


def _curve(value: list[list[float]] | None) -> PiecewiseCost | None:
    if value is None:
        return None
    sizes, seconds = ([float(each) for each in part] for part in value)
    return PiecewiseCost(sizes=tuple(sizes), seconds=tuple(seconds))


def _plain(cost: AffineCost) -> dict[str, float]:
    return {
        "alpha_seconds": cost.alpha_seconds,
        "beta_seconds_per_byte": cost.beta_seconds_per_byte,
    }


def _cost(value: dict[str, float]) -> AffineCost:
    return AffineCost(
        alpha_seconds=float(value["alpha_seconds"]),
        beta_seconds_per_byte=float(value["beta_seconds_per_byte"]),
    )
