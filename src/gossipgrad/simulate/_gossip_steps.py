"""When steps end under gossip, or decentralized Muon: each rank waits for one partner."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gossipgrad.engine import Overlap
from gossipgrad.muon import make_backbone, resolve_settings
from gossipgrad.topology import RoundPeers, Schedule, by_name, ring

from ._model import Pace, Setting, Steps, Strategy, Times, check_counts, count_messages, synchronize
from ._network import shared_finish

__all__ = ["Gossip", "Suda"]

_NOBODY = -1
_LONGEST_APART = 128  # steps between averages that are stepped through


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(Strategy):
    """Gossip with one rotating partner a round, as `gossipgrad.gossip` does it.

    `overlap`: a snapshot is copied at the start of the step and travels while it computes; at its
    end the step waits for the partner's, and mixes message by message. `sync`: copied and sent
    after the update; the next forward pass waits for each message when it reaches its layers, and
    the update for those of state. `stale`: copied and sent at the start of a step, if an earlier
    snapshot is free on both ends, and mixed when it arrives; no step waits. A rank sends one
    message after another, whatever rounds they belong to, and copies no third snapshot before the
    first has left.

    Attributes:
        mode: `"overlap"`, `"sync"` or `"stale"`.
        topology: A name from `gossipgrad.topology`.
        every: Steps in a round.
        average_every: Steps between exact averages, of the state as well if it is exchanged; None:
            no averages. Not with `stale`.
        state_every: Rounds between exchanges of optimizer state; 0: never.
        state_copies: Tensors of state for each parameter: 1 for momentum, 2 for Adam; None: as
            in the profile.
        element_bytes: Of an element on the wire; None: as in the profile.
        bucket_bytes: Size of a message.
        exchanges: Partners of a step of `sync`, one after the other; the last is hidden.
        density: Share of the weights that a round exchanges, of a shared mask; state has no mask.
        seed: Of the rotation of partners.

    Raises:
        ValueError: A value is out of range, or two do not go together.
    """

    name: str = "gossip"
    mode: str = "overlap"
    topology: str = "dissemination"
    every: int = 1
    average_every: int | None = None
    state_every: int = 0
    state_copies: int | None = None
    element_bytes: int | None = None
    bucket_bytes: int = 4 << 20
    exchanges: int = 1
    density: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("overlap", "sync", "stale"):
            raise ValueError(f"mode {self.mode!r} is not modelled: choose overlap, sync or stale")
        check_counts(
            self,
            *("every", "average_every", "state_copies", "element_bytes", "bucket_bytes"),
            "exchanges",
        )
        check_counts(self, "state_every", "seed", least=0)
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: give a share above 0 and at most 1")
        if self.density < 1 and self.state_every:
            raise ValueError(
                f"density={self.density} with state_every={self.state_every}: a shared mask "
                "exchanges weights only; leave out state_every, or density"
            )
        if self.exchanges > 1 and self.mode != "sync":
            raise ValueError(f"exchanges={self.exchanges} needs mode sync, not {self.mode}")
        if self.mode == "stale":
            if not by_name(self.topology, 4).symmetric:
                raise ValueError(
                    f"mode stale needs symmetric pairs, which {self.topology} has not: choose "
                    "matching or hypercube"
                )
            if self.average_every is not None:
                raise ValueError(
                    f"average_every={self.average_every} with mode stale, in which no step waits "
                    "for all ranks: leave it out, or choose another mode"
                )

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        return _GossipSteps(self, setting)


class _Flight(NamedTuple):
    """The messages of one tensor a parameter: when the first and the last of them arrive."""

    first: Times
    last: Times
    messages: int
    mixing_seconds: Times  # of each message

    def after(self, now: Times, seconds: Times | float = 0.0) -> Times:
        """When all are mixed and `seconds` of work are done that needs them one by one."""
        each = seconds / self.messages + self.mixing_seconds
        return np.maximum(np.maximum(now, self.first) + each * self.messages, self.last + each)


class _Exchanges(Steps):
    """Steps in which ranks send snapshots to partners, each over a link of its own.

    Args:
        setting: The case.
        schedule: Who exchanges with whom.
        element_bytes: Of an element on the wire; None: as in the profile.
        bucket_bytes: Size of a message.
        density: Share of the weights that is sent.
        snapshots: How many may be in flight before the next one is copied.
    """

    def __init__(
        self,
        setting: Setting,
        schedule: Schedule,
        *,
        element_bytes: int | None,
        bucket_bytes: int,
        density: float = 1.0,
        snapshots: int = 2,
    ) -> None:
        super().__init__()
        profile, p = setting.profile, setting.world_size
        self.rotation = schedule.period
        self._setting, self._schedule = setting, schedule
        sizes = [count * (element_bytes or profile.element_bytes) for count in profile.elements]
        self._weight_bytes = density * sum(sizes)
        self._messages = count_messages(sizes, bucket_bytes)
        self._link_free = np.full(p, -np.inf)
        self._left = [np.full(p, -np.inf)] * snapshots  # when the last ones had left

    def open(self, now: Times, peers: RoundPeers, copies: int) -> tuple[Times, list[_Flight]]:
        """Copies and sends `copies` tensors a parameter.

        Returns:
            When each rank has copied them, and what arrives.
        """
        network = self._setting.network
        size, message = copies * self._weight_bytes, self._weight_bytes / self._messages
        sends = peers.send_to != _NOBODY
        self.bytes_sent += size * float(sends.mean())
        # The oldest snapshot is overwritten when it has left.
        now = np.where(sends, np.maximum(now, self._left[0]), now)
        copy_all, copy_first = (network.snapshot_seconds_per_byte * n for n in (size, message))
        begin = np.maximum(now + copy_first, self._link_free)
        alphas, betas = self._link_costs(peers, sends, begin, size)

        def leave(count: int) -> Times:
            """When `count` messages have left."""
            copied = now + count * copy_first + message * betas
            return np.maximum(begin + count * message * betas, copied)

        self._link_free = np.where(sends, leave(copies * self._messages), self._link_free)
        later = [*self._left[1:], self._link_free]
        self._left = [np.where(sends, b, a) for a, b in zip(self._left, later, strict=True)]
        receives = peers.recv_from != _NOBODY
        source = np.where(receives, peers.recv_from, 0)
        mixing = np.where(receives, network.mix_seconds_per_byte, 0.0) * message

        def arrive(count: int) -> Times:
            return np.where(receives, (leave(count) + alphas)[source], -np.inf)

        each = self._messages
        flights = [
            _Flight(arrive(copy * each + 1), arrive((copy + 1) * each), each, mixing)
            for copy in range(copies)
        ]
        return np.where(sends, now + copy_all, now), flights

    @staticmethod
    def close(now: Times, flights: list[_Flight]) -> Times:
        """When each rank has mixed what its partner sent, one message after the other."""
        for flight in flights:
            now = flight.after(now)
        return now

    def _link_costs(
        self, peers: RoundPeers, sends: np.ndarray, begin: Times, size: float
    ) -> tuple[Times, Times]:
        """Start-up time and time a byte of each rank's flow, uplinks shared with the others."""
        network = self._setting.network
        ranks = np.arange(begin.size)
        receivers = np.where(sends, peers.send_to, ranks)
        alphas, betas = network.link_costs(ranks, receivers)
        if network.racks is not None and size > 0:
            rack, of_receiver = ranks // network.racks.size, receivers // network.racks.size
            (crossing,) = np.nonzero(rack != of_receiver)
            for uplinks in (rack, of_receiver):
                finish = shared_finish(
                    begin[crossing],
                    uplinks[crossing],
                    size_bytes=float(size),
                    uplink_bytes_per_second=network.racks.uplink_bits_per_second / 8,
                    flow_bytes_per_second=network.bytes_per_second,
                )
                shared = (finish - begin[crossing]) / size
                betas[crossing] = np.maximum(betas[crossing], shared)
        return alphas, betas


class _GossipSteps(_Exchanges):
    """See `Gossip`."""

    def __init__(self, options: Gossip, setting: Setting) -> None:
        profile = setting.profile
        super().__init__(
            setting,
            by_name(options.topology, setting.world_size, seed=options.seed),
            element_bytes=options.element_bytes,
            bucket_bytes=options.bucket_bytes,
            density=options.density,
            snapshots=3 if options.mode == "stale" else 2,
        )
        self._options = options
        copies = profile.state_copies if options.state_copies is None else options.state_copies
        self._state_copies = copies if options.state_every else 0
        self.cycle = options.every * max(1, options.state_every)
        apart = options.average_every or 0
        self._average_every = apart if apart <= _LONGEST_APART else 0
        self.cycle = math.lcm(self.cycle, self._average_every or 1)
        # Averages are not narrowed on the wire, and include the state if it is exchanged at all.
        sizes = [count * profile.element_bytes for count in profile.elements]
        messages = count_messages(sizes, options.bucket_bytes)
        buckets = [profile.size_bytes / messages] * (messages * (1 + self._state_copies))
        self._average_seconds = setting.average_seconds(buckets) if apart else 0.0
        self._average_bytes = setting.ring_bytes(sum(buckets))
        self._round = 0
        self._flights: list[_Flight] = []  # weights, then state

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        options, compute_seconds = self._options, self._setting.profile.compute_seconds
        if options.mode == "stale":
            return self._stale_step(number, start, pace)
        overlaps = options.mode == "overlap"
        if overlaps and number % options.every == 0:
            start = self._open_round(start)
        if overlaps or not self._flights:
            end = pace.after(start, compute_seconds)
        else:
            end = self._read(start, pace)
        averages = self._average_every and (number + 1) % self._average_every == 0
        if (number + 1) % options.every == 0:
            for _ in range(0 if overlaps else options.exchanges):
                end = self._open_round(self._close_round(end))
            if overlaps or averages:
                end = self._close_round(end)
        if averages:
            end = synchronize(end, self._average_seconds)
            self.bytes_sent += self._average_bytes
        return end

    def seldom(self, end: Times) -> tuple[float, float]:
        """See `Steps.seldom`: averages that are far apart, as if one came after the last step."""
        apart = self._options.average_every
        if apart is None or self._average_every:
            return 0.0, 0.0
        seconds = float((synchronize(end, self._average_seconds) - end).mean())
        return seconds / apart, self._average_bytes / apart

    def _stale_step(self, number: int, start: Times, pace: Pace) -> Times:
        """A step of mode stale: a round is void unless both ends have a free snapshot."""
        mixing = 0.0
        if number % self._options.every == 0:
            send_to = self._schedule.round_peers(self._round).send_to
            partner = np.where(send_to == _NOBODY, np.arange(start.size), send_to)
            free = self._left[0] <= start
            pairs = np.where(free & free[partner], send_to, _NOBODY)
            start = self._open_round(start, RoundPeers(pairs, pairs))
            mixing = sum(flight.mixing_seconds * flight.messages for flight in self._flights)
        return pace.after(start, self._setting.profile.compute_seconds) + mixing

    def _open_round(self, now: Times, peers: RoundPeers | None = None) -> Times:
        """Copies and sends a round's snapshot; returns when each rank has copied it."""
        every = self._options.state_every
        copies = 1 + (self._state_copies if every and self._round % every == 0 else 0)
        peers = self._schedule.round_peers(self._round) if peers is None else peers
        self._round += 1
        now, self._flights = self.open(now, peers, copies)
        return now

    def _close_round(self, now: Times) -> Times:
        flights, self._flights = self._flights, []
        return self.close(now, flights)

    def _read(self, start: Times, pace: Pace) -> Times:
        """When a step ends whose forward pass reads what is in flight, layer by layer."""
        (weights, *state), self._flights = self._flights, []
        profile = self._setting.profile
        read = weights.after(start + pace.stall_seconds, profile.forward_seconds * pace.factor)
        end = self.close(read + sum(profile.backward_seconds) * pace.factor, state)
        return end + profile.optimizer_seconds * pace.factor


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


class _SudaSteps(_Exchanges):
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

    def _send(self, now: Times, first: int, exchanges: list[int]) -> tuple[Times, list[_Flight]]:
        flights: list[_Flight] = []
        for copies in exchanges:
            for round in range(first, first + self._rounds):
                now, more = self.open(now, self._schedule.round_peers(round), copies)
                flights += more
        return now, flights
