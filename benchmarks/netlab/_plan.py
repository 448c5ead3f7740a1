"""Which transfers show that every link keeps to its rate: plain arithmetic."""

from collections.abc import Sequence
from typing import NamedTuple

from ._layout import Layout

__all__ = ["Round", "fair_shares", "path", "plan"]

Flow = tuple[int, int]


class Round(NamedTuple):
    """Flows at once, and the links that they fill: each has to carry its rate, no more, no less."""

    flows: list[Flow]
    filled: dict[str, list[int]]  # name of the link: its flows


def plan(layout: Layout) -> list[Round]:
    """Rounds that between them fill every link, as far as other links let them.

    Hosts of one rack and one rate send around a ring, all rings at once. A host left alone meets
    one at least as fast, or all others together. Then each rack meets the others. But for the
    rings one way after the other: where a fast link ends in a slow one a queue stands, and the
    acknowledgements of the other way would stand in it.
    """
    rings: dict[tuple[int | None, float], list[int]] = {}
    for host, rate in enumerate(layout.rates):
        rings.setdefault((layout.rack_of(host), rate), []).append(host)
    together: list[Flow] = []
    alone = []
    for ring in rings.values():
        if len(ring) > 1:
            together += [(ring[i - 1], host) for i, host in enumerate(ring)]
        else:
            alone += ring
    rounds = [together] if together else []
    meetings = [_meeting(layout, host) for host in alone if layout.hosts > 1]
    for rack, uplink in enumerate(layout.uplinks):
        inside = layout.racks[rack]
        outside = [host for host in range(layout.hosts) if host not in inside]
        if uplink is None or not outside:
            continue
        pairs = [
            (inside[i % len(inside)], outside[i % len(outside)])
            for i in range(max(len(inside), len(outside)))
        ]
        meetings.append(pairs)
    for there in meetings:
        rounds += [there, [(receiver, sender) for sender, receiver in there]]
    turns: list[Round] = []
    shown: set[str] = set()
    for flows in rounds:
        turn = Round(flows, _filled(layout, flows))
        if not shown.issuperset(turn.filled):
            turns.append(turn)
            shown.update(turn.filled)
    return turns


def _meeting(layout: Layout, host: int) -> list[Flow]:
    rates = layout.rates
    for other in range(layout.hosts):
        if other != host and rates[other] >= rates[host]:
            links = path(layout, (host, other)) + path(layout, (other, host))
            if all(rate is None or rate >= rates[host] for _, rate in links):
                return [(host, other)]
    return [(host, other) for other in range(layout.hosts) if other != host]


def links(layout: Layout) -> list[str]:
    """Every link end that has a rate."""
    return [
        *(f"host {host} {way}" for host in range(layout.hosts) for way in ("sending", "receiving")),
        *(
            f"rack {rack} {way} the core"
            for rack, uplink in enumerate(layout.uplinks)
            if uplink is not None
            for way in ("to", "from")
        ),
    ]


def path(layout: Layout, flow: Flow) -> list[tuple[str, float | None]]:
    """The links that a flow passes, with their rates."""
    sender, receiver = flow
    racks = layout.rack_of(sender), layout.rack_of(receiver)
    links: list[tuple[str, float | None]] = [(f"host {sender} sending", layout.rates[sender])]
    if racks[0] != racks[1]:
        for rack, way in zip(racks, ("to", "from"), strict=True):
            if rack is not None:
                links.append((f"rack {rack} {way} the core", layout.uplinks[rack]))
    return [*links, (f"host {receiver} receiving", layout.rates[receiver])]


def fair_shares(layout: Layout, flows: Sequence[Flow]) -> tuple[list[float], set[str]]:
    """What each flow gets when links are shared evenly (max-min), and the links that are full."""
    links: dict[str, tuple[float, set[int]]] = {}
    for index, flow in enumerate(flows):
        for name, rate in path(layout, flow):
            if rate is not None:
                links.setdefault(name, (rate, set()))[1].add(index)
    shares = [0.0] * len(flows)
    open_flows = set(range(len(flows)))
    full: set[str] = set()
    while open_flows:
        room = {
            name: (rate - sum(shares[i] for i in members - open_flows)) / len(members & open_flows)
            for name, (rate, members) in links.items()
            if members & open_flows
        }
        least = min(room.values())
        closing = [name for name, share in room.items() if share <= least * (1 + 1e-9)]
        full.update(closing)
        done = set[int]().union(*(links[name][1] & open_flows for name in closing))
        for index in done:
            shares[index] = least
        open_flows -= done
    return shares, full


def _filled(layout: Layout, flows: Sequence[Flow]) -> dict[str, list[int]]:
    _, full = fair_shares(layout, flows)
    filled: dict[str, list[int]] = {}
    for index, flow in enumerate(flows):
        for name, _ in path(layout, flow):
            if name in full:
                filled.setdefault(name, []).append(index)
    return filled
