"""Rates, and the lines of `ip` and `tc` that make hosts with a shaper on each end of their links.

Everything is in namespaces of the network's own, the switch too: the machine's interfaces, routes
and firewall are out of reach. A host's link is a virtual Ethernet pair, `lab0` in the host and a
port of a bridge in the switch; a token bucket on `lab0` shapes what the host sends, one on the port
what it receives.

The buckets are those of `htb`: one that is short of tokens goes into debt for what is larger than
it. The bucket of `tbf` would never let a piece go that has waited since it was larger, and cuts
those that come into frames, each of which costs the processors as much as a piece.
"""

import re
from collections.abc import Iterator

# No machine calls its own interface so: a process that was started outside its host fails at once,
# where `eth0` would carry its bytes over the unshaped network.
INTERFACE = "lab0"
MINIMUM_RATE = 1e6  # below, a bucket of few packets is no longer a smooth rate
# Measured with 2 cores at 2.5 GHz: 16 hosts at 1 Gbit/s full duplex carry 955 Mbit/s of payload
# each way, which is all of it; 32 hosts carry 750.
MOST_BITS_PER_SECOND = 16e9
MTU = 1500
_FRAME_BYTES = MTU + 14
# Of a full frame, what TCP hands on: 20 bytes IP, 20 TCP and 12 of timestamps; 14 of Ethernet.
PAYLOAD_SHARE = (MTU - 52) / _FRAME_BYTES
_GSO_BYTES = 65536
_BURST_SECONDS = 1e-3
_SLOW_BURST_SECONDS, _SLOW_BURST_BYTES = 2.5e-3, 32e3
_QUEUE_SECONDS = 20e-3
_QUEUE_BYTES = (16 * _FRAME_BYTES, 1 << 24)
# Bits, however they are written; of `bps` and `Bps` the first alone is a rate in bits.
_WRITTEN = re.compile(
    r"\s*(\d+(?:\.\d*)?(?:[eE]\d+)?)\s*(?:([kKmMgG]?)(?:[bB][iI][tT](?:/[sS])?|bps)?)\s*"
)


def parse_rate(text: str) -> float:
    """Bits a second of `1Gbit`, `100 Mbit/s`, `2.5g`, `1e9`."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(f"rate {text!r}: write a number and kbit, Mbit or Gbit, as in 100Mbit")
    return check_rate(float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()])


def check_rate(rate: float) -> float:
    """The rate itself."""
    if not MINIMUM_RATE <= rate < float("inf"):
        raise ValueError(f"{rate:g} bit/s: a shaped link carries {MINIMUM_RATE:g} bit/s or more")
    return float(rate)


def switch_lines(hosts: list[str]) -> Iterator[str]:
    """`ip` in the switch: a bridge, and a link to every host by its namespace."""
    # Nothing but the hosts' own bytes on the links: no spanning tree, no IPv6 greetings.
    yield "link add core type bridge forward_delay 0 stp_state 0 mcast_snooping 0"
    yield f"link set core addrgenmode none mtu {MTU} up"
    for host, name in enumerate(hosts):
        yield f"link add host{host} type veth peer name {INTERFACE} netns {name}"
        yield f"link set host{host} master core addrgenmode none mtu {MTU} up"


def host_lines(address: str, slowest: float) -> Iterator[str]:
    """`ip` in a host: its address, and one congestion control whatever the machine's is."""
    network = f"{address.rpartition('.')[0]}.0/24"
    yield "link set lo up"
    yield f"link set {INTERFACE} addrgenmode none mtu {MTU} up"
    yield piece_line(slowest)
    yield f"addr add {address}/24 dev {INTERFACE} noprefixroute"
    yield f"route add {network} dev {INTERFACE} src {address} congctl cubic"


def piece_line(slowest: float) -> str:
    """`ip` in a host: how large the pieces are that TCP hands to its link.

    The same on all, for a piece passes slower links whole; above the burst it would put a link into
    debt, and what comes next would wait for it.
    """
    whole_frames = (_burst_bytes(slowest) // _FRAME_BYTES - 1) * MTU
    size = min(_GSO_BYTES, max(_FRAME_BYTES, whole_frames))
    return f"link set {INTERFACE} gso_max_size {size}"


def shape_lines(interface: str, rate: float, *, is_new: bool = False) -> Iterator[str]:
    """`tc`: a token bucket for all that leaves by an interface.

    With another rate (not `is_new`) what waits in its queue stays, and goes at the new rate.
    """
    if is_new:
        yield f"qdisc add dev {interface} root handle 1: htb default 1"
    verb, burst = "add" if is_new else "change", _burst_bytes(rate)
    yield (
        f"class {verb} dev {interface} parent 1: classid 1:1 htb rate {rate:.0f}bit "
        f"ceil {rate:.0f}bit burst {burst} cburst {burst} quantum {_GSO_BYTES}"
    )
    queue = int(min(max(_QUEUE_BYTES[0], rate / 8 * _QUEUE_SECONDS), _QUEUE_BYTES[1]))
    yield f"qdisc {verb} dev {interface} parent 1:1 handle 2: bfifo limit {queue}"


def _burst_bytes(rate: float) -> int:
    """What a rested link carries at once, and so what a late timer can make up for.

    A millisecond's worth; on slow links up to 2.5, for the sake of larger pieces.
    """
    worth = max(rate / 8 * _BURST_SECONDS, min(_SLOW_BURST_BYTES, rate / 8 * _SLOW_BURST_SECONDS))
    return max(2 * _FRAME_BYTES, int(worth))
