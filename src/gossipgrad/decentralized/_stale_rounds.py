"""Rounds in which nobody waits: what is there is mixed, what cannot be sent at once is void."""

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gossipgrad.comm import Channel, Outcome, Recorder
from gossipgrad.decentralized._deadlines import Deadlines
from gossipgrad.decentralized._jumping import jump
from gossipgrad.decentralized._modes import Stale
from gossipgrad.decentralized._rounds import TOGETHER_SECONDS, Rounds
from gossipgrad.decentralized._section import Section
from gossipgrad.decentralized._transfer import Transfer
from gossipgrad.topology import Peers, Schedule

__all__ = ["StaleRounds"]

_NO_STEP_WAITS = Deadlines(
    floor_seconds=TOGETHER_SECONDS, ceiling_seconds=TOGETHER_SECONDS, deviations=1.0
)


class StaleRounds(Rounds):
    """Rounds of mode stale: `open` and `close` never wait, `settle` does, for collectives.

    This rank's next round is `max(own + 1, highest heard)`. Those between are void, as is one for
    which no snapshot is free, or whose partner has owed an answer for more than `max_staleness`
    of this rank's rounds: a partner that is stuck holds one or two snapshots, not all. A rank
    voids a round only before it sends its part and tells the partner at once, so an exchange
    counts on both ends or on neither. The schedule's pairs must be symmetric.

    Args:
        channel: Where exchanges are posted; its credits are the mode's snapshots.
        schedule: Who meets whom in which round.
        mode: The staleness, and the weight that follows from it.
        recorder: Gets the spans, if there is one.
    """

    def __init__(
        self, channel: Channel, schedule: Schedule, *, mode: Stale, recorder: Recorder | None = None
    ) -> None:
        super().__init__(channel, schedule, deadlines=_NO_STEP_WAITS, recorder=recorder)
        self._mode = mode
        self.starts = 0  # rounds that began without a step: the first, and after averages
        self._opened = 0  # rounds that were this rank's, whether or not it sent its part
        self._opened_at: dict[int, int] = {}  # of the rounds under way
        self._late_ones: set[int] = set()

    def position(self, steps: int, every: int) -> int:
        """Rounds behind this rank, those jumped over too, in steps."""
        return max(0, self.next_round - self.starts) * every + steps % every

    def come_to(self, round: int, starts: int) -> None:
        """Goes on at a round that others are at, `starts` of theirs having begun without a step."""
        self.next_round, self.starts = round, starts

    def weight(self, transfer: Transfer) -> float:
        """How much of the delta this rank takes: of a matrix, at most what is stable."""
        limit = self._mode.weight
        return min(limit, self.schedule.weight(transfer.round, self._rank, default=limit))

    def open(self, sections: Sequence[Section]) -> None:
        """Opens a round without a step: the first, and one after all ranks came together.

        Nothing is mixed here, so that weights are as a collective or a loaded state left them.
        """
        before = self.next_round
        try:
            self._open(sections)
        finally:
            self.starts += self.next_round - before

    def _open(self, sections: Sequence[Section]) -> list[Transfer]:
        """Sends the next round's snapshots, or voids the round."""
        start = time.perf_counter()
        round, peers = self.next_round, self.partners
        self._opened += 1
        transfers: list[Transfer] = []
        if peers.send_to is not None and not self._owes(peers.send_to):
            transfers = self._snapshots(sections, round, peers)
        if not transfers:
            self.next_round += 1
            if peers.send_to is not None:
                self._void(round, peers)
            return []
        self._send(transfers)
        self._spent("snapshot", start, round=round)
        return transfers

    def close(self) -> None:
        """Mixes what has come, and goes on to the highest round heard of."""
        self.channel.poll()
        self._take_in(list(self._under_way))
        self._note_late()
        self._jump()
        self.closed_rounds += 1

    def advance(self, of_round: Callable[[int], Sequence[Section]]) -> None:
        """Closes the round, then opens the next, which may be a later one than before."""
        self.close()
        self._take_in(self._open(of_round(self.next_round)))

    def settle(
        self,
        wait_seconds: float | None = None,
        following: Mapping[Section, Transfer] | None = None,
    ) -> None:
        """Mixes what is outstanding, and waits for what may still come `wait_seconds` at most."""
        wait = TOGETHER_SECONDS if wait_seconds is None else wait_seconds
        deadline = time.perf_counter() + wait
        for transfer in list(self._under_way):
            transfer.await_parts(deadline)
        self._take_in(list(self._under_way))

    def take_on(self, transfers: Sequence[Transfer]) -> None:
        """Looks after transfers that were sent; none is late here."""
        for transfer in transfers:
            self._opened_at.setdefault(transfer.round, self._opened)
        self._under_way.extend(transfers)

    def _owes(self, partner: int) -> bool:
        """Whether the partner has not answered for longer than the mode foresees."""
        return any(
            transfer.peers.send_to == partner
            and self._opened - self._opened_at[transfer.round] > self._mode.max_staleness
            for transfer in self._under_way
        )

    def _snapshots(self, sections: Sequence[Section], round: int, peers: Peers) -> list[Transfer]:
        """A transfer a section, none at all if one of them has no snapshot free."""
        transfers: list[Transfer] = []
        complete = False
        try:
            for section in sections:
                transfer = Transfer.begin(section, self.channel, round, peers, 0.0)
                if transfer is None:
                    return []
                transfers.append(transfer)
            complete = True
        finally:
            if not complete:
                for begun in transfers:
                    begun.release()
        return transfers

    def _take_in(self, transfers: Sequence[Transfer]) -> None:
        """Mixes what has come of some transfers; those that are complete are under way no more."""
        squares: list[Tensor] = []
        for transfer in transfers:
            for bucket, exchange in sorted(transfer.exchanges.items()):
                if bucket not in transfer.taken and not exchange.open:
                    self._take_one(transfer, bucket, squares)
        self._let_go(transfers)
        self.pair_distance.note(squares, self.schedule.period)

    def _take_one(self, transfer: Transfer, bucket: int, squares: list[Tensor]) -> None:
        self.take(transfer, bucket, 0.0)
        delta = transfer.delta(bucket)
        if delta is not None and delta.square is not None:
            squares.append(delta.square)
        self.mix(transfer, bucket, delta)

    def _let_go(self, transfers: Sequence[Transfer]) -> None:
        """Those that are complete are under way no more."""
        for transfer in transfers:
            if len(transfer.taken) == len(transfer.exchanges):
                transfer.release()
                self._under_way.remove(transfer)
                if all(other.round != transfer.round for other in self._under_way):
                    del self._opened_at[transfer.round]
                    self._late_ones.discard(transfer.round)

    def _note_late(self) -> None:
        """Counts, once each, the rounds whose partners are later than the mode foresees."""
        late = set()
        for transfer in self._under_way:
            age = self._opened - self._opened_at[transfer.round]
            if age >= self._mode.max_staleness and transfer.round not in self._late_ones:
                late.add(transfer.round)
                self.outcomes[Outcome.LATE] += len(transfer.exchanges) - len(transfer.taken)
        self._late_ones |= late
        self.late_rounds += len(late)

    def _jump(self) -> None:
        """Voids the rounds between this rank's and the highest heard of."""
        jump(self, self.channel.heard)
