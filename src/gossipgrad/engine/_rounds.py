"""Rounds: opening one sends snapshots to the partner, closing it mixes the received parts."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm import Channel, Outcome, Recorder
from gossipgrad.engine._flow import Delta, Flow
from gossipgrad.engine._island import Island
from gossipgrad.engine._modes import Mode, Stale
from gossipgrad.engine._repeated_shards import RepeatedShards
from gossipgrad.engine._transfer import Transfer
from gossipgrad.engine._waits import Waits
from gossipgrad.errors import GossipError
from gossipgrad.topology import Peers, Schedule, Weighted

__all__ = ["COLLECTIVE_SECONDS", "PairDistance", "Rounds"]

logger = logging.getLogger(__name__)

COLLECTIVE_SECONDS = 300.0  # in a collective that all have entered, for parts in flight
_LAST_ROUNDS, _MANY_VOID = 50, 26  # warn if so many of so many rounds are void
_MOSTLY_VOID_SECONDS = 5.0  # before the warning: evaluations of others take a while
_MOST_NAMED = 1024  # of rounds jumped over, only the last partners are notified

_COUNTS = (  # saved and loaded under these names
    *("closed_rounds", "late_rounds", "void_rounds"),
    *("exposed_seconds", "mixing_seconds"),
)
_LINK_COUNTS = ("bytes_sent", "bytes_received", "refused")

FlowsOf = Callable[[int], Sequence[Flow]]
"""Returns the flows that are due in a round."""


def release(transfers: Sequence[Transfer]) -> None:
    """Return the snapshots of transfers to their pools."""
    for transfer in transfers:
        transfer.release()


class PairDistance:
    """Squared distances to the partners of the last period; an estimate without traffic."""

    def __init__(self) -> None:
        self._rounds: list[Sequence[Tensor]] = []

    def note(self, squares: Sequence[Tensor], period: int) -> None:
        """Add the parts of a round's square, if any; keep those of the last `period` rounds."""
        if squares:
            self._rounds = [*self._rounds, squares][-period:]

    def state_dict(self) -> list[list[float]]:
        """Return the squares as numbers, one list per round."""
        return [[float(square) for square in round] for round in self._rounds]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Load the result of `state_dict`."""
        self._rounds = [
            [torch.tensor(s, dtype=torch.float64, device="cpu") for s in r] for r in state
        ]

    def estimate(self, world_size: int) -> float | None:
        """Estimate the RMS distance of replicas to their mean; None before any pair."""
        if not self._rounds:
            return None
        # |x_i - x_j|^2 of independent replicas is 2 p / (p - 1) times that square.
        p = max(2, world_size)
        mean = sum(float(square) for round in self._rounds for square in round) / len(self._rounds)
        return math.sqrt(mean * (p - 1) / (2 * p))


class Rounds:
    """The rounds of one session: the next one, transfers in flight, and counters.

    All flows of a round share one partner. Nothing here is a collective, and no call raises for a
    late, dead or departed partner: the outcome is counted and training continues.

    The modes differ in three numbers: how long a step waits for its partner, how many rounds later
    a part may arrive, and the weight of a delta. In mode stale a step never waits. This rank's next
    round is then `max(own + 1, highest received)`, and the rounds between are void. So is a round
    whose partner has not answered an earlier one for more than `max_staleness` rounds: a partner
    that hangs holds one or two snapshots, not all.

    A rank voids a round only before it says READY, and notifies the partner immediately, so an
    exchange counts on both ends or on neither.

    Args:
        channel: Exchanges are posted on it.
        schedule: The partners of each round.
        mode: See above.
        recorder: Gets the spans, if not None.
        island: The ranks that share this replica, None for this one alone. All of them call the
            same methods in the same order.

    Attributes:
        never_waits: Whether no step waits for a partner: mode stale.
        next_round: The next round to be opened.
        starts: In mode stale, rounds opened without a step: the first, and after averages.
        closed_rounds: Number of closed rounds.
        late_rounds: Rounds whose parts had not arrived when they were due.
        void_rounds: Rounds that one of the two ends voided before it sent its part.
        outcomes: How exchanges ended, counted by bucket.
        exposed_seconds: Time that steps were blocked on partners.
        mixing_seconds: Time spent on snapshots and mixing.
        pair_distance: Distances to the partners of the last period.
        repeats: Shards that other ranks of the island hold, too, if there are any.
    """

    def __init__(
        self,
        channel: Channel,
        schedule: Schedule,
        mode: Mode,
        *,
        recorder: Recorder | None = None,
        island: Island | None = None,
    ) -> None:
        self.channel = channel
        self.island = island
        self.schedule = schedule
        self.next_round = self.starts = 0
        self.closed_rounds = self.late_rounds = self.void_rounds = 0
        self.exposed_seconds = self.mixing_seconds = 0.0
        self.outcomes: Counter[Outcome] = Counter()
        self.pair_distance = PairDistance()
        self.repeats: RepeatedShards | None = None
        self._rank = channel.rank
        self._partners: tuple[Schedule | None, int, Peers] = None, 0, Peers(None, None)
        self.never_waits = isinstance(mode, Stale)
        self._max_staleness = mode.max_staleness if isinstance(mode, Stale) else 0
        self._largest_weight = mode.weight if isinstance(mode, Stale) else math.inf
        self._waits = Waits(channel, 0.0 if isinstance(mode, Stale) else mode.patience_seconds)
        self._is_behind = False  # a partner has voided a round
        self._recorder = recorder
        self._in_flight: list[Transfer] = []  # in the order of their rounds
        self._opened = 0  # this rank's own rounds, sent or void
        self._early_squares: list[Tensor] = []  # of buckets mixed before `close`
        self._last_void = -1
        self._voids: deque[int] = deque(maxlen=_MANY_VOID)
        # When the last such round was; infinite after the warning.
        self._rarely_void_seconds = time.perf_counter()
        self._before = dict.fromkeys(_LINK_COUNTS, 0)  # counts of the run before a resume

    def count(self, name: str) -> int:
        """Return `"bytes_sent"`, `"bytes_received"` or `"refused"` since the run's start."""
        return self._before[name] + getattr(self.channel, name)

    @property
    def partners(self) -> Peers:
        """This rank's partners in the next round; they are computed once a round."""
        schedule, round, peers = self._partners
        if schedule is not self.schedule or round != self.next_round:
            peers = self.schedule.peers(self.next_round, self._rank)
            self._partners = self.schedule, self.next_round, peers
        return peers

    @property
    def in_flight(self) -> Sequence[Transfer]:
        """Transfers that were sent and are not mixed, in the order of their rounds."""
        return [*self._in_flight]

    @property
    def has_late(self) -> bool:
        """Whether parts of closed rounds are still awaited."""
        return bool(self._late())

    def heard(self) -> int:
        """Return the highest round that a message has named, on any rank of an island."""
        heard = self.channel.heard
        return heard if self.island is None else self.island.largest(heard)

    def on_all(self, value: bool) -> bool:
        """Return whether a value is true on all ranks of an island."""
        return value if self.island is None else not self.island.largest(not value)

    def begin_step(self) -> None:
        """Let the next step wait as long as one may."""
        self._waits.begin_step()

    def position(self, steps: int, every: int) -> int:
        """Return the run's position in steps, for a rank that has made `steps`.

        In mode stale that is the number of past rounds, including those jumped over, in steps.
        """
        if self.never_waits:
            return max(0, self.next_round - self.starts) * every + steps % every
        return steps

    # -- one round: open, close, and both in one --------------------------------------------

    def start(self, flows: Sequence[Flow]) -> None:
        """Open a round without a step: the first, or after a collective."""
        before = self.next_round
        try:
            self.open(flows)
        finally:
            if self.never_waits:  # rounds are then not counted by steps
                self.starts += self.next_round - before

    def open(self, flows: Sequence[Flow]) -> None:
        """Take snapshots of the flows and send them to the next round's partner.

        Mixes nothing unless snapshots are needed, so that weights stay as a collective or a loaded
        state left them.
        """
        start = time.perf_counter()
        transfers, round = self.begin(flows, frees_late=True), self.next_round
        self.send(transfers, flows)
        self._spent("snapshot", start, round=round)

    def close(self) -> None:
        """Wait for the partner's parts as long as a step may, and mix them; also late ones."""
        self._align(self.next_round)
        self._close()
        self.equalize()

    def _close(self, following: Mapping[Flow, Transfer] | None = None) -> None:
        """Close a round; each bucket is copied into a `following` transfer after it is mixed."""
        self._settle(following)
        self.closed_rounds += 1

    def equalize(self, following: Sequence[Transfer] = ()) -> None:
        """Let ranks of the island that repeat a shard have equal ones, where a part was missed."""
        if self.repeats is not None:
            missed = self.outcomes.total() - self.outcomes[Outcome.DELIVERED]
            self.repeats.after_mixing(missed, has_late=self.has_late, following=following)

    def _settle(self, following: Mapping[Flow, Transfer] | None = None) -> None:
        """Mix late parts, and those of the open round, for which a step may wait."""
        squares, self._early_squares = self._early_squares, []
        deadline = 0.0 if self.never_waits else None
        if self.island is None:
            squares += self._mix(self._late(), 0.0)
        else:
            squares += self._mix_gathered(self.island, deadline, following)
        own = [transfer for transfer in self._open() if not transfer.flow.is_sliced]
        squares += self._mix(own, deadline, following)
        self.pair_distance.note(squares, self.schedule.period)
        for transfer in self._in_flight:
            transfer.is_closed = True
        self._count_late()

    def advance(self, flows_of: FlowsOf) -> None:
        """Close the round and open the next.

        A bucket is copied after the one before it is mixed, and posted after all are mixed: earlier
        it would share the link with the rest of this round.

        Closes before it opens if the next partner is already late, or no snapshot is free.
        """
        self._choose_round()
        flows = flows_of(self.next_round)
        following = self._following(flows)
        if following is None:
            self._close()
            self.open(flows)
        else:
            try:
                self._close(following)
                start, round = time.perf_counter(), self.next_round
                self.send(list(following.values()), flows)
            except BaseException:
                release([t for t in following.values() if not t.exchanges])
                raise
            self._spent("snapshot", start, round=round)
        if self.never_waits and self.island is None:  # the partner may have been ready before
            self.pair_distance.note(self._mix(self._open(), 0.0), self.schedule.period)

    def _choose_round(self) -> None:
        """Jump to the highest round that this rank knows of, if it has to.

        In mode stale it always does. Otherwise a rank whose partner was past their round does:

        1. Rank 3 sleeps for a minute, and the others stop waiting for it.
        2. It wakes a thousand rounds behind, and each partner is past the round that they share.
        3. If it went through all of them, each rank would wait for it whenever they meet, until
           all had waited a minute.
        4. A rank that is a few rounds behind catches up, as the others wait for it. Of ranks that
           wait for each other none is further ahead than their number.
        """
        self.channel.poll()
        is_far = self.channel.heard - self.next_round >= self.schedule.world_size
        jumps = self.never_waits or (self._is_behind and is_far and self.schedule.symmetric)
        self.jump(self._align(self.channel.heard if jumps else self.next_round))
        self._is_behind = False

    def _align(self, to_round: int) -> int:
        """Return the highest `to_round` of the ranks of the island, and mix their late parts."""
        if self.island is None:
            return to_round
        self.pair_distance.note(self._mix(self._late(), 0.0), self.schedule.period)
        return self.island.mix_late(to_round)

    def begin(self, flows: Sequence[Flow], *, frees_late: bool = False) -> list[Transfer]:
        """Create one transfer per flow to the next round's partner, without sending.

        Return an empty list if this rank sits out, or if the round is void, of which the partner is
        notified. `frees_late` gets a free snapshot of every flow: parts that have arrived are
        mixed, and then late rounds are cancelled, the oldest first.
        """
        peers, transfers = self.partners, None
        if not self._owes(peers.send_to):
            transfers = self._begin(flows, 0.0)
            if transfers is None and not self.never_waits:
                transfers = self._begin_patiently(flows, frees_late=frees_late)
        if transfers is None:
            self.void(self.next_round, peers)
            return []
        return transfers

    def send(self, transfers: Sequence[Transfer], flows: Sequence[Flow]) -> None:
        """Send the next round completely or not at all, even when Ctrl-C interrupts it.

        Afterwards the sent transfers are in flight. If there are none, the partner is notified. An
        island begins to gather its `flows`.
        """
        try:
            self.equalize(transfers)
            for transfer in transfers:
                transfer.post_all()
        except BaseException:
            if any(transfer.exchanges for transfer in transfers):
                for transfer in transfers:
                    transfer.post_all()
            else:
                self.void(self.next_round, self.partners)
            raise
        finally:
            self.next_round += 1
            self._opened += 1
            release([transfer for transfer in transfers if not transfer.exchanges])
            for transfer in transfers:
                if transfer.exchanges:  # a shard may be empty
                    transfer.opened = self._opened
                    self._in_flight.append(transfer)
            if self.island is not None:
                sent = [transfer for transfer in transfers if transfer.exchanges]
                self.island.begin(flows, sent, self.weight)

    def correct(self, flows: Sequence[Flow], momentum: float) -> None:
        """Add their corrections to the weights, as the optimizers have stepped."""
        start = time.perf_counter()
        for flow in flows:
            for bucket in flow.buckets:
                bucket.correct(momentum)
        self._spent("mix", start, round=self.next_round)

    def mix_early(self, flow: Flow, bucket: int) -> bool:
        """Mix one bucket of the open round before `close`, with the same wait.

        Return False if it is late; `close` then mixes it.
        """
        is_in_time = True
        for transfer in self._open():
            if transfer.flow is flow and bucket in transfer.exchanges.keys() - transfer.finished:
                outcome = self.receive(transfer, bucket)
                if outcome is Outcome.LATE:
                    is_in_time = False
                else:
                    self._mix_received(transfer, bucket, self._early_squares)
        return is_in_time

    def drain(self, wait_seconds: float) -> None:
        """Mix everything in flight that arrives within `wait_seconds`."""
        squares, self._early_squares = self._early_squares, []
        deadline = time.perf_counter() + wait_seconds
        if self.island is not None:
            squares += self._mix_gathered(self.island, deadline)
        squares += self._mix(self._in_flight, deadline)
        self.pair_distance.note(squares, self.schedule.period)
        self._align(0)

    def catch_up(self, *, closes: bool) -> None:
        """Mix late parts, waiting as in a step, and cancel those that are still late.

        The open round stays open unless `closes`.
        """
        if closes:
            self._settle()
        self.pair_distance.note(self._mix(self._late(), None), self.schedule.period)
        while late := self._late():
            self._give_up(late[0])
        self._align(0)

    def jump(self, to_round: int) -> None:
        """Void rounds up to `to_round`, which is then the next, and notify partners."""
        if to_round <= self.next_round:
            return
        named = range(max(self.next_round, to_round - _MOST_NAMED), to_round)
        last = {self.schedule.peers(round, self._rank).send_to: round for round in named}
        for partner, round in last.items():  # the last one implies those before it
            self.channel.void(round, partner)
        self.outcomes[Outcome.VOID] += to_round - self.next_round
        self.void_rounds += to_round - self.next_round
        self.next_round = to_round

    def stop(self, wait_seconds: float, linger_seconds: float) -> None:
        """End the rounds: mix parts that arrive within `wait_seconds`, then close the channel."""
        try:
            if wait_seconds > 0:
                self.drain(wait_seconds)
        except GossipError:
            if self.island is None:  # otherwise another rank of it has ended before
                raise
        finally:
            if self.island is not None:
                self.island.close()
            for transfer in self._in_flight:
                transfer.cancel()
            self._in_flight = []
            self.channel.close(linger_seconds)

    def cancel(self) -> None:
        """Cancel everything in flight without waiting."""
        for transfer in self._in_flight:
            transfer.cancel()
        self._in_flight = []
        if self.island is not None:
            self.island.end()

    def void(self, round: int, peers: Peers) -> None:
        """Void a round before any part of it was sent, and notify the partner."""
        self.channel.void(round, peers.send_to)
        self.outcomes[Outcome.VOID] += 1
        self._note_void(round)

    def weight(self, transfer: Transfer) -> float:
        """Return the weight of a transfer's deltas; of a matrix at most what the mode allows."""
        largest = self._largest_weight
        weight = self.schedule.weight(transfer.round, self._rank, default=min(0.5, largest))
        # Of ranks that count unequally both take together what the mode allows.
        return weight if isinstance(self.schedule, Weighted) else min(largest, weight)

    def receive(self, transfer: Transfer, bucket: int, deadline: float | None = None) -> Outcome:
        """Wait for one bucket until `deadline`, or as long as a step may; count the outcome."""
        exchange = transfer.exchanges[bucket]
        start = time.perf_counter()
        waits = deadline is None
        outcome = self._waits.take(exchange) if waits else transfer.wait(bucket, deadline)
        end = time.perf_counter()
        self.exposed_seconds += end - start
        self._span("wait", start, end, round=transfer.round, bucket=exchange.bucket)
        if outcome is not Outcome.LATE and bucket not in transfer.counted:
            transfer.counted.add(bucket)
            self.outcomes[outcome] += 1
            if outcome in (Outcome.VOID, Outcome.DEAD_PEER):
                self._note_void(transfer.round, is_void=outcome is Outcome.VOID)
                self._is_behind |= outcome is Outcome.VOID
            times = exchange.posted_seconds, exchange.finished_seconds or end
            self._span("exchange", *times, **transfer.describe(bucket))
        return outcome

    def mix(self, transfer: Transfer, bucket: int, delta: Delta | None) -> None:
        """Add a delta, if not None, to its bucket, and finish the bucket."""
        if delta is None:
            transfer.finished.add(bucket)
            transfer.snapshot.drop(bucket)
            return
        start = time.perf_counter()
        # Right before: an interrupt that arrives while torch adds is raised afterwards.
        transfer.finished.add(bucket)
        transfer.flow.buckets[bucket].add(delta, self.weight(transfer))
        transfer.forget(bucket)
        self._spent("mix", start, round=transfer.round, bucket=bucket)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values, as if the open round were not sent yet."""
        # It is sent again after a resume, and counts are then as those of a run without a stop.
        unsent = [each for one in self._open() for each in one.exchanges.values()]
        counts = self.channel.counts_without(unsent)
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "pair_distance": self.pair_distance.state_dict(),
            "links": {name: self._before[name] + count for name, count in counts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; on all ranks, with nothing in flight."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.outcomes = Counter({Outcome(name): n for name, n in state["outcomes"].items()})
        self.pair_distance.load_state_dict(state["pair_distance"])
        links = state["links"]
        self._before = {name: links[name] - getattr(self.channel, name) for name in _LINK_COUNTS}

    def _open(self) -> list[Transfer]:
        """Return the transfers of rounds that are open: one round, or several of one step."""
        return [transfer for transfer in self._in_flight if not transfer.is_closed]

    def _late(self) -> list[Transfer]:
        """Return the transfers of rounds that were closed before their parts arrived."""
        return [transfer for transfer in self._in_flight if transfer.is_closed]

    def _mix(
        self,
        transfers: Sequence[Transfer],
        deadline: float | None,
        following: Mapping[Flow, Transfer] | None = None,
    ) -> list[Tensor]:
        """Mix the parts of transfers that arrive until `deadline`; return the deltas' squares.

        0: what has arrived; None: as long as a step may wait. A transfer is in flight until it is
        finished.
        """
        squares: list[Tensor] = []
        self.channel.poll()
        for transfer in list(transfers):
            next_transfer = None if following is None else following.get(transfer.flow)
            for bucket in sorted(transfer.exchanges):
                if bucket in transfer.finished:
                    continue
                is_late = deadline == 0 and transfer.exchanges[bucket].open
                if not is_late and self.receive(transfer, bucket, deadline) is not Outcome.LATE:
                    self._mix_received(transfer, bucket, squares)
                if next_transfer is not None:
                    start = time.perf_counter()
                    next_transfer.fill(bucket)
                    self.mixing_seconds += time.perf_counter() - start
            if transfer.is_finished:
                transfer.release()
                self._in_flight.remove(transfer)
        return squares

    def _mix_gathered(
        self,
        island: Island,
        deadline: float | None,
        following: Mapping[Flow, Transfer] | None = None,
    ) -> list[Tensor]:
        """As `_mix`, for the open round of an island: its ranks mix the slices of all."""
        squares: list[Tensor] = []
        round = island.round
        if round is None:
            return squares
        self.channel.poll()
        if deadline == 0:
            island.release()
        for number, (flow, bucket, sliced) in enumerate(round.buckets):
            transfer = round.transfers.get(flow)
            if transfer is not None and deadline != 0:
                self.receive(transfer, bucket, deadline)
            start = time.perf_counter()
            gathered = island.gathered(number)
            self.exposed_seconds += time.perf_counter() - start
            if gathered is not None:
                start = time.perf_counter()
                sliced.mix(gathered)
                self._spent("mix", start, round=self.next_round - 1, bucket=bucket)
            if transfer is not None:
                if number in round.taken:
                    self.receive(transfer, bucket, 0.0)  # counts it
                    delta = transfer.delta(bucket)
                    if delta is not None and delta.square is not None:
                        squares.append(delta.square * island.slices)  # of a slice
                    transfer.finished.add(bucket)
                    transfer.forget(bucket)
                elif transfer.exchanges[bucket].outcome in (Outcome.VOID, Outcome.DEAD_PEER):
                    self.receive(transfer, bucket, 0.0)
                    self.mix(transfer, bucket, None)
            if following is not None and flow in following:
                start = time.perf_counter()
                following[flow].fill(bucket)
                self.mixing_seconds += time.perf_counter() - start
        island.round = None
        for transfer in round.transfers.values():
            if transfer.is_finished:
                transfer.release()
                self._in_flight.remove(transfer)
        return squares

    def _count_late(self) -> None:
        """Count, once each, the rounds whose parts are later than the mode allows."""
        for transfer in self._late():
            if transfer.was_late or self._opened - transfer.opened < self._max_staleness:
                continue
            late_rounds = {one.round for one in self._in_flight if one.was_late}
            transfer.was_late = True
            self.outcomes[Outcome.LATE] += len(transfer.exchanges) - len(transfer.finished)
            if transfer.round in late_rounds:
                continue
            self.late_rounds += 1
            if not self.never_waits:
                logger.warning(
                    "rank %d: rank %s is too late in round %d; continuing without it",
                    self._rank,
                    transfer.peers.recv_from,
                    transfer.round,
                )

    def _owes(self, partner: int | None) -> bool:
        """Whether the partner has not answered for longer than mode stale allows."""
        return self.never_waits and any(
            transfer.peers.send_to == partner
            and self._opened + 1 - transfer.opened > self._max_staleness
            for transfer in self._in_flight
        )

    def _mix_received(self, transfer: Transfer, bucket: int, squares: list[Tensor]) -> None:
        delta = transfer.delta(bucket)
        if delta is not None and delta.square is not None:
            squares.append(delta.square)
        self.mix(transfer, bucket, delta)

    def _begin(self, flows: Sequence[Flow], timeout_seconds: float) -> list[Transfer] | None:
        """Create one transfer per flow; [] if this rank sits out, None without a free snapshot."""
        peers = self.partners
        if peers.send_to is None and peers.recv_from is None:
            return []
        transfers: list[Transfer] = []
        try:
            for flow in flows:
                snapshot = flow.pool.acquire(lambda: self.channel.poll(0.001), timeout_seconds)
                if snapshot is None:
                    break
                transfer = Transfer(flow, self.channel, self.next_round, peers, snapshot)
                if self.island is not None:
                    transfer.on_arrival = self.island.wake
                transfers.append(transfer)
            else:
                return transfers
        except BaseException:
            release(transfers)
            raise
        release(transfers)
        return None

    def _following(self, flows: Sequence[Flow]) -> dict[Flow, Transfer] | None:
        """Create the next round's transfers early, if that is possible without waiting."""
        if self.partners.recv_from in {t.peers.recv_from for t in self.in_flight}:
            return None
        transfers = self._begin(flows, 0.0)
        return None if transfers is None else {t.flow: t for t in transfers}

    def _begin_patiently(self, flows: Sequence[Flow], *, frees_late: bool) -> list[Transfer] | None:
        """As `_begin`, with snapshots of late rounds: a late partner must not block the rest."""
        transfers: list[Transfer] | None = None
        if frees_late:
            self._mix(self._late(), 0.0)
            transfers = self._begin(flows, 0.0)
            while transfers is None and (late := self._late()):
                self._give_up(late[0])
                transfers = self._begin(flows, 0.0)
        if transfers is None:  # they are on the way to partners that are ready
            transfers = self._begin(flows, self._waits.transfer_seconds)
        if transfers is None:
            logger.warning(
                "rank %d: round %d is void, its last snapshots are still being sent",
                self._rank,
                self.next_round,
            )
        return transfers

    def _give_up(self, transfer: Transfer) -> None:
        """Cancel a late round."""
        self._in_flight.remove(transfer)
        transfer.cancel()
        logger.warning(
            "rank %d: gave up round %d with rank %s, which is late; if that has begun to send, "
            "the mean may shift by the part that only it mixes",
            self._rank,
            transfer.round,
            transfer.peers.recv_from,
        )

    def _note_void(self, round: int, *, is_void: bool = True) -> None:
        """Count a round that is void, or without a partner, once; warn once if most are."""
        if round == self._last_void:
            return
        if is_void:
            self.void_rounds += 1
        self._last_void = round
        self._voids.append(round)
        if len(self._voids) < _MANY_VOID or round - self._voids[0] >= _LAST_ROUNDS:
            self._rarely_void_seconds = max(self._rarely_void_seconds, time.perf_counter())
        elif time.perf_counter() > self._rarely_void_seconds + _MOSTLY_VOID_SECONDS:
            self._rarely_void_seconds = math.inf
            logger.warning(
                "rank %d: most of its last %d rounds were void, or their partners are gone, so it "
                "trains alone: its partners wait in a collective of the session that this rank has "
                "not called (every rank must call it), they take far fewer steps, or the network "
                "between them is cut; session.stats() counts all three",
                *(self._rank, _LAST_ROUNDS),
            )

    def _spent(self, name: str, start: float, **attributes: object) -> None:
        end = time.perf_counter()
        self.mixing_seconds += end - start
        self._span(name, start, end, **attributes)

    def _span(self, name: str, start: float, end: float, **attributes: object) -> None:
        if self._recorder is not None:
            self._recorder.span(name, start, end, **attributes)
