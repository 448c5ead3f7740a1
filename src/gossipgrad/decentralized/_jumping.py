"""Going on at a later round, without those between."""

from gossipgrad.comm import Outcome
from gossipgrad.decentralized._rounds import Rounds

__all__ = ["jump"]

_MOST_TOLD = 1024  # of the rounds jumped over, the last are told


def jump(rounds: Rounds, to_round: int) -> None:
    """Voids the rounds up to a later one, which is the next then, and tells their partners."""
    if to_round <= rounds.next_round:
        return
    channel = rounds.channel
    told = range(max(rounds.next_round, to_round - _MOST_TOLD), to_round)
    last = {rounds.schedule.peers(round, channel.rank).send_to: round for round in told}
    for partner, round in last.items():  # which stands for those before it
        channel.void(round, partner)
    rounds.outcomes[Outcome.VOID] += to_round - rounds.next_round
    rounds.void_rounds += to_round - rounds.next_round
    rounds.next_round = to_round
