"""Rounds: opening one sends snapshots to the partner, closing it mixes what came back."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gossipgrad.comm import Channel, Outcome, Recorder, Transport
from gossipgrad.decentralized._deadlines import Deadlines, Patience
from gossipgrad.decentralized._in_turn import RoundBefore
from gossipgrad.decentralized._listener import Listener
from gossipgrad.decentralized._pair_distance import PairDistance
from gossipgrad.decentralized._section import Delta, Section
from gossipgrad.decentralized._transfer import Transfer, release
from gossipgrad.topology import Peers, Schedule

__all__ = ["Rounds"]

logger = logging.getLogger(__name__)

TOGETHER_SECONDS = 300.0  # in a collective, to which all have come: for what is on its way


class Rounds:
    """The rounds of one session: which is next, what is under way, what came late, what it cost.

    All sections of a round share one partner. Nothing here is a collective, and no call raises for
    a late, dead or departed partner: the outcome is counted and training goes on.

    Args:
        channel: Where exchanges are posted.
        schedule: Who meets whom in which round.
        deadlines: How long closing a round waits for each partner.
        recorder: Gets the spans, if there is one.

    Attributes:
        patience: For waits in vain of one step.
        late_rounds: Rounds whose parts had not come when they were due.
        pair_distance: To the partners of the last period.
        void_rounds: Rounds that one of the two ends gave up before it sent its part.
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
        self.closed_rounds = 0
        self.late_rounds = 0
        self.void_rounds = 0
        self.patience = Patience()
        self.outcomes: Counter[Outcome] = Counter()
        self.exposed_seconds = 0.0
        self.mixing_seconds = 0.0
        self._rank = channel.rank
        self._deadlines = deadlines
        self._recorder = recorder
        self._listener = Listener(channel)
        self._sent = RoundBefore()
        self._under_way: list[Transfer] = []
        self._late: list[Transfer] = []
        self.pair_distance = PairDistance()
        self._last_void = self._last_late = -1

    @property
    def partners(self) -> Peers:
        """Whom this rank meets in the next round."""
        return self.schedule.peers(self.next_round, self._rank)

    @property
    def under_way(self) -> Sequence[Transfer]:
        """What was sent and is not mixed: of the open round, and late ones."""
        return [*self._late, *self._under_way]

    def position(self, steps: int, every: int) -> int:
        """How far the run has come, in steps, for a rank that has made `steps`."""
        return steps

    @property
    def longest_wait_seconds(self) -> float:
        """How long a step may still wait for what is worth nothing later, a gradient."""
        return self.patience.left(self._deadlines.ceiling_seconds)

    def deadline(self, transfer: Transfer) -> float:
        """Until when a step waits for the parts of a transfer, if it starts to wait now."""
        wait = self._deadlines.of(transfer.peers.recv_from)
        return time.perf_counter() + self.patience.left(wait)

    def begin(self, sections: Sequence[Section], *, free_late: bool = False) -> list[Transfer]:
        """A transfer a section to the next round's partner, with nothing sent yet.

        None at all if this rank sits out, or cannot have a snapshot of every section: the round is
        void then, as a whole, and the partner is told. With `free_late`, snapshots that late
        rounds hold are freed before that: what has come of them is mixed, the oldest given up.
        """
        wait = self._deadlines.of(self.partners.send_to)
        transfers = self._begin(sections, wait)
        if transfers is None and free_late:
            self._settle_late([], time.perf_counter())
            transfers = self._begin(sections, wait)
        while transfers is None and free_late and self._late:
            self._give_up_oldest()
            transfers = self._begin(sections, wait)
        if transfers is not None:
            return transfers
        self._void(self.next_round, self.partners)
        logger.warning(
            "rank %d: round %d is void, its last snapshots are still being sent",
            self._rank,
            self.next_round,
        )
        return []

    def open(self, sections: Sequence[Section]) -> None:
        """Snapshots the sections and sends them to the next round's partner."""
        start = time.perf_counter()
        transfers, round = self.begin(sections, free_late=True), self.next_round
        self._send(transfers)
        self._spent("snapshot", start, round=round)

    def close(self) -> None:
        """Takes what the partner sent and mixes it; a round that sat out closes all the same."""
        self.settle()
        self.closed_rounds += 1

    def advance(self, of_round: Callable[[int], Sequence[Section]]) -> None:
        """Closes the round and opens the next, with sections `of_round`.

        A bucket is copied as soon as the one before it is mixed, and sent when all are: earlier it
        would share the partner's link with what that one still awaits of this round.

        Closed first and opened then if the next partner is awaited already, or no snapshot is free.
        """
        following = self._following(of_round(self.next_round))
        exposed = self.exposed_seconds
        if following is None:
            self.close()
            self._sent.over(self.exposed_seconds - exposed)
            self.open(of_round(self.next_round))
            return
        try:
            self.settle(following=following)
            self._sent.over(self.exposed_seconds - exposed)
            start = time.perf_counter()
            self._send(list(following.values()))
        except BaseException:
            release([t for t in following.values() if not t.exchanges])
            raise
        self.closed_rounds += 1
        self._spent("snapshot", start, round=self.next_round - 1)

    def stop(self, wait_seconds: float, linger_seconds: float) -> None:
        """Ends the rounds: mixes what comes within `wait_seconds`, then closes the channel."""
        try:
            if wait_seconds > 0:
                self.settle(wait_seconds)
            self.cancel()
        finally:
            self._listener.close()
            self.channel.close(linger_seconds)

    def settle(
        self,
        wait_seconds: float | None = None,
        following: Mapping[Section, Transfer] | None = None,
    ) -> None:
        """Takes and mixes whatever is outstanding.

        Waits for it `wait_seconds`. For None, as a step does: for the parts of the open round up to
        their deadlines, for those that are late already not at all. A bucket of a `following`
        transfer is sent once the one before it is dealt with.
        """
        squares: list[Tensor] = []
        now = time.perf_counter()
        self._settle_late(squares, now if wait_seconds is None else now + wait_seconds)
        deadlines = {
            transfer: self.deadline(transfer) if wait_seconds is None else now + wait_seconds
            for transfer in self._under_way
        }
        # One leaves the list when it is dealt with, so that an interrupt loses none.
        while self._under_way:
            deadline = deadlines[self._under_way[0]]
            if not self._finish(self._under_way[0], deadline, squares, following):
                self._late.append(self._under_way[0])
            del self._under_way[0]
        self.pair_distance.note(squares, self.schedule.period)

    def catch_up(self, *, closes: bool) -> None:
        """Mixes what is late, waiting for it as a step would, and gives up what is late still.

        The open round stays open, unless this `closes` it, too.
        """
        if closes:
            self.settle()
        waits = [self.deadline(transfer) for transfer in self._late]
        squares: list[Tensor] = []
        self._settle_late(squares, max(waits, default=0.0))
        self.pair_distance.note(squares, self.schedule.period)
        while self._late:
            self._give_up_oldest()

    @property
    def open_bytes(self) -> int:
        """What was sent in the open round."""
        return sum(
            transfer.section.parts[bucket].size_bytes
            for transfer in self._under_way
            for bucket in transfer.exchanges
            if transfer.peers.send_to is not None
        )

    def take_on(self, transfers: Sequence[Transfer]) -> None:
        """Looks after transfers that were sent."""
        self._under_way.extend(transfers)
        self._sent = RoundBefore([t for tr in transfers for t in tr.tickets], self._sent)
        self._listener.expect(transfers)

    def hand_over(self) -> Transport:
        """Gives up what is outstanding, and the links to the rounds of another run."""
        self.cancel()
        self._listener.close()
        return self.channel.hand_over()

    def cancel(self) -> None:
        """Gives up whatever is outstanding, waiting for nothing."""
        for transfer in self.under_way:
            transfer.cancel()
        self._under_way, self._late = [], []

    def weight(self, transfer: Transfer) -> float:
        """How much of the delta this rank takes."""
        return self.schedule.weight(transfer.round, self._rank, default=0.5)

    def take(self, transfer: Transfer, bucket: int, deadline: float) -> Outcome:
        """Waits for one bucket until `deadline`; counts and records how that ended."""
        exchange = transfer.exchanges[bucket]
        start = time.perf_counter()
        outcome = transfer.take(bucket, deadline)
        end = time.perf_counter()
        if outcome is Outcome.LATE:
            self.patience.spend(end - start)
        self.exposed_seconds += end - start
        self._span("wait", start, end, round=transfer.round, bucket=exchange.bucket)
        if outcome is not Outcome.LATE and bucket not in transfer.counted:
            transfer.counted.add(bucket)
            self.outcomes[outcome] += 1
            if outcome is Outcome.VOID:
                self.note_void(transfer.round)
            times = exchange.posted_seconds, exchange.finished_seconds or end
            self._span("exchange", *times, **transfer.told(bucket))
        return outcome

    def note_void(self, round: int) -> None:
        """Counts a void round, once for all its sections and buckets."""
        self.void_rounds += round != self._last_void
        self._last_void = round

    def mix(self, transfer: Transfer, bucket: int, delta: Delta | None) -> None:
        """Mixes a delta into its bucket, if there is one; the bucket is dealt with then."""
        if delta is None:
            transfer.taken.add(bucket)
            return
        start = time.perf_counter()
        weight = self.weight(transfer)
        # Right before: an interrupt that comes while torch adds is raised when it has added.
        transfer.taken.add(bucket)
        transfer.section.mix(bucket, delta, weight)
        transfer.forget(bucket)
        self._spent("mix", start, round=transfer.round, bucket=bucket)

    def _finish(
        self,
        transfer: Transfer,
        deadline: float,
        squares: list[Tensor],
        following: Mapping[Section, Transfer] | None = None,
        *,
        again: bool = False,
    ) -> bool:
        """Takes and mixes what has come of a transfer; whether that was all of it."""
        next_transfer = None if following is None else following.get(transfer.section)
        for bucket in sorted(transfer.exchanges):
            if bucket in transfer.taken:
                continue
            if self.take(transfer, bucket, deadline) is Outcome.LATE:
                self.outcomes[Outcome.LATE] += not again
            else:
                delta = transfer.delta(bucket)
                if delta is not None and delta.square is not None:
                    squares.append(delta.square)
                self.mix(transfer, bucket, delta)
            if next_transfer is not None:
                start = time.perf_counter()
                next_transfer.fill(bucket)
                self.mixing_seconds += time.perf_counter() - start
        if len(transfer.taken) == len(transfer.exchanges):
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

    def _begin(self, sections: Sequence[Section], deadline_seconds: float) -> list[Transfer] | None:
        """A transfer a section, none at all if this rank sits out; None for want of a snapshot."""
        peers = self.partners
        if peers.send_to is None and peers.recv_from is None:
            return []
        transfers: list[Transfer] = []
        try:
            for section in sections:
                start = time.perf_counter()
                wait = self.patience.left(deadline_seconds)
                transfer = Transfer.begin(section, self.channel, self.next_round, peers, wait)
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

    def _following(self, sections: Sequence[Section]) -> dict[Section, Transfer] | None:
        """Transfers of the next round beside those under way, if that can be without waiting."""
        if self.partners.recv_from in {t.peers.recv_from for t in self.under_way}:
            return None
        transfers = self._begin(sections, 0.0)
        return None if transfers is None else {t.section: t for t in transfers}

    def _send(self, transfers: Sequence[Transfer]) -> None:
        """Sends the next round: all of it or nothing, also when Ctrl-C comes in the middle.

        What was sent is outstanding then. If that is nothing, the partner is told.
        """
        try:
            for transfer in transfers:
                transfer.post_all()
        except BaseException:
            if any(transfer.exchanges for transfer in transfers):
                for transfer in transfers:
                    transfer.post_all()
            else:
                self._void(self.next_round, self.partners)
            raise
        finally:
            self.next_round += 1
            release([transfer for transfer in transfers if not transfer.exchanges])
            self.take_on([transfer for transfer in transfers if transfer.exchanges])

    def _void(self, round: int, peers: Peers) -> None:
        """Gives a round up before anything of it was sent, and tells the partner."""
        self.channel.void(round, peers.send_to)
        self.outcomes[Outcome.VOID] += 1
        self.note_void(round)

    def _settle_late(self, squares: list[Tensor], deadline: float) -> None:
        """Mixes what has come of late transfers since, or comes until `deadline`."""
        self.channel.poll()
        for transfer in list(self._late):
            if transfer in self._late and self._finish(transfer, deadline, squares, again=True):
                self._late.remove(transfer)

    def _give_up_oldest(self) -> None:
        """Frees the snapshot of the latest of the late: a stuck partner must not stop the rest."""
        transfer = self._late.pop(0)
        transfer.cancel()
        logger.warning(
            "rank %d: gave up round %d with rank %s, which is late; the mean over ranks may shift "
            "by what it mixes alone",
            self._rank,
            transfer.round,
            transfer.peers.recv_from,
        )

    def _spent(self, name: str, start: float, **attributes: object) -> None:
        end = time.perf_counter()
        self.mixing_seconds += end - start
        self._span(name, start, end, **attributes)

    def _span(self, name: str, start: float, end: float, **attributes: object) -> None:
        if self._recorder is not None:
            self._recorder.span(name, start, end, **attributes)
