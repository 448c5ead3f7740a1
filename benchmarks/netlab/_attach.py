"""Changes a link of a network that another process holds up: what is known of it the kernel has."""

import json
import re

from ._build import change_pieces, change_rates, change_uplink
from ._envelope import check_load
from ._errors import NetlabError
from ._layout import Layout
from ._links import Wiring
from ._rates import parse_rate
from ._record import Record, records
from ._system import run

__all__ = ["change_link"]

_RATE = re.compile(r" rate (\S+) ")
_RACK = "rack"


def change_link(name: str, link: str, rate: float) -> None:
    """Sets the rate of a link, both ways, while it carries bytes.

    Args:
        name: The network's, as `up` tells it.
        link: The number of a host, or `rack0` for the uplink of a rack.
        rate: In bits a second.

    Raises:
        ValueError: If there is no such network or link.
        NetlabError: If the machine cannot carry so much.
    """
    wiring = _wiring(_record(name))
    layout = wiring.layout
    kind, number = (_RACK, link[len(_RACK) :]) if link.startswith(_RACK) else ("host", link)
    if not number.isdecimal():
        raise ValueError(f"link {link!r}: write the number of a host, or rack0 for an uplink")
    if kind == _RACK:
        if int(number) >= len(layout.uplinks):
            raise ValueError(f"{link}: {name} has {len(layout.uplinks)} racks")
        change_uplink(wiring, int(number), rate)
        layout.uplinks[int(number)] = rate
    else:
        host = layout.check_host(int(number))
        check_load(layout.load() - layout.rates[host] + rate, layout.hosts, None)
        change_rates(wiring, {host: rate})
        layout.rates[host] = rate
    change_pieces(wiring)


def _record(name: str) -> Record:
    there = {record.name: record for record in records()}
    if name not in there:
        known = f"there are {', '.join(sorted(there))}" if there else "none is up"
        raise ValueError(f"no network {name!r}: {known}")
    return there[name]


def _wiring(record: Record) -> Wiring:
    switch, *hosts = record.namespaces
    there = {link["ifname"] for link in json.loads(run("ip", "-n", switch, "-j", "link", "show"))}
    racks = sum(name.startswith("up") for name in there)
    layout = Layout(
        hosts=len(hosts),
        rates=[_rate(switch, f"host{host}") for host in range(len(hosts))],
        uplinks=[_rate(switch, f"up{rack}") for rack in range(racks)],
    )
    return Wiring(layout, hosts, switch, record.network)


def _rate(switch: str, interface: str) -> float:
    shown = run("tc", "-n", switch, "class", "show", "dev", interface)
    found = _RATE.search(shown)
    if found is None:
        raise NetlabError(f"{interface} in {switch} is not shaped: {shown.strip() or 'no class'}")
    return parse_rate(found[1])
