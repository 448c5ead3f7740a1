"""Rounds: opening one sends snapshots to the partner, closing it mixes what came back."""

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
from gossipgrad.engine._listener import Listener
from gossipgrad.engine._pacing import RoundBefore
from gossipgrad.engine._transfer import Transfer, earlier_of_partner, release
from gossipgrad.engine._waits import Deadlines, Patience
from gossipgrad.topology import Peers, Schedule

__all__ = ["COLLECTIVE_SECONDS", "PairDistance", "Rounds"]

logger = logging.getLogger(__name__)

COLLECTIVE_SECONDS = 300.0  # in a collective, which all have entered: for what is in flight
_LAST_ROUNDS, _MANY_VOID = 50, 26  # void rounds are many if so many lie among so many
_MOSTLY_VOID_SECONDS = 5.0  # before it is said: evaluations of others take a while
_MOST_NAMED = 1024  # of the rounds jumped over, partners of the last are notified

_COUNTS = (  # each saved and loaded under its own name
    *("closed_rounds", "late_rounds", "void_rounds"),
    *("exposed_seconds", "mixing_seconds"),
)
_LINK_COUNTS = ("bytes_sent", "bytes_received", "refused")

FlowsOf = Callable[[int], Sequence[Flow]]
"""The flows that are due in a round."""


class PairDistance:
    """Squared distances to the partners of the last period; an estimate that costs no traffic."""

    def __init__(self) -> None:
        self._rounds: list[Sequence[Tensor]] = []

    def note(self, squares: Sequence[Tensor], period: int) -> None:
        """Adds the parts of a round's square, if there are any; a period has so many rounds."""
        if squares:
            self._rounds = [*self._rounds, squares][-period:]

    def state_dict(self) -> list[list[float]]:
        """The squares as numbers, a list a round."""
        return [[float(square) for square in round] for round in self._rounds]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Takes over what `state_dict` returned."""
        self._rounds = [[torch.tensor(s, dtype=torch.float64) for s in r] for r in state]

    def estimate(self, world_size: int) -> float | None:
        """Root mean square distance of replicas to their mean, from those pairs; None before any.

        `|x_i - x_j|^2` of independent replicas is `2 p / (p - 1)` times that square.
        """
        if not self._rounds:
            return None
        p = max(2, world_size)
        mean = sum(float(square) for round in self._rounds for square in round) / len(self._rounds)
        return math.sqrt(mean * (p - 1) / (2 * p))


class Rounds:
    """The rounds of one session: which is next, what is in flight, what was late, what it cost.

    All flows of a round share one partner. Nothing here is a collective, and no call raises for a
    late, dead or departed partner: the outcome is counted and training goes on.

    Args:
        channel: Where exchanges are posted.
        schedule: Who meets whom in which round.
        deadlines: How long closing a round waits for each partner.
        recorder: Gets the spans, if there is one.

    Attributes:
        next_round: The next one to be opened.
        closed_rounds: How many are over.
        patience: For waits in vain of one step.
        late_rounds: Rounds whose parts had not arrived when they were due.
        void_rounds: Rounds that one of the two ends gave up before it sent its part.
        outcomes: How exchanges ended, counted by bucket.
        exposed_seconds: Time that steps were blocked on partners.
        mixing_seconds: Time spent on snapshots and mixing.
        pair_distance: To the partners of the last period.
    """

    def __init__(
        self,
        channel: Channel,
        schedule: Schedule,
        *,
        deadlines: Deadlines,
        recorder: Recorder | None = None,
    ) -> None:
        self.channel = channel
        self.schedule = schedule
        self.next_round = 0
        self.closed_rounds = self.late_rounds = self.void_rounds = 0
        self.exposed_seconds = self.mixing_seconds = 0.0
        self.patience = Patience()
        self.outcomes: Counter[Outcome] = Counter()
        self.pair_distance = PairDistance()
        self._rank = channel.rank
        self._deadlines = deadlines
        self._recorder = recorder
        self._listener = Listener(channel)
        self._sent = RoundBefore()
        self._open: list[Transfer] = []
        self._late: list[Transfer] = []
        self._early_squares: list[Tensor] = []  # of buckets mixed ahead of `close`
        self._last_void = self._last_late = -1
        self._voids: deque[int] = deque(maxlen=_MANY_VOID)
        self._rarely_void_seconds = time.perf_counter()  # when last; infinite: has warned
        self._before = dict.fromkeys(_LINK_COUNTS, 0)  # of a run that is resumed

    def count(self, name: str) -> int:
        """`"bytes_sent"`, `"bytes_received"` or `"refused"` of the channel, before a resume too."""
        return self._before[name] + getattr(self.channel, name)

    @property
    def partners(self) -> Peers:
        """Whom this rank meets in the next round."""
        return self.schedule.peers(self.next_round, self._rank)

    @property
    def in_flight(self) -> Sequence[Transfer]:
        """What was sent and is not mixed, of the open round and late ones."""
        return [*self._late, *self._open]

    @property
    def has_late(self) -> bool:
        """Whether parts of closed rounds are still awaited."""
        return bool(self._late)

    @property
    def longest_wait_seconds(self) -> float:
        """How long a step may still wait for what is worth nothing later, a gradient."""
        return self.patience.left(self._deadlines.ceiling_seconds)

    def position(self, steps: int, every: int) -> int:
        """How far the run has come, in steps, for a rank that has made `steps`."""
        return steps

    def begin(self, flows: Sequence[Flow], *, frees_late: bool = False) -> list[Transfer]:
        """A transfer a flow to the next round's partner, with nothing sent yet.

        None at all if this rank sits out, or cannot have a snapshot of every flow: the round is
        void then, as a whole, and the partner is notified. With `frees_late`, snapshots that late
        rounds hold are freed before that: what has arrived of them is mixed, the oldest given up.
        """
        wait = self._deadlines.of(self.partners.send_to)
        transfers = self._begin(flows, wait)
        if transfers is None and frees_late:
            self._mix_late([], time.perf_counter())
            transfers = self._begin(flows, wait)
        while transfers is None and frees_late and self._late:
            self._give_up_oldest()
            transfers = self._begin(flows, wait)
        if transfers is not None:
            return transfers
        self.void(self.next_round, self.partners)
        logger.warning(
            "rank %d: round %d is void, its last snapshots are still being sent",
            self._rank,
            self.next_round,
        )
        return []

    def open(self, flows: Sequence[Flow]) -> None:
        """Snapshots the flows and sends them to the next round's partner."""
        start = time.perf_counter()
        transfers, round = self.begin(flows, frees_late=True), self.next_round
        self.send(transfers)
        self._spent("snapshot", start, round=round)

    def send(self, transfers: Sequence[Transfer]) -> None:
        """Sends the next round: all of it or nothing, also when Ctrl-C interrupts it.

        What was sent is in flight then. If that is nothing, the partner is notified.
        """
        try:
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
            release([transfer for transfer in transfers if not transfer.exchanges])
            self._take_on([transfer for transfer in transfers if transfer.exchanges])

    def close(self) -> None:
        """Mixes what the partner sent, waiting for it; a round that sat out closes all the same."""
        self.drain()
        self.closed_rounds += 1

    def advance(self, flows_of: FlowsOf) -> None:
        """Closes the round and opens the next.

        A bucket is copied as soon as the one before it is mixed, and sent when all are: earlier it
        would share the partner's link with what that one still expects of this round.

        Closed first and opened then if the next partner is late already, or no snapshot is free.
        """
        following = self._following(flows_of(self.next_round))
        exposed = self.exposed_seconds
        if following is None:
            self.close()
            self._sent.end(self.exposed_seconds - exposed)
            self.open(flows_of(self.next_round))
            return
        try:
            self.drain(following=following)
            self._sent.end(self.exposed_seconds - exposed)
            start = time.perf_counter()
            self.send(list(following.values()))
        except BaseException:
            release([t for t in following.values() if not t.exchanges])
            raise
        self.closed_rounds += 1
        self._spent("snapshot", start, round=self.next_round - 1)

    def mix_early(self, flow: Flow, place: int) -> bool:
        """Mixes one bucket of the open round ahead of `close`, waiting for it as that would.

        False if it is late: it is left to `close` then.
        """
        is_in_time = True
        for transfer in self._open:
            if transfer.flow is flow and place in transfer.exchanges.keys() - transfer.finished:
                outcome = self.receive(transfer, place, self._deadline(transfer))
                if outcome is Outcome.LATE:
                    is_in_time = False
                else:
                    self._mix_received(transfer, place, self._early_squares)
        return is_in_time

    def drain(
        self,
        wait_seconds: float | None = None,
        following: Mapping[Flow, Transfer] | None = None,
    ) -> None:
        """Mixes whatever is in flight.

        Waits for it `wait_seconds`. For None, as a step does: for the parts of the open round up to
        their deadlines, for those that are late already not at all. A bucket of a `following`
        transfer is copied once the one before it is dealt with.
        """
        squares, self._early_squares = self._early_squares, []
        now = time.perf_counter()
        self._mix_late(squares, now if wait_seconds is None else now + wait_seconds)
        deadlines = {
            transfer: self._deadline(transfer) if wait_seconds is None else now + wait_seconds
            for transfer in self._open
        }
        # One leaves the list when it is dealt with, so that an interrupt loses none.
        while self._open:
            deadline = deadlines[self._open[0]]
            if not self._finish(self._open[0], deadline, squares, following):
                self._late.append(self._open[0])
            del self._open[0]
        self.pair_distance.note(squares, self.schedule.period)

    def catch_up(self, *, closes: bool) -> None:
        """Mixes what is late, waiting for it as a step would, and gives up what is late still.

        The open round stays open, unless this `closes` it, too.
        """
        if closes:
            self.drain()
        waits = [self._deadline(transfer) for transfer in self._late]
        squares: list[Tensor] = []
        self._mix_late(squares, max(waits, default=0.0))
        self.pair_distance.note(squares, self.schedule.period)
        while self._late:
            self._give_up_oldest()

    def jump(self, to_round: int) -> None:
        """Voids the rounds up to a later one, which is the next then, and notifies partners."""
        if to_round <= self.next_round:
            return
        named = range(max(self.next_round, to_round - _MOST_NAMED), to_round)
        last = {self.schedule.peers(round, self._rank).send_to: round for round in named}
        for partner, round in last.items():  # which stands for those before it
            self.channel.void(round, partner)
        self.outcomes[Outcome.VOID] += to_round - self.next_round
        self.void_rounds += to_round - self.next_round
        self.next_round = to_round

    def stop(self, wait_seconds: float, linger_seconds: float) -> None:
        """Ends the rounds: mixes what arrives within `wait_seconds`, then closes the channel."""
        try:
            if wait_seconds > 0:
                self.drain(wait_seconds)
            self.cancel()
        finally:
            self._listener.close()
            self.channel.close(linger_seconds)

    def cancel(self) -> None:
        """Gives up whatever is in flight, waiting for nothing."""
        for transfer in self.in_flight:
            transfer.cancel()
        self._open, self._late = [], []

    def void(self, round: int, peers: Peers) -> None:
        """Gives a round up before anything of it was sent, and notifies the partner."""
        self.channel.void(round, peers.send_to)
        self.outcomes[Outcome.VOID] += 1
        self._note_void(round)

    def weight(self, transfer: Transfer) -> float:
        """How much of the delta this rank adds."""
        return self.schedule.weight(transfer.round, self._rank, default=0.5)

    def receive(self, transfer: Transfer, place: int, deadline: float) -> Outcome:
        """Waits for one bucket until `deadline`; counts and records how that ended."""
        exchange = transfer.exchanges[place]
        start = time.perf_counter()
        outcome = transfer.wait(place, deadline)
        end = time.perf_counter()
        if outcome is Outcome.LATE:
            self.patience.spend(end - start)
        self.exposed_seconds += end - start
        self._span("wait", start, end, round=transfer.round, bucket=exchange.bucket)
        if outcome is not Outcome.LATE and place not in transfer.counted:
            transfer.counted.add(place)
            self.outcomes[outcome] += 1
            if outcome is Outcome.VOID:
                self._note_void(transfer.round)
            times = exchange.posted_seconds, exchange.finished_seconds or end
            self._span("exchange", *times, **transfer.describe(place))
        return outcome

    def mix(self, transfer: Transfer, place: int, delta: Delta | None) -> None:
        """Adds a delta to its bucket, if there is one; the bucket is finished then."""
        if delta is None:
            transfer.finished.add(place)
            return
        start = time.perf_counter()
        # Right before: an interrupt that arrives while torch adds is raised when it has added.
        transfer.finished.add(place)
        transfer.flow.buckets[place].add(delta, self.weight(transfer))
        transfer.forget(place)
        self._spent("mix", start, round=transfer.round, bucket=place)

    def state_dict(self) -> dict[str, Any]:
        """What rounds have counted, as plain values; the open one is not sent yet."""
        sent_bytes = arrived_bytes = 0  # of the open round: they travel again after a resume
        for transfer in self._open:
            for place, exchange in transfer.exchanges.items():
                size_bytes = transfer.flow.parts[place].size_bytes
                sent_bytes += size_bytes * (transfer.peers.send_to is not None)
                arrived_bytes += size_bytes * (exchange.outcome is Outcome.DELIVERED)
        counts = {name: self.count(name) for name in _LINK_COUNTS}
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "pair_distance": self.pair_distance.state_dict(),
            "links": {
                **counts,
                "bytes_sent": counts["bytes_sent"] - sent_bytes,
                "bytes_received": counts["bytes_received"]
                - arrived_bytes
                - self.channel.early_bytes,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned; nothing is in flight, all ranks do it."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.outcomes = Counter({Outcome(name): n for name, n in state["outcomes"].items()})
        self.pair_distance.load_state_dict(state["pair_distance"])
        links = state["links"]
        self._before = {name: links[name] - getattr(self.channel, name) for name in _LINK_COUNTS}

    def _finish(
        self,
        transfer: Transfer,
        deadline: float,
        squares: list[Tensor],
        following: Mapping[Flow, Transfer] | None = None,
        *,
        again: bool = False,
    ) -> bool:
        """Mixes what has arrived of a transfer; whether that was all of it."""
        next_transfer = None if following is None else following.get(transfer.flow)
        for place in sorted(transfer.exchanges):
            if place in transfer.finished:
                continue
            if self.receive(transfer, place, deadline) is Outcome.LATE:
                self.outcomes[Outcome.LATE] += not again
            else:
                # A link's exchanges count in order.
                for late in earlier_of_partner(transfer, self._late):
                    if self._finish(late, 0.0, squares, again=True):
                        self._late.remove(late)
                self._mix_received(transfer, place, squares)
            if next_transfer is not None:
                start = time.perf_counter()
                next_transfer.fill(place)
                self.mixing_seconds += time.perf_counter() - start
        if transfer.is_finished:
            self._deadlines.note_all(transfer.peers.recv_from, transfer.exchanges.values())
            transfer.release()
            return True
        if not again:
            self.late_rounds += transfer.round != self._last_late
            self._last_late = transfer.round
            logger.warning(
                "rank %d: rank %s is too late in round %d; going on without it",
                self._rank,
                transfer.peers.recv_from,
                transfer.round,
            )
        return False

    def _mix_received(self, transfer: Transfer, place: int, squares: list[Tensor]) -> None:
        delta = transfer.delta(place)
        if delta is not None and delta.square is not None:
            squares.append(delta.square)
        self.mix(transfer, place, delta)

    def _begin(self, flows: Sequence[Flow], timeout_seconds: float) -> list[Transfer] | None:
        """A transfer a flow, none at all if this rank sits out; None for want of a snapshot."""
        peers = self.partners
        if peers.send_to is None and peers.recv_from is None:
            return []
        transfers: list[Transfer] = []
        try:
            for flow in flows:
                start = time.perf_counter()
                wait = self.patience.left(timeout_seconds)
                transfer = Transfer.begin(flow, self.channel, self.next_round, peers, wait)
                if transfer is None:
                    self.patience.spend(time.perf_counter() - start)
                    release(transfers)
                    return None
                transfer.behind = self._sent
                transfers.append(transfer)
        except BaseException:
            release(transfers)
            raise
        return transfers

    def _following(self, flows: Sequence[Flow]) -> dict[Flow, Transfer] | None:
        """Transfers of the next round beside those in flight, if that can be without waiting."""
        if self.partners.recv_from in {t.peers.recv_from for t in self.in_flight}:
            return None
        transfers = self._begin(flows, 0.0)
        return None if transfers is None else {t.flow: t for t in transfers}

    def _take_on(self, transfers: Sequence[Transfer]) -> None:
        """Looks after the transfers of the round that was just sent."""
        self._open.extend(transfers)
        self._sent = RoundBefore([t for tr in transfers for t in tr.tickets], self._sent)
        self._listener.expect(transfers)

    def _deadline(self, transfer: Transfer) -> float:
        """Until when a step waits for the parts of a transfer, if it starts to wait now."""
        wait = self._deadlines.of(transfer.peers.recv_from)
        return time.perf_counter() + self.patience.left(wait)

    def _mix_late(self, squares: list[Tensor], deadline: float) -> None:
        """Mixes what has arrived of late transfers since, or arrives until `deadline`."""
        self.channel.poll()
        for transfer in list(self._late):
            if transfer in self._late and self._finish(transfer, deadline, squares, again=True):
                self._late.remove(transfer)

    def _give_up_oldest(self) -> None:
        """Frees the snapshot of the oldest late round: a late partner must not stop the rest."""
        transfer = self._late.pop(0)
        transfer.cancel()
        logger.warning(
            "rank %d: gave up round %d with rank %s, which is late; the mean over ranks may shift "
            "by what it mixes alone",
            self._rank,
            transfer.round,
            transfer.peers.recv_from,
        )

    def _note_void(self, round: int) -> None:
        """Counts a void round, once for all its flows and buckets; warns once if most are."""
        if round == self._last_void:
            return
        self.void_rounds += 1
        self._last_void = round
        self._voids.append(round)
        if len(self._voids) < _MANY_VOID or round - self._voids[0] >= _LAST_ROUNDS:
            self._rarely_void_seconds = max(self._rarely_void_seconds, time.perf_counter())
        elif time.perf_counter() > self._rarely_void_seconds + _MOSTLY_VOID_SECONDS:
            self._rarely_void_seconds = math.inf
            logger.warning(
                "rank %d: most of its last %d rounds were void, so it trains alone: its partners "
                "wait in a collective of the session that this rank has not called (every rank "
                "must call it), or they take far fewer steps; session.stats() counts both",
                *(self._rank, _LAST_ROUNDS),
            )

    def _spent(self, name: str, start: float, **attributes: object) -> None:
        end = time.perf_counter()
        self.mixing_seconds += end - start
        self._span(name, start, end, **attributes)

    def _span(self, name: str, start: float, end: float, **attributes: object) -> None:
        if self._recorder is not None:
            self._recorder.span(name, start, end, **attributes)
