"""When steps end under gossip, or decentralized Muon: each rank waits for one partner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gossipgrad.topology import RoundPeers, by_name

from ._collective_steps import AllReduce
from ._model import Setting, Steps, Strategy, Times, check_counts, count_messages

__all__ = ["Gossip", "Suda"]

_NOBODY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(Strategy):
    """Gossip with one rotating partner a round, as `gossipgrad.gossip` does it.

    `overlap`: a snapshot taken at the start of the step travels while it computes; the step ends
    when the partner's has arrived. `sync`: the weights travel after the update; the next forward
    pass waits for each message when it reaches its layers, and the update for those of state.
    In a setting with islands, the ranks of a node average gradients behind the backward pass, each
    sends its slice of every message over the node's link, and all gather what has arrived.
    `stale`: sent at the start of a step, if an earlier snapshot is free on both ends, and mixed
    when it arrives; no step waits. A rank sends one message after another, whatever rounds they
    belong to, and takes no third snapshot before the first has left.

    Attributes:
        mode: `"overlap"`, `"sync"` or `"stale"`.
        topology: A name from `gossipgrad.topology`.
        every: Steps in a round.
        state_copies: Tensors of optimizer state sent with each parameter: 1 for momentum.
        element_bytes: Of an element on the wire; None: as in the profile.
        bucket_bytes: Size of a message.
        exchanges: Partners of a step of `sync`, one after the other; the last is hidden.
        overlap: Backward hides one more of them.
        density: Share of the weights that a round exchanges, of a shared mask.

    Raises:
        ValueError: A value is out of range, or two do not go together.
    """

    name: str = "gossip"
    mode: str = "overlap"
    topology: str = "matching"
    every: int = 1
    state_copies: int = 0
    element_bytes: int | None = None
    bucket_bytes: int = 4 << 20
    exchanges: int = 1
    overlap: bool = False
    density: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in ("overlap", "sync", "stale"):
            raise ValueError(f"mode {self.mode!r} is not modelled: choose overlap, sync or stale")
        check_counts(self, "every", "element_bytes", "bucket_bytes", "exchanges")
        check_counts(self, "state_copies", least=0)
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: give a share above 0 and at most 1")
        if self.density < 1 and self.state_copies:
            raise ValueError(
                f"density={self.density} with state_copies={self.state_copies}: a shared mask "
                "exchanges weights only; leave out one of the two"
            )
        if self.exchanges > 1 and self.mode != "sync":
            raise ValueError(f"exchanges={self.exchanges} needs mode sync, not {self.mode}")
        if self.overlap and self.exchanges == 1:
            raise ValueError("overlap hides the last of several exchanges: give exchanges=2")
        if self.mode == "stale" and not by_name(self.topology, 4).symmetric:
            raise ValueError(
                f"mode stale needs symmetric pairs, which {self.topology} has not: choose "
                "matching or hypercube"
            )

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        return _GossipSteps(self, setting) if setting.island == 1 else _IslandSteps(self, setting)


class _Flight(NamedTuple):
    """The messages of one tensor a parameter: when the first and the last of them arrive."""

    first: Times
    last: Times
    messages: int

    def after(self, now: Times, seconds: Times | float = 0.0) -> Times:
        """When all are there and `seconds` of work are done that needs them one by one."""
        needed = np.maximum(now, self.first) + seconds
        return np.maximum(needed, self.last + seconds / self.messages)

    def gathered(self, seconds: float) -> "_Flight":
        """The same after `seconds` of gathering inside islands, message by message."""
        each = seconds / self.messages
        last = np.maximum(self.first + seconds, self.last + each)
        return self._replace(first=self.first + each, last=last)


class _Exchanges(Steps):
    """Steps in which ranks send snapshots to partners, each over one link: first in, first out."""

    def __init__(
        self,
        setting: Setting,
        topology: str,
        *,
        element_bytes: int | None,
        bucket_bytes: int,
        density: float = 1.0,
        snapshots: int = 2,
    ) -> None:
        super().__init__()
        profile, p = setting.profile, setting.world_size
        self._setting, self._schedule = setting, by_name(topology, p)
        sizes = [count * (element_bytes or profile.element_bytes) for count in profile.elements]
        self._weight_bytes = density * sum(sizes)
        self.messages = count_messages(sizes, bucket_bytes)
        self.message_bytes = self._weight_bytes / self.messages
        self._link_free = np.full(p, -np.inf)
        self._left = [np.full(p, -np.inf)] * snapshots  # when the last snapshots had left

    def open(self, now: Times, peers: RoundPeers, copies: int) -> tuple[Times, list[_Flight]]:
        """Sends `copies` tensors a parameter."""
        cost, message = self._setting.network.exchange, self.message_bytes
        sends, receives = peers.send_to != _NOBODY, peers.recv_from != _NOBODY
        self.bytes_sent += copies * self._weight_bytes * float(sends.mean())
        # The oldest snapshot is overwritten when it has left.
        now = np.where(sends, np.maximum(now, self._left[0]), now)
        begin = np.maximum(now, self._link_free)
        source = np.where(receives, peers.recv_from, 0)

        def leave(count: int) -> Times:
            """When `count` messages have left."""
            # Ranks of a node that are no islands share its link.
            return begin + count * message * cost.beta_seconds_per_byte * self._setting.island

        def arrive(count: int) -> Times:
            return np.where(receives, (leave(count) + cost.alpha_seconds)[source], -np.inf)

        each = self.messages
        flights = [
            _Flight(arrive(copy * each + 1), arrive((copy + 1) * each), each)
            for copy in range(copies)
        ]
        self._link_free = np.where(sends, leave(copies * each), self._link_free)
        later = [*self._left[1:], self._link_free]
        self._left = [np.where(sends, b, a) for a, b in zip(self._left, later, strict=True)]
        return now, flights

    @staticmethod
    def close(now: Times, flights: Sequence[_Flight]) -> Times:
        """When each rank has all that its partner sent."""
        for flight in flights:
            now = flight.after(now)
        return now


class _GossipSteps(_Exchanges):
    """See `Gossip`."""

    def __init__(self, options: Gossip, setting: Setting) -> None:
        super().__init__(
            setting,
            options.topology,
            element_bytes=options.element_bytes,
            bucket_bytes=options.bucket_bytes,
            density=options.density,
            snapshots=3 if options.mode == "stale" else 2,
        )
        self._options = options
        self.cycle = options.every
        self._round = 0
        self._flights: list[_Flight] = []  # weights, then state
        self.gather_seconds = 0.0  # of one tensor a parameter, inside an island

    def step(self, number: int, start: Times, pace: Times) -> Times:
        """See `Steps.step`."""
        options, compute_seconds = self._options, self._setting.profile.compute_seconds
        is_first = number % options.every == 0
        is_last = (number + 1) % options.every == 0
        if options.mode == "stale":
            if is_first:
                self._open_if_free(start)
            return start + compute_seconds * pace
        if options.mode == "overlap":
            if is_first:
                start = self._open_round(start)
            end = start + compute_seconds * pace
            return self._close_round(end) if is_last else end
        end = self._read(start, pace) if self._flights else start + compute_seconds * pace
        for _ in range(options.exchanges - options.overlap if is_last else 0):
            end = self._open_round(self._close_round(end))
        return end

    def _open_round(self, now: Times, peers: RoundPeers | None = None) -> Times:
        """Sends a round's snapshot; returns when each rank has taken it."""
        peers = self._schedule.round_peers(self._round) if peers is None else peers
        self._round += 1
        now, flights = self.open(now, peers, 1 + self._options.state_copies)
        self._flights = [flight.gathered(self.gather_seconds) for flight in flights]
        return now

    def _open_if_free(self, start: Times) -> None:
        """A round of mode stale: void unless both ends have a free snapshot."""
        send_to = self._schedule.round_peers(self._round).send_to
        partner = np.where(send_to == _NOBODY, np.arange(start.size), send_to)
        free = self._left[0] <= start
        pairs = np.where(free & free[partner], send_to, _NOBODY)
        self._open_round(start, RoundPeers(pairs, pairs))

    def _close_round(self, now: Times) -> Times:
        flights, self._flights = self._flights, []
        return self.close(now, flights)

    def _read(self, start: Times, pace: Times) -> Times:
        """When a step ends whose forward pass reads what is in flight, layer by layer."""
        (weights, *state), self._flights = self._flights, []
        profile = self._setting.profile
        read = weights.after(start, profile.forward_seconds * pace)
        if self._options.overlap:
            read = self._open_round(read)
            state, self._flights = self._flights, []
        end = self.close(read + sum(profile.backward_seconds) * pace, state)
        return end + profile.optimizer_seconds * pace


class _IslandSteps(Steps):
    """The ranks of an island step together, as one rank of gossip does over the node's link."""

    def __init__(self, options: Gossip, setting: Setting) -> None:
        super().__init__()
        self._size, inside, profile = setting.island, setting.inside, setting.profile
        alone = replace(setting, network=inside, world_size=self._size, island=1)
        end = AllReduce().begin(alone).step(0, np.zeros(1), np.ones(1))
        lag_seconds = float(end[0]) - profile.compute_seconds  # of the mean of the last gradients
        profile = replace(profile, optimizer_seconds=profile.optimizer_seconds + lag_seconds)
        islands = setting.world_size // self._size
        self._islands = _GossipSteps(
            options, replace(setting, profile=profile, world_size=islands, island=1)
        )
        slice_bytes = self._islands.message_bytes / self._size
        gather_seconds = float(inside.all_gather(self._size)(slice_bytes))
        self._islands.gather_seconds = self._islands.messages * gather_seconds
        self.cycle = self._islands.cycle

    def step(self, number: int, start: Times, pace: Times) -> Times:
        """See `Steps.step`."""
        of_islands = [times.reshape(-1, self._size).max(axis=1) for times in (start, pace)]
        end = self._islands.step(number, *of_islands)
        self.bytes_sent = self._islands.bytes_sent / self._size
        return np.repeat(end, self._size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suda(Strategy):
    """Decentralized Muon as `gossipgrad.suda` does it by default.

    All exchanges of a step are with one partner. The weights travel behind forward and backward;
    the trackers between backward and the update, and the directions after it, are waited for.

    Attributes:
        topology: A name from `gossipgrad.topology`.
        element_bytes: Of an element on the wire; None: as in the profile.
        bucket_bytes: Size of a message.
    """

    name: str = "suda"
    topology: str = "dissemination"
    element_bytes: int | None = None
    bucket_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        check_counts(self, "element_bytes", "bucket_bytes")

    def begin(self, setting: Setting) -> Steps:
        """See `Strategy.begin`."""
        return _SudaSteps(self, setting)


class _SudaSteps(_Exchanges):
    """See `Suda`."""

    def __init__(self, options: Suda, setting: Setting) -> None:
        super().__init__(
            setting,
            options.topology,
            element_bytes=options.element_bytes,
            bucket_bytes=options.bucket_bytes,
        )

    def step(self, number: int, start: Times, pace: Times) -> Times:
        """See `Steps.step`."""
        profile, peers = self._setting.profile, self._schedule.round_peers(number)
        now, weights = self.open(start, peers, 1)
        now = now + (profile.compute_seconds - profile.optimizer_seconds) * pace
        now, trackers = self.open(now, peers, 1)
        now = self.close(now, [*weights, *trackers]) + profile.optimizer_seconds * pace
        return self.close(*self.open(now, peers, 1))
