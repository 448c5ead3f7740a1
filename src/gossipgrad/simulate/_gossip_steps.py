"""When steps end under gossip: each rank waits for one partner."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from gossipgrad.topology import RoundPeers, by_name

from ._dealing import pieces
from ._setting import Setting, Steps, Strategy, check_counts, together
from ._sharing import shared_finish
from ._workers import Pace

__all__ = ["Flight", "Gossip", "GossipSteps"]

Times = Float[np.ndarray, " rank"]
_NOBODY = -1
_LONGEST_APART = 128  # steps between averages that are stepped through


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(Strategy):
    """Gossip with one rotating partner a round, as `gossipgrad.gossip` does it.

    `overlap`: a snapshot is copied at the start of the step and travels while it computes; at its
    end the step waits for the partner's, and mixes message by message. `sync`: copied and sent
    after the update; the next forward pass waits for each message as it comes to its layers, and
    the update for those of state. `stale`: copied and sent at the start of a step, if an earlier
    snapshot is free on both ends, and mixed whenever it comes; no step waits. A rank sends one
    message after another, whatever rounds they belong to, and copies no third snapshot before the
    first has left.

    Attributes:
        mode: `"overlap"`, `"sync"` or `"stale"`.
        topology: Who meets whom: a name from `gossipgrad.topology`.
        every: Steps in a round.
        average_every: Steps between exact averages, of the state as well if it is exchanged; None:
            never.
        state_every: Rounds between exchanges of optimizer state; 0: never.
        state_copies: Tensors of state for each parameter: 1 for momentum, 2 for Adam; None: as
            in the profile.
        element_bytes: Of an element on the wire; None: as in the profile.
        bucket_bytes: Size of a message.
        exchanges: Partners that a step of `sync` meets, one after the other; the last is hidden.
        density: Share of the weights that a round exchanges, of a shared mask.
        seed: Of the rotation of partners.
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
            self, "every", "average_every", "state_copies", "element_bytes", "bucket_bytes"
        )
        check_counts(self, "exchanges")
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: it is a share, above 0 and at most 1")
        if self.exchanges > 1 and self.mode != "sync":
            raise ValueError(f"exchanges={self.exchanges} needs mode sync, not {self.mode}")
        if self.mode == "stale" and not by_name(self.topology, 4).symmetric:
            raise ValueError(
                f"mode stale needs symmetric pairs, which {self.topology} has not: take matching "
                "or hypercube"
            )
        check_counts(self, "state_every", "seed", least=0)

    def begin(self, setting: Setting) -> "GossipSteps":
        """See `Strategy.begin`."""
        return GossipSteps(self, setting)


class Flight(NamedTuple):
    """The messages of one tensor a parameter: when the first and the last of them come."""

    first: Times
    last: Times
    messages: int
    mixing_seconds: Times  # of each message

    def after(self, now: Times, seconds: Times | float = 0.0) -> Times:
        """When all are mixed and `seconds` of work are done that needs them one by one."""
        each = seconds / self.messages + self.mixing_seconds
        return np.maximum(np.maximum(now, self.first) + each * self.messages, self.last + each)


class GossipSteps(Steps):
    """See `Gossip`."""

    def __init__(self, options: Gossip, setting: Setting) -> None:
        super().__init__()
        p = setting.world_size
        self._options = options
        self._setting = setting
        self._schedule = by_name(options.topology, p, seed=options.seed)
        self.cycle = options.every * max(1, options.state_every)
        apart = options.average_every
        self._averages = apart is not None and apart <= _LONGEST_APART
        if apart is not None and self._averages:
            self.cycle = math.lcm(self.cycle, apart)
        self.rotation = self._schedule.period
        profile = setting.profile
        given = options.state_copies
        self._state_copies = profile.state_copies if given is None else given
        width = options.element_bytes or profile.element_bytes
        sizes = [count * width for count in profile.elements]
        self._weight_bytes = options.density * sum(sizes)
        self._weight_messages = pieces(sizes, options.bucket_bytes)
        # Averages are not narrowed on the wire, and take in the state if it travels at all.
        averaged = 1 + (self._state_copies if options.state_every else 0)
        sizes = [count * profile.element_bytes for count in profile.elements]
        messages = pieces(sizes, options.bucket_bytes)
        average = [profile.size_bytes / messages] * (messages * averaged)
        self._average_seconds = setting.average_seconds(average)
        self._average_bytes = setting.ring_bytes(profile.size_bytes * averaged)
        self._round = 0
        self._link_free = np.full(p, -np.inf)
        snapshots = 3 if options.mode == "stale" else 2
        self._left = [np.full(p, -np.inf)] * snapshots  # when the last ones had left
        self._flights: list[Flight] = []  # weights, then state

    def step(self, number: int, start: Times, pace: Pace) -> Times:
        """See `Steps.step`."""
        options, setting = self._options, self._setting
        if options.mode == "stale":
            return self._without_waiting(number, start, pace)
        overlaps = options.mode == "overlap"
        if overlaps and number % options.every == 0:
            start = self._open_round(start)
        if overlaps or not self._flights:
            end = pace.after(start, setting.profile.compute_seconds)
        else:
            end = self._read(start, pace)
        apart = options.average_every
        averages = apart is not None and self._averages and (number + 1) % apart == 0
        if (number + 1) % options.every == 0:
            if not overlaps:
                for _ in range(options.exchanges - 1):
                    end = self._open_round(end)
                    end = self.close(end, self._flights)
                end = self._open_round(end)
            if overlaps or averages:
                end, self._flights = self.close(end, self._flights), []
        if apart is not None and self._averages and (number + 1) % apart == 0:
            end = together(end, self._average_seconds)
            self.bytes_sent += self._average_bytes
        return end

    def seldom(self, end: Times) -> tuple[float, float]:
        """See `Steps.seldom`: averages that are far apart, by what one after that step costs."""
        apart = self._options.average_every
        if apart is None or self._averages:
            return 0.0, 0.0
        seconds = float((together(end, self._average_seconds) - end).mean())
        return seconds / apart, self._average_bytes / apart

    def _without_waiting(self, number: int, start: Times, pace: Pace) -> Times:
        """A step of mode stale: a round is void unless both ends have a free snapshot."""
        mixing = 0.0
        if number % self._options.every == 0:
            peers = self._schedule.round_peers(self._round)
            partner = np.where(peers.send_to == _NOBODY, np.arange(start.size), peers.send_to)
            free = self._left[0] <= start
            counts = (peers.send_to != _NOBODY) & free & free[partner]
            start = self._open_round(start, np.where(counts, peers.send_to, _NOBODY))
            mixing = sum(flight.mixing_seconds * flight.messages for flight in self._flights)
        return pace.after(start, self._setting.profile.compute_seconds) + mixing

    def _open_round(self, now: Times, pairs: np.ndarray | None = None) -> Times:
        """Copies and sends a round's snapshot, all or those of `pairs`; when each has copied it."""
        options, peers = self._options, self._schedule.round_peers(self._round)
        if pairs is not None:
            peers = RoundPeers(pairs, pairs)
        with_state = options.state_every and self._round % options.state_every == 0
        copies = 1 + (self._state_copies if with_state else 0)
        self._round += 1
        now, self._flights = self.open(now, peers, copies)
        return now

    def open(self, now: Times, peers: RoundPeers, copies: int) -> tuple[Times, list[Flight]]:
        """Copies and sends so many tensors a parameter; when that is copied, and what comes."""
        network = self._setting.network
        size, message = copies * self._weight_bytes, self._weight_bytes / self._weight_messages
        sends = peers.send_to != _NOBODY
        self.bytes_sent += size * float(sends.mean())
        # The oldest snapshot is written again when it has left.
        now = np.where(sends, np.maximum(now, self._left[0]), now)
        copy_all, copy_first = (network.snapshot_seconds_per_byte * n for n in (size, message))
        begin = np.maximum(now + copy_first, self._link_free)
        alphas, betas = self._costs(peers, sends, begin, size)
        in_each = self._weight_messages

        def leaves(number: int) -> Times:
            """When so many messages have left."""
            copied = now + number * copy_first + message * betas
            return np.maximum(begin + number * message * betas, copied)

        last = leaves(copies * in_each)
        self._link_free = np.where(sends, last, self._link_free)
        later = [*self._left[1:], self._link_free]
        self._left = [np.where(sends, b, a) for a, b in zip(self._left, later, strict=True)]
        source = np.where(peers.recv_from == _NOBODY, 0, peers.recv_from)
        receives = peers.recv_from != _NOBODY
        mix = np.where(receives, network.mix_seconds_per_byte, 0.0) * message

        def comes(number: int) -> Times:
            return np.where(receives, (leaves(number) + alphas)[source], -np.inf)

        flights = [
            Flight(comes(copy * in_each + 1), comes((copy + 1) * in_each), in_each, mix)
            for copy in range(copies)
        ]
        return np.where(sends, now + copy_all, now), flights

    def close(self, now: Times, flights: Sequence[Flight]) -> Times:
        """When each rank has mixed what its partner sent, one message after the other."""
        for flight in flights:
            now = flight.after(now)
        return now

    def _read(self, start: Times, pace: Pace) -> Times:
        """When a step ends whose forward pass reads what is in flight, layer by layer."""
        (weights, *state), self._flights = self._flights, []
        profile = self._setting.profile
        read = weights.after(start + pace.stall_seconds, profile.forward_seconds * pace.factor)
        end = self.close(read + sum(profile.backward_seconds) * pace.factor, state)
        return end + profile.optimizer_seconds * pace.factor

    def _costs(
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
