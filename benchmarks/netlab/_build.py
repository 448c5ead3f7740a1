"""Makes the namespaces and links of a network, changes rates, reads counters."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ._errors import NetlabError
from ._layout import INTERFACE
from ._links import Wiring, reshaped
from ._probe import lacking_features
from ._system import run, run_batch

__all__ = [
    "Counters",
    "build",
    "change_pieces",
    "change_rates",
    "change_uplink",
    "connect",
    "join_hosts",
    "part_hosts",
    "read_counters",
]

# Else the bridges greet every host now and then, and the counters have it.
_NO_IPV6 = "cd /proc/sys/net/ipv6/conf/default 2>/dev/null && echo 1 > disable_ipv6 || true"


_NOBODY = "lladdr 02:00:00:00:00:00 nud permanent"


class Counters(NamedTuple):
    """Bytes over a host's link since the network came up: whole frames, headers and all."""

    sent_bytes: int
    received_bytes: int


def build(wiring: Wiring, namespaces: Sequence[str]) -> None:
    """Brings everything up, shaped.

    Raises:
        NetlabError: With what the kernel lacks, if that is why.
    """
    run_batch(["ip"], (f"netns add {name}" for name in namespaces))
    try:
        run("ip", "netns", "exec", wiring.switch, "sh", "-c", _NO_IPV6)
        run_batch(["ip", "-n", wiring.switch], [*wiring.bridges(), *wiring.ports()])
        run_batch(["tc", "-n", wiring.switch], wiring.shape_ports())
        for host, name in enumerate(wiring.hosts):
            run_batch(["ip", "-n", name], wiring.host(host))
            run_batch(["tc", "-n", name], wiring.shape_host(host))
    except NetlabError as error:
        lacks = lacking_features(wiring.switch)
        raise NetlabError("; ".join(lacks) or str(error)) from error


def change_rates(wiring: Wiring, rates: Mapping[int, float]) -> None:
    """Both ends of these hosts' links; what waits in their queues stays."""
    ports = (line for host, rate in rates.items() for line in reshaped(f"host{host}", rate))
    run_batch(["tc", "-n", wiring.switch], ports)
    for host, rate in rates.items():
        run_batch(["tc", "-n", wiring.hosts[host]], reshaped(INTERFACE, rate))


def change_uplink(wiring: Wiring, rack: int, rate: float | None) -> None:
    """Both ends of a rack's link to the core."""
    ends = (f"up{rack}", f"down{rack}")
    run_batch(["tc", "-n", wiring.switch], (line for end in ends for line in reshaped(end, rate)))


def change_pieces(wiring: Wiring) -> None:
    """What TCP hands to the links in one piece, on all hosts, after rates have changed."""
    for name in wiring.hosts:
        run_batch(["ip", "-n", name], wiring.changed_pieces())


def part_hosts(wiring: Wiring, one: int, other: int) -> None:
    """Frames between two hosts go to an address that nobody has; both still reach all others."""
    for here, there in ((one, other), (other, one)):
        where = f"neigh replace {wiring.address(there)} dev {INTERFACE}"
        run("ip", "-n", wiring.hosts[here], *where.split(), *_NOBODY.split())


def join_hosts(wiring: Wiring, one: int, other: int) -> None:
    """Takes `part_hosts` back."""
    for here, there in ((one, other), (other, one)):
        where = f"neigh del {wiring.address(there)} dev {INTERFACE}"
        run("ip", "-n", wiring.hosts[here], *where.split())


def connect(wiring: Wiring, host: int, *, on: bool) -> None:
    """Whether the switch forwards anything of a host's port; the link stays up."""
    state = "3" if on else "0"  # forwarding, disabled: the names of `bridge` are not in all of them
    run("bridge", "-n", wiring.switch, "link", "set", "dev", f"host{host}", "state", state)


def read_counters(wiring: Wiring, host: int) -> Counters:
    """What has passed the two shapers of a host's link."""
    return Counters(_passed(wiring.hosts[host], INTERFACE), _passed(wiring.switch, f"host{host}"))


def _passed(namespace: str, interface: str) -> int:
    shown = json.loads(run("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", interface))
    return next(queue["bytes"] for queue in shown if queue.get("root"))
