"""Rounds without waits: mix parts that have arrived, void rounds that cannot be sent now."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from gossipgrad.comm import Channel, Outcome, Recorder
from gossipgrad.engine._flow import Flow
from gossipgrad.engine._modes import Stale
from gossipgrad.engine._rounds import COLLECTIVE_SECONDS, FlowsOf, Rounds
from gossipgrad.engine._transfer import Transfer, release
from gossipgrad.engine._waits import Waits
from gossipgrad.topology import Schedule

__all__ = ["StaleRounds"]


class StaleRounds(Rounds):
    """Rounds of mode stale: `open` and `close` never wait, `drain` does, for collectives.

    This rank's next round is `max(own + 1, highest received)`. The rounds between are void, and so
    is a round for which no snapshot is free, or whose partner has not answered for more than
    `max_staleness` of this rank's rounds: a partner that hangs holds one or two snapshots, not all.
    A rank voids a round only before it says READY and notifies the partner immediately, so an
    exchange counts on both ends or on neither. The schedule's pairs must be symmetric.

    Args:
        channel: Exchanges are posted on it; its window is the mode's snapshots.
        schedule: The partners of each round.
        mode: The staleness bound, and the weight that follows from it.
        recorder: Gets the spans, if not None.

    Attributes:
        starts: Rounds opened without a step: the first, and after averages.
    """

    def __init__(
        self, channel: Channel, schedule: Schedule, *, mode: Stale, recorder: Recorder | None = None
    ) -> None:
        waits = Waits(channel, COLLECTIVE_SECONDS)
        super().__init__(channel, schedule, waits=waits, recorder=recorder)
        self._mode = mode
        self.starts = 0
        self._opened = 0  # this rank's own rounds, sent or void
        self._opened_at: dict[int, int] = {}  # for each round in flight, `_opened` at its opening
        self._late_rounds: set[int] = set()

    def position(self, steps: int, every: int) -> int:
        """Return the number of past rounds, including those jumped over, in steps."""
        return max(0, self.next_round - self.starts) * every + steps % every

    def weight(self, transfer: Transfer) -> float:
        """Return the weight of a transfer's deltas; for a matrix at most the stable weight."""
        limit = self._mode.weight
        return min(limit, self.schedule.weight(transfer.round, self._rank, default=limit))

    def open(self, flows: Sequence[Flow]) -> None:
        """Open a round without a step: the first, or after a collective.

        Mixes nothing, so that weights stay as the collective or loaded state left them.
        """
        before = self.next_round
        try:
            self._open_next(flows)
        finally:
            self.starts += self.next_round - before

    def close(self) -> None:
        """Mix arrived parts, and move to the highest received round."""
        self.channel.poll()
        self._mix_arrived(list(self._open))
        self._note_late()
        self.jump(self.channel.heard)
        self.closed_rounds += 1

    def advance(self, flows_of: FlowsOf) -> None:
        """Close the round, then open the next, which may be several rounds later."""
        self.close()
        self._mix_arrived(self._open_next(flows_of(self.next_round)))

    def drain(
        self,
        wait_seconds: float | None = None,
        following: Mapping[Flow, Transfer] | None = None,
    ) -> None:
        """Mix parts in flight, and wait at most `wait_seconds` for those that may still arrive."""
        wait = COLLECTIVE_SECONDS if wait_seconds is None else wait_seconds
        deadline = time.perf_counter() + wait
        for transfer in list(self._open):
            transfer.wait_all(deadline)
        self._mix_arrived(list(self._open))

    def cancel(self) -> None:
        """Cancel everything in flight without waiting."""
        super().cancel()
        self._opened_at.clear()
        self._late_rounds.clear()

    def _open_next(self, flows: Sequence[Flow]) -> list[Transfer]:
        """Send the next round's snapshots, or void the round."""
        start = time.perf_counter()
        round, peers = self.next_round, self.partners
        self._opened += 1
        transfers: list[Transfer] | None = None
        if peers.send_to is not None and not self._owes(peers.send_to):
            transfers = self._begin(flows, 0.0)
        if not transfers:
            self.next_round += 1
            if peers.send_to is not None:
                self.void(round, peers)
            return []
        self.send(transfers)
        self._spent("snapshot", start, round=round)
        return [transfer for transfer in transfers if transfer.exchanges]  # a shard may be empty

    def _take_on(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._opened_at.setdefault(transfer.round, self._opened)
        self._open.extend(transfers)

    def _owes(self, partner: int) -> bool:
        """Whether the partner has not answered for longer than the mode allows."""
        return any(
            transfer.peers.send_to == partner
            and self._opened - self._opened_at[transfer.round] > self._mode.max_staleness
            for transfer in self._open
        )

    def _mix_arrived(self, transfers: Sequence[Transfer]) -> None:
        """Mix arrived parts of some transfers; drop finished transfers."""
        squares: list[Tensor] = []
        for transfer in transfers:
            for place, exchange in sorted(transfer.exchanges.items()):
                if place in transfer.finished or exchange.open:
                    continue
                self.receive(transfer, place, 0.0)
                delta = transfer.delta(place)
                if delta is not None and delta.square is not None:
                    squares.append(delta.square)
                self.mix(transfer, place, delta)
        finished = [transfer for transfer in transfers if transfer.is_finished]
        release(finished)
        for transfer in finished:
            self._open.remove(transfer)
            if all(other.round != transfer.round for other in self._open):
                del self._opened_at[transfer.round]
                self._late_rounds.discard(transfer.round)
        self.pair_distance.note(squares, self.schedule.period)

    def _note_late(self) -> None:
        """Count, once each, the rounds whose partners are later than the mode allows."""
        late = set()
        for transfer in self._open:
            age = self._opened - self._opened_at[transfer.round]
            if age >= self._mode.max_staleness and transfer.round not in self._late_rounds:
                late.add(transfer.round)
                self.outcomes[Outcome.LATE] += len(transfer.exchanges) - len(transfer.finished)
        self._late_rounds |= late
        self.late_rounds += len(late)
