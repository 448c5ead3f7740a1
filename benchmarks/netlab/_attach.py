"""Changes a link of a network that another process holds up: its record says what it is like."""

from dataclasses import replace

from ._build import change_pieces, change_rates, change_uplink
from ._envelope import check_load
from ._errors import NetlabError
from ._layout import Layout
from ._links import Wiring
from ._record import Record, alive, locked, others_load, records
from ._system import missing, namespaces

__all__ = ["change_link"]

_RACK = "rack"


def change_link(name: str, link: str, rate: float) -> None:
    """Sets the rate of a link, both ways, while it carries bytes.

    Args:
        name: The network's, as `up` tells it.
        link: The number of a host, or `rack0` for the uplink of a rack.
        rate: In bits a second.

    Raises:
        ValueError: If there is no such network or link.
        NetlabError: If the machine cannot carry so much, or something is missing here.
    """
    _record(name)
    if lacks := missing():
        raise NetlabError("; ".join(lacks))
    with locked():
        _change(_record(name), link, rate)


def _change(record: Record, link: str, rate: float) -> None:
    switch, *hosts = record.namespaces
    layout = Layout(hosts=len(hosts), rates=list(record.rates), uplinks=list(record.uplinks))
    wiring = Wiring(layout, hosts, switch, record.network)
    load = record.load
    kind, number = (_RACK, link[len(_RACK) :]) if link.startswith(_RACK) else ("host", link)
    if not number.isdecimal():
        raise ValueError(f"link {link!r}: write the number of a host, or rack0 for an uplink")
    if kind == _RACK:
        if int(number) >= len(layout.uplinks):
            raise ValueError(f"{link}: {record.name} has {len(layout.uplinks)} racks")
        change_uplink(wiring, int(number), rate)
        layout.uplinks[int(number)] = rate
    else:
        host = layout.check_host(int(number))
        load += rate - layout.rates[host]
        check_load(load, layout.hosts, None, others_load(record.name))
        change_rates(wiring, {host: rate})
        layout.rates[host] = rate
    change_pieces(wiring)
    replace(record, rates=tuple(layout.rates), uplinks=tuple(layout.uplinks), load=load).write()


def _record(name: str) -> Record:
    made = namespaces()
    there = {
        record.name: record
        for record in records()
        # One that was killed may stand there until its watchdog has come to it.
        if alive(record) is not False and made.issuperset(record.namespaces)
    }
    if name not in there:
        known = f"there are {', '.join(sorted(there))}" if there else "none is up"
        raise ValueError(f"no network {name!r}: {known}")
    return there[name]
