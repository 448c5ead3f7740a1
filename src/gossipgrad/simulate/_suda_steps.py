"""When steps end under decentralized Muon: several exchanges a step, around the update."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from gossipgrad.engine import Overlap
from gossipgrad.muon import make_backbone, resolve_settings
from gossipgrad.topology import ring

from ._gossip_steps import Flight, Gossip, GossipSteps
from ._setting import Setting, Steps, Strategy, check_counts
from ._workers import Pace

__all__ = ["Suda"]

Times = Float[np.ndarray, " rank"]


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
        asked = {"backbone": self.backbone, "topology": self.topology, "mode": self.mode}
        return isinstance(resolve_settings(4, **asked).mode, Overlap)

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        return SudaSteps(self, setting)


class SudaSteps(GossipSteps):
    """See `Suda`."""

    def __init__(self, options: Suda, setting: Setting) -> None:
        gossip = Gossip(
            topology=options.topology,
            element_bytes=options.element_bytes,
            bucket_bytes=options.bucket_bytes,
            seed=options.seed,
        )
        super().__init__(gossip, setting)
        self._rounds = 1  # of an exchange
        if options.topology == "ring":
            self._schedule = ring(setting.world_size)
            self._rounds = self._schedule.period
            self.rotation = 1
        one = [torch.zeros(1)]
        rule = make_backbone(options.backbone, one)
        before = [len(names) for names in rule.before(one)]
        self._after = [len(names) for names in rule.after(one, one)]
        beside = before[:1]
        self._early = beside if options.overlaps() else []
        self._before = [1 + sum(beside if not self._early else []), *before[1:]]

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
