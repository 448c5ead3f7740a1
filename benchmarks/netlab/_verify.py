"""Holds what real transfers reach against the rate of every link."""

from typing import NamedTuple

from ._errors import NetlabError
from ._layout import PAYLOAD_SHARE, Layout
from ._plan import Round, path, plan
from ._rates import format_rate
from ._traffic import Moved, Traffic

__all__ = ["Checked", "verify"]

TOLERANCE = 0.05
_TRIES = 3  # a machine that does something else for a moment is no wrong rate
_SETTLE_SECONDS = 0.15
_WINDOW = (0.3, 150)  # seconds, and frames of the slowest link, or the last frame decides
_BEHIND_A_QUEUE = (1.0, 400)
_FRAME_BITS = 12112


class Checked(NamedTuple):
    """One link: payload of TCP that it should carry, and what it carried."""

    link: str
    expected_bits_per_second: float
    measured_bits_per_second: float

    @property
    def ratio(self) -> float:
        """Measured by expected."""
        return self.measured_bits_per_second / self.expected_bits_per_second


def verify(layout: Layout, traffic: Traffic) -> list[Checked]:
    """Fills every link that can be filled; what each carried.

    Raises:
        NetlabError: If a link is off by more than 5 %.
    """
    passed: dict[str, Checked] = {}
    for turn in plan(layout):
        for attempt in range(_TRIES):
            moved = _move(layout, traffic, turn, attempt)
            checked = [
                Checked(link, rate * PAYLOAD_SHARE, sum(moved.bits_per_second[i] for i in flows))
                for link, rate, flows in _rules(layout, turn)
            ]
            off = [check for check in checked if abs(check.ratio - 1) > TOLERANCE]
            if not off:
                break
        else:
            raise NetlabError(_complaint(off, moved))
        passed |= {check.link: check for check in checked}
    return list(passed.values())


def _move(layout: Layout, traffic: Traffic, turn: Round, attempt: int) -> Moved:
    rates = {name: rate for flow in turn.flows for name, rate in path(layout, flow) if rate}
    # Where senders do not set the pace a queue drops frames; what waits for one comes in a lump.
    sent = {index for link, flows in turn.filled.items() if "sending" in link for index in flows}
    queues = len(sent) < len(turn.flows)
    seconds, frames = _BEHIND_A_QUEUE if queues else _WINDOW
    slowest = min(rates[link] for link in turn.filled)
    window = max(seconds, frames * _FRAME_BITS / slowest) * (1 + attempt)
    return traffic.round(
        turn.flows,
        rate=min(rates.values()),
        settle=max(_SETTLE_SECONDS, window / 3),
        seconds=window,
    )


def _rules(layout: Layout, turn: Round) -> list[tuple[str, float, list[int]]]:
    rates = {name: rate for flow in turn.flows for name, rate in path(layout, flow)}
    return [(link, rates[link] or 0.0, flows) for link, flows in turn.filled.items()]


def _complaint(off: list[Checked], moved: Moved) -> str:
    worst = max(off, key=lambda check: abs(check.ratio - 1))
    said = (
        f"{len(off)} links are off their rate by more than {TOLERANCE:.0%}, {worst.link} the most: "
        f"{format_rate(worst.measured_bits_per_second)} of payload, where it should carry "
        f"{format_rate(worst.expected_bits_per_second)}; the processors were "
        f"{moved.cpu_busy:.0%} busy. "
    )
    if worst.ratio > 1:
        return said + "Something has changed the shaping, or bytes pass beside it"
    return said + (
        "Other programs, or rates this machine cannot carry: end them, take fewer hosts or lower "
        "rates"
    )
