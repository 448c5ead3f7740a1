"""The ledgers of all links of a rank, and which ranks these lead to."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from gossipgrad.comm._exchange import Outcome
from gossipgrad.comm._ledger import Ledger
from gossipgrad.comm._place import place

__all__ = ["LOST", "Ledgers"]

LOST = "was lost"


class Ledgers(defaultdict[int, Ledger]):
    """A ledger for each peer, made when first asked for.

    Args:
        rank: This one; it has no ledger.
        members: The ranks that there are at the start, this one among them or not.

    Attributes:
        peers: All other ranks that were members in a generation that this rank has lived in.
    """

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        super().__init__(Ledger)
        self._rank = rank
        self.peers = set(members) - {rank}

    @property
    def early_bytes(self) -> int:
        """Memory of what came before this rank posted its round."""
        return sum(ledger.early_bytes for ledger in self.values())

    @property
    def gone(self) -> dict[int, str]:
        """Who left or was lost, with which of the two."""
        return {peer: how for peer, to in self.items() if (how := to.gone) is not None}

    def may_send(self, sender: int, generation: int, *, here: int) -> bool:
        """Whether a message of a generation may be of a rank, where this one lives in `here`.

        One that joins may speak before this rank has heard of its generation.
        """
        return sender in self.peers or generation > here

    def there(self, peers: Iterable[int]) -> list[int]:
        """Those who were members here and are not known to be gone."""
        return [peer for peer in peers if peer in self.peers and self[peer].gone is None]

    def heard_of(self) -> list[tuple[int, int]]:
        """Which settlements those who live have heard of: generation, and number in it."""
        return [(to.era, to.heard) for peer, to in self.items() if to.gone is None]

    def enter(self, living: Collection[int], *, reopens: bool) -> None:
        """Goes on among those who live: links that were lost are made anew, or new ones met."""
        peers = set(living) - {self._rank}
        for peer in self.keys() - peers:
            self[peer].early.clear()
        for peer in peers:
            if reopens and peer in self and self[peer].gone == LOST:
                self[peer] = Ledger()
            if peer not in self.peers and self[peer].latest < 0:
                self[peer].absent = True
        self.peers |= peers

    def resume(self, generation: int, came: Mapping[int, Sequence[int]], next_round: int) -> None:
        """A collective is over, to which some came; see `Channel.resume`."""
        for peer in self.peers:
            if peer in came:
                self[peer].resume(generation, *came[peer])
            else:
                self[peer].resolve(lambda at: True, Outcome.VOID)
            self[peer].prune(before=place(generation, next_round))
