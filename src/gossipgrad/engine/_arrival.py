"""How a joiner reaches the round of the others."""

import time
from collections.abc import Mapping

from gossipgrad.comm import Outcome
from gossipgrad.engine._rounds import Rounds

__all__ = ["Arriving"]

_LISTEN_SECONDS = 0.05


class Arriving:
    """Brings a joiner to the round of the others, until its first exchange.

    Its rounds are void on all ranks until it has made a step. Then it takes part, from the highest
    round that a message has named, and tells the others. If that round is over, it jumps to theirs.
    """

    def __init__(self, position: Mapping[str, int], every: int, exchanges: int) -> None:
        self._position = position
        self._every, self._exchanges = every, exchanges
        self._takes_part = False

    def begin(self, rounds: Rounds, wait_seconds: float) -> int:
        """Wait briefly for the others' rounds; return the step that they are at."""
        deadline = time.monotonic() + wait_seconds
        while rounds.channel.heard < 0 and time.monotonic() < deadline:
            rounds.channel.poll(_LISTEN_SECONDS)
        self._come_to(rounds, max(self._position["round"], rounds.heard()))
        return self._steps_at(rounds.next_round)

    def step(self, rounds: Rounds, steps: int, living: tuple[int, ...]) -> int:
        """Return this rank's step count after a step, before its round."""
        rounds.channel.poll()
        if not self._takes_part:
            self._takes_part = True
            self._come_to(rounds, max(rounds.next_round, rounds.heard()))
            rounds.channel.arrive(rounds.next_round, living)
            return self._steps_at(rounds.next_round + self._exchanges)
        heard = self._first(rounds.heard())
        ahead = max(0, heard - rounds.next_round)
        if steps % self._every or rounds.never_waits:
            return steps
        rounds.jump(heard)
        return steps + ahead // self._exchanges * self._every

    def collective(self, rounds: Rounds, living: tuple[int, ...]) -> int | None:
        """Take part from a round on that begins with a collective; return a new step count."""
        if self._takes_part:
            return None
        self._takes_part = True
        rounds.channel.arrive(rounds.next_round, living)
        return self._steps_at(rounds.next_round)

    def is_over(self, rounds: Rounds) -> bool:
        """Whether this rank has completed an exchange."""
        return self._takes_part and rounds.on_all(rounds.outcomes[Outcome.DELIVERED] > 0)

    def _come_to(self, rounds: Rounds, round: int) -> None:
        rounds.next_round = self._first(round)
        rounds.starts = self._position["starts"]

    def _first(self, round: int) -> int:
        """Return the next round that is the first of a step."""
        return round + (self._position["round"] - round) % self._exchanges

    def _steps_at(self, round: int) -> int:
        steps = (round - self._position["round"]) // self._exchanges
        return self._position["steps"] + steps * self._every
