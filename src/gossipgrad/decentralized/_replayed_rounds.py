"""Rounds of mode stale that do again what a log says, and nothing else."""

import time
from collections.abc import Sequence

from torch import Tensor

from gossipgrad.comm import Channel, Recorder
from gossipgrad.decentralized._delivery_log import DeliveryLog, Mixed, Opening
from gossipgrad.decentralized._jumping import jump
from gossipgrad.decentralized._modes import Stale
from gossipgrad.decentralized._section import Section
from gossipgrad.decentralized._stale_rounds import StaleRounds
from gossipgrad.decentralized._transfer import Transfer
from gossipgrad.errors import GossipError
from gossipgrad.topology import Peers, Schedule

__all__ = ["ReplayedRounds"]

_AWAITED_SECONDS = 60.0
_LOOK_SECONDS = 0.01


class ReplayedRounds(StaleRounds):
    """Mixes exactly what was mixed in a recorded run, in its order, and waits for it.

    With the same weights, data and logs on all ranks every step comes to the same bits, however
    fast or slow ranks and links are this time. Behind the end of the log nothing is awaited.

    Args:
        channel: As in `StaleRounds`.
        schedule: As in `StaleRounds`.
        mode: The mode, with this rank's log.
        recorder: As in `StaleRounds`.
    """

    def __init__(
        self, channel: Channel, schedule: Schedule, *, mode: Stale, recorder: Recorder | None = None
    ) -> None:
        super().__init__(channel, schedule, mode=mode, recorder=recorder)
        assert mode.replay is not None
        self._replayed: DeliveryLog = mode.replay
        self._next: Opening | None = None
        self._unfit: str | None = None  # why the log is not of here

    def open(self, sections: Sequence[Section]) -> None:
        """Opens a round without a step, as it was recorded.

        If it was not, it is opened all the same, and the next step refuses the log: a session that
        is to load a state opens its first round before that.
        """
        self._unfit = self._misfit()
        super().open(sections)

    def close(self) -> None:
        """Mixes what was mixed here, and goes on to the round that was opened then."""
        if self._unfit is not None:
            raise GossipError(self._unfit)
        self._next = self._take_next()
        if self._next is None:
            super().close()
            return
        self._mix_exactly(self._next.closed)
        self._note_late()
        jump(self, self._next.round)
        self.closed_rounds += 1

    def _open(self, sections: Sequence[Section]) -> None:
        opening, self._next = self._next or self._take_next(), None
        if opening is None:
            super()._open(sections)
            return
        if (why := self._misfit()) is not None:
            raise GossipError(why)
        round, peers = self.next_round, self.partners
        cut_at = self._cut_at
        if self._begin_opening() and opening.sent:
            self._cut_at = cut_at  # recorded without this cut
        if not opening.sent:
            self.next_round += 1
            if peers.send_to is not None:
                self._void(round, peers)
        else:
            transfers = self._await_snapshots(sections, round, peers)
            self._send(transfers)
            self._mix_exactly(opening.taken)
        self._mixed_now()  # it is what the opening says
        self._record(opening)

    def _take_next(self) -> Opening | None:
        assert self.log is not None
        there = self._unfit is None and len(self.log) < len(self._replayed)
        return self._replayed[len(self.log)] if there else None

    def _misfit(self) -> str | None:
        """Why the log does not go on with the next round, None if it does or is at its end."""
        assert self.log is not None
        number, first = len(self.log), self._replayed.first
        if number >= len(self._replayed):
            return None
        if number < first:
            return (
                f"the log begins at opening {first} of its run, and this rank comes to opening "
                f"{number}: load the state that was saved there"
            )
        if (round := self._replayed[number].round) != self.next_round:
            return (
                f"the log opens round {round} where this rank is at round {self.next_round}: it is "
                "of another rank or run, or of another place in it"
            )
        return None

    def _await_snapshots(
        self, sections: Sequence[Section], round: int, peers: Peers
    ) -> list[Transfer]:
        """A transfer a section, when as much is over as was over then."""
        deadline = time.perf_counter() + _AWAITED_SECONDS
        while True:
            full = self._is_full(peers.send_to)
            if not full and (transfers := self._snapshots(sections, round, peers)):
                return transfers
            if time.perf_counter() > deadline:
                raise GossipError(
                    f"rank {self._rank} waited {_AWAITED_SECONDS:g} s in vain for what was over "
                    f"before round {round} in the recorded run"
                )
            self.channel.poll(_LOOK_SECONDS)
            self._take_in(list(self._under_way), mixes=False)

    def _is_full(self, partner: int | None) -> bool:
        """Whether the link takes no further round yet."""
        open_rounds = {
            transfer.round
            for transfer in self._under_way
            if transfer.peers.send_to == partner
            and any(exchange.open for exchange in transfer.exchanges.values())
        }
        return len(open_rounds) >= self.channel.credits

    def _mix_exactly(self, mixed: Mixed) -> None:
        squares: list[Tensor] = []
        deadline = time.perf_counter() + _AWAITED_SECONDS
        for round, bucket in mixed:
            transfer, own = self._find(round, bucket)
            transfer.take(own, deadline)
            delta = transfer.delta(own)
            if delta is None:
                raise GossipError(
                    f"rank {self._rank} mixed round {round} with rank {transfer.peers.recv_from} "
                    f"here in the recorded run, and now it is "
                    f"{transfer.exchanges[own].outcome.value}: replay the logs of all ranks "
                    "together, from states that belong together"
                )
            self._take_one(transfer, own, squares)
        self._let_go(list(self._under_way))
        self.pair_distance.note(squares, self.schedule.period)
        self._take_in(list(self._under_way), mixes=False)

    def _find(self, round: int, bucket: int) -> tuple[Transfer, int]:
        for transfer in self._under_way:
            own = bucket - transfer.section.first_bucket
            if transfer.round == round and own in transfer.exchanges:
                return transfer, own
        raise GossipError(
            f"the log mixes bucket {bucket} of round {round}, which rank {self._rank} has not "
            "under way: it is of another rank or run"
        )
