"""Who is in the network, and over which link: plain arithmetic, no system call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ._rates import check_rate

__all__ = ["INTERFACE", "PAYLOAD_SHARE", "Layout"]

# No machine calls its own interface so: a process that was started outside its host fails at once,
# where `eth0` would carry its bytes over the unshaped network.
INTERFACE = "lab0"
MAXIMUM_HOSTS = 250
MTU = 1500
# Of a full frame, what TCP hands on: 20 bytes IP, 20 TCP and 12 of timestamps; 14 of Ethernet.
_NONE = float("inf")
PAYLOAD_SHARE = (MTU - 52) / (MTU + 14)


@dataclass(kw_only=True)
class Layout:
    """Hosts, racks, and the rate of each link now.

    Args:
        hosts: How many.
        rates: Of each host's link, in bits a second, each way.
        racks: The hosts of each rack; those in none stand at the core.
        uplinks: Rate of each rack's link to the core, each way; None does not constrict.
    """

    hosts: int
    rates: list[float]
    racks: tuple[tuple[int, ...], ...] = ()
    uplinks: list[float | None] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        hosts: int,
        rate: float,
        host_rates: Mapping[int, float] | None = None,
        racks: Sequence[Sequence[int]] | None = None,
        uplink: float | None = None,
    ) -> "Layout":
        """From what the user gives.

        Raises:
            ValueError: If it contradicts itself.
        """
        if not 1 <= hosts <= MAXIMUM_HOSTS:
            raise ValueError(f"hosts={hosts}: a network has 1 to {MAXIMUM_HOSTS}")
        rates = [check_rate(rate, "rate_bits_per_second")] * hosts
        for host, own in (host_rates or {}).items():
            if not 0 <= host < hosts:
                raise ValueError(f"host_rates names host {host}: there are 0 to {hosts - 1}")
            rates[host] = check_rate(own, f"host_rates[{host}]")
        members = tuple(tuple(rack) for rack in racks or ())
        seen: set[int] = set()
        for rack in members:
            if not rack:
                raise ValueError(f"racks={members}: a rack has at least one host")
            for host in rack:
                if not 0 <= host < hosts:
                    raise ValueError(f"racks names host {host}: there are 0 to {hosts - 1}")
                if host in seen:
                    raise ValueError(f"racks names host {host} twice: a host stands in one rack")
                seen.add(host)
        if uplink is not None:
            if not members:
                raise ValueError(
                    f"uplink_bits_per_second={uplink:g} without racks: name the hosts that share "
                    "it, as in racks=((0, 1), (2, 3))"
                )
            check_rate(uplink, "uplink_bits_per_second")
        return cls(
            hosts=hosts,
            rates=rates,
            racks=members,
            uplinks=[uplink] * len(members),
        )

    def rack_of(self, host: int) -> int | None:
        """The rack that `host` stands in."""
        return next((i for i, rack in enumerate(self.racks) if host in rack), None)

    def check_host(self, host: int) -> int:
        """The host itself, if there is one."""
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host}: there are 0 to {self.hosts - 1}")
        return host

    def check_rack(self, rack: int) -> int:
        """The rack itself, if there is one."""
        if not 0 <= rack < len(self.racks):
            there = f"there are 0 to {len(self.racks) - 1}" if self.racks else "there are none"
            raise ValueError(f"rack {rack}: {there}; racks=((0, 1), (2, 3)) makes two")
        return rack

    def slowest(self) -> float:
        """The rate of the slowest link of all, uplinks too."""
        return min(*self.rates, *(uplink for uplink in self.uplinks if uplink is not None), _NONE)

    def load(self) -> float:
        """Bits a second when every host sends and receives as fast as its link lets it."""
        return sum(self.rates)
