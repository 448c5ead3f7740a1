"""The lines of `ip` and `tc` that make the network: hosts, racks, and a shaper on each link end.

Everything stands in namespaces of the laboratory's own, the switch too: the machine's interfaces,
bridges, routes and firewall are out of reach. A host's link is a virtual Ethernet pair, `lab0` in
the host and a port of its rack's bridge (or of the core) in the switch; a token bucket on `lab0`
shapes what the host sends, one on the port what it receives.

The buckets are those of `htb`: one that is short of tokens goes into debt for what is larger than
it. The bucket of `tbf` would never let a piece go that has waited since it was larger, and cuts
those that come into frames, each of which costs the processors as much as a piece.
"""

from collections.abc import Iterator

from ._layout import INTERFACE, MTU, Layout

__all__ = ["Wiring", "reshaped", "shaped"]

_CORE = "core"
_FRAME_BYTES = MTU + 14
_GSO_BYTES = 65536
_BURST_SECONDS = 1e-3
_SLOW_BURST_SECONDS = 2.5e-3
_SLOW_BURST_BYTES = 32e3
_QUEUE_SECONDS = 20e-3
_QUEUE_BYTES = (16 * _FRAME_BYTES, 1 << 24)
_FASTEST = 4e10  # of a link that is not to constrict


class Wiring:
    """The lines for one layout, names and addresses filled in."""

    def __init__(self, layout: Layout, hosts: list[str], switch: str, network: int) -> None:
        self.layout = layout
        self.hosts = hosts
        self.switch = switch
        self._network = network

    def address(self, host: int) -> str:
        """Where `host` is reached."""
        return f"10.{self._network}.0.{host + 1}"

    def bridges(self) -> Iterator[str]:
        """`ip` in the switch: the core, and a bridge a rack with its link to the core."""
        names = [_CORE, *(f"rack{rack}" for rack in range(len(self.layout.racks)))]
        for name in names:
            # Nothing but the hosts' own bytes on the links: no spanning tree, no IPv6 greetings.
            yield f"link add {name} type bridge forward_delay 0 stp_state 0 mcast_snooping 0"
            yield f"link set {name} addrgenmode none mtu {MTU} up"
        for rack in range(len(self.layout.racks)):
            yield f"link add up{rack} type veth peer name down{rack}"
            for end, bridge in ((f"up{rack}", f"rack{rack}"), (f"down{rack}", _CORE)):
                yield f"link set {end} master {bridge} addrgenmode none mtu {MTU} up"

    def ports(self) -> Iterator[str]:
        """`ip` in the switch: a link to every host."""
        for host, name in enumerate(self.hosts):
            rack = self.layout.rack_of(host)
            bridge = _CORE if rack is None else f"rack{rack}"
            yield f"link add host{host} type veth peer name {INTERFACE} netns {name}"
            yield f"link set host{host} master {bridge} addrgenmode none mtu {MTU} up"

    def host(self, host: int) -> Iterator[str]:
        """`ip` in a host: its address, and one congestion control whatever the machine's is."""
        yield "link set lo up"
        yield f"link set {INTERFACE} addrgenmode none mtu {MTU} up"
        yield self.pieces()
        yield f"addr add {self.address(host)}/24 dev {INTERFACE} noprefixroute"
        yield (
            f"route add 10.{self._network}.0.0/24 dev {INTERFACE} src {self.address(host)} "
            "congctl cubic"
        )

    def pieces(self) -> str:
        """`ip` in a host: how large the pieces are that TCP hands to its link.

        The same on all, for a piece passes slower links whole.
        """
        return f"link set {INTERFACE} gso_max_size {piece_bytes(self.layout.slowest())}"

    def changed_pieces(self) -> Iterator[str]:
        """`ip` in a host: the size for connections that are there, too.

        They keep the one they were made with until they look up their route anew.
        """
        yield self.pieces()
        yield "route flush cache"

    def shape_ports(self) -> Iterator[str]:
        """`tc` in the switch: what hosts receive, and both ends of every uplink."""
        for host, rate in enumerate(self.layout.rates):
            yield from shaped(f"host{host}", rate)
        for rack, uplink in enumerate(self.layout.uplinks):
            for end in (f"up{rack}", f"down{rack}"):
                yield from shaped(end, uplink)

    def shape_host(self, host: int) -> Iterator[str]:
        """`tc` in a host: what it sends."""
        return shaped(INTERFACE, self.layout.rates[host])


def shaped(interface: str, rate: float | None) -> Iterator[str]:
    """`tc`: a token bucket for all that leaves by `interface`; None does not constrict."""
    yield f"qdisc add dev {interface} root handle 1: htb default 1"
    yield from _bucket("add", interface, _FASTEST if rate is None else rate)


def reshaped(interface: str, rate: float | None) -> Iterator[str]:
    """`tc`: another rate for it; what waits in its queue stays, and goes at the new rate."""
    yield from _bucket("change", interface, _FASTEST if rate is None else rate)


def _bucket(verb: str, interface: str, rate: float) -> Iterator[str]:
    burst = burst_bytes(rate)
    yield (
        f"class {verb} dev {interface} parent 1: classid 1:1 htb rate {rate:.0f}bit "
        f"ceil {rate:.0f}bit burst {burst} cburst {burst} quantum {_GSO_BYTES}"
    )
    yield f"qdisc {verb} dev {interface} parent 1:1 handle 2: bfifo limit {queue_bytes(rate)}"


def burst_bytes(rate: float) -> int:
    """What a rested link carries at once, and so what a late timer can make up for.

    A millisecond's worth; on slow links up to 2.5, for the sake of `piece_bytes`.
    """
    worth = max(rate / 8 * _BURST_SECONDS, min(_SLOW_BURST_BYTES, rate / 8 * _SLOW_BURST_SECONDS))
    return max(2 * _FRAME_BYTES, int(worth))


def piece_bytes(rate: float) -> int:
    """What TCP hands to the link in one piece; every piece costs the processor a turn.

    One above the burst would put the link into debt, and what comes next would wait for it.
    """
    whole_frames = (burst_bytes(rate) // _FRAME_BYTES - 1) * MTU
    return min(_GSO_BYTES, max(_FRAME_BYTES, whole_frames))


def queue_bytes(rate: float) -> int:
    """What may wait before a link drops."""
    return int(min(max(_QUEUE_BYTES[0], rate / 8 * _QUEUE_SECONDS), _QUEUE_BYTES[1]))
