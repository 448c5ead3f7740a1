"""A network as the time model sees it: a start-up time and a time a byte."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gossipgrad.planning import AffineCost

__all__ = ["Network"]

_FORMAT = "gossipgrad network"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What it costs to move bytes between ranks; `gossipgrad probe` measures one.

    Every host sends and receives at once, and all links are alike.

    Attributes:
        exchange: Seconds of an exchange of equal messages with one partner, by the bytes of one.
        hop: Seconds of one hop of a ring all-reduce, by its bytes; None: as `exchange`.
        world_size: How many ranks it was measured with; None if it was not measured.

    Example:
        >>> network = Network.from_rate(1e9, latency_seconds=1e-3)
        >>> round(network.exchange(100_000_000), 9)
        0.801
        >>> round(network.all_reduce(2)(100_000_000), 9)
        0.802
    """

    exchange: AffineCost
    hop: AffineCost | None = None
    world_size: int | None = None

    @classmethod
    def from_rate(cls, bits_per_second: float, *, latency_seconds: float = 5e-5) -> "Network":
        """A network of equal links, each with that rate in each direction.

        Args:
            bits_per_second: Of a link.
            latency_seconds: What an empty message takes.

        Raises:
            ValueError: The rate is not above 0, or the latency is negative.
        """
        return cls(
            exchange=AffineCost.from_rate(
                rate_bits_per_second=bits_per_second, latency_seconds=latency_seconds
            )
        )

    def all_reduce(self, world_size: int) -> AffineCost:
        """Seconds of a ring all-reduce by its bytes, from when the last rank begins it."""
        return (self.hop or self.exchange).ring_all_reduce(world_size)

    def all_gather(self, world_size: int) -> AffineCost:
        """Seconds of a ring all-gather by the bytes of each rank, from when the last begins it."""
        return (self.hop or self.exchange).ring_all_gather(world_size)

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads."""
        return {
            "format": _FORMAT,
            "world_size": self.world_size,
            "exchange": asdict(self.exchange),
            "hop": None if self.hop is None else asdict(self.hop),
        }

    @classmethod
    def from_json(cls, value: object) -> "Network":
        """The network of `to_json`; further keys are ignored.

        Raises:
            ValueError: It is no network.
        """
        try:
            read: Any = value
            exchange, hop, form = read["exchange"], read["hop"], read["format"]
            if form != _FORMAT:
                raise ValueError(f"its format is {form!r}")
            return cls(
                exchange=AffineCost(**exchange),
                hop=None if hop is None else AffineCost(**hop),
                world_size=read["world_size"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"not a network that can be read ({error}): measure one with "
                "`gossipgrad probe --out`"
            ) from error

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
