"""When steps end under decentralized Muon: several exchanges a step, around the update."""

from dataclasses import dataclass

import torch

from gossipgrad.engine import Overlap
from gossipgrad.muon import make_backbone, resolve_settings
from gossipgrad.topology import by_name, ring

from ._gossip_steps import Exchanges, Flight
from ._model import Pace, Setting, Steps, Strategy, Times, check_counts

__all__ = ["Suda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suda(Strategy):
    """Decentralized Muon as `gossipgrad.suda` does it.

    Trackers are exchanged between backward and the update, and around them what the backbone
    exchanges: with one partner that is another in the next step, or on a ring with both neighbours.
    In overlap the first of it travels behind forward and backward.

    Attributes:
        backbone: As of `gossipgrad.suda`.
        topology: As of `gossipgrad.suda`, by name.
        mode: `"overlap"`, `"sync"`; None: as `gossipgrad.suda` chooses.
        element_bytes: Of an element on the wire; None: as in the profile.
        bucket_bytes: Size of a message.
        seed: Of the rotation of partners.

    Raises:
        ValueError: As `gossipgrad.suda`.
    """

    name: str = "suda"
    backbone: str = "semi-atc-gt"
    topology: str = "dissemination"
    mode: str | None = None
    element_bytes: int | None = None
    bucket_bytes: int = 4 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "element_bytes", "bucket_bytes")
        check_counts(self, "seed", least=0)
        self.overlaps()

    def overlaps(self) -> bool:
        """Whether the first exchange travels behind forward and backward."""
        settings = {"backbone": self.backbone, "topology": self.topology, "mode": self.mode}
        return isinstance(resolve_settings(4, **settings).mode, Overlap)

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        return _SudaSteps(self, setting)


class _SudaSteps(Exchanges):
    """See `Suda`."""

    def __init__(self, options: Suda, setting: Setting) -> None:
        is_ring, p = options.topology == "ring", setting.world_size
        super().__init__(
            setting,
            ring(p) if is_ring else by_name(options.topology, p, seed=options.seed),
            element_bytes=options.element_bytes,
            bucket_bytes=options.bucket_bytes,
        )
        self._rounds = 1  # of an exchange
        if is_ring:
            self._rounds, self.rotation = self.rotation, 1
        one = [torch.zeros(1)]
        rule = make_backbone(options.backbone, one)
        beside, *before = (len(names) for names in [*rule.before(one)] or [()])
        self._after = [len(names) for names in rule.after(one, one)]
        self._early = [beside] if beside and options.overlaps() else []
        self._before = [1 if self._early else 1 + beside, *before]

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        profile = self._setting.profile
        first = number * self._rounds
        now, flights = self._send(start, first, self._early)
        now = pace.after(now, profile.compute_seconds - profile.optimizer_seconds)
        for copies in self._before:
            now, more = self._send(now, first, [copies])
            now, flights = self.close(now, flights + more), []
        now = now + profile.optimizer_seconds * pace.factor
        for copies in self._after:
            now = self.close(*self._send(now, first, [copies]))
        return now

    def _send(self, now: Times, first: int, exchanges: list[int]) -> tuple[Times, list[Flight]]:
        flights: list[Flight] = []
        for copies in exchanges:
            for round in range(first, first + self._rounds):
                now, more = self.open(now, self._schedule.round_peers(round), copies)
                flights += more
        return now, flights
