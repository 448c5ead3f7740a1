"""What a channel does between rounds: plans, collectives, and generations of the membership."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from gossipgrad.comm._grants import Grants
from gossipgrad.comm._ledgers import Ledgers
from gossipgrad.comm._part import Part
from gossipgrad.comm._settlements import Settlements
from gossipgrad.comm._transport import Transport
from gossipgrad.comm._wire import Kind

__all__ = ["BetweenRounds"]


class BetweenRounds(ABC):
    """The part of `Channel` that brings all its links to the same place."""

    rank: int
    plan: tuple[Part, ...]
    generation: int
    _transport: Transport
    _lock: threading.RLock
    _ledgers: Ledgers
    _grants: Grants
    _settlements: Settlements
    _last_round: int
    _arrived: bool

    @abstractmethod
    def _announce(self, kind: Kind, peers: Iterable[int], round: int | None = None) -> None: ...

    @abstractmethod
    def _catch_up(self, peer: int) -> None: ...

    def replan(self, plan: Sequence[Part]) -> None:
        """Goes on with other buckets; nothing may be open, and all ranks do it between rounds."""
        with self._lock:
            assert not any(ledger.open for ledger in self._ledgers.values()), "exchanges are open"
            for ledger in self._ledgers.values():
                ledger.early.clear()
            self.plan = tuple(plan)

    def settle(self) -> tuple[int, int]:
        """Tells everyone that nothing past the last posted round comes before `resume`.

        Partners that are rounds ahead then see those rounds as void instead of waiting for us, and
        so they are here, whenever their parts come.

        Returns:
            What `resume` needs to know of this rank on the others.
        """
        with self._lock:
            last = self._last_round
            self._grants.release(last)
            self._settlements.forget(self._ledgers.heard_of())
            for peer in [*self._ledgers]:
                self._ledgers[peer].void_early(self.generation, past=last)
                # It may await that round, and we listen to nobody now. With the number of what
                # begins here it would take the collective for over: the round may be past the last.
                self._catch_up(peer)
            number = self._settlements.add(self.generation, last)
            self._announce(Kind.SETTLE, self._ledgers.peers)
            return number, last

    def unsettle(self) -> None:
        """Takes back `settle`: the ranks did not come together, and rounds go on as they were."""
        with self._lock:
            self._announce(Kind.GO_ON, self._ledgers.peers)

    def resume(self, came: Mapping[int, Sequence[int]], next_round: int) -> None:
        """Ends what `settle` began, once all ranks came together.

        Args:
            came: What `settle` returned on each rank. What is open past its last round is void, and
                all that is open with those who are not among them.
            next_round: Where rounds go on, equal on all ranks.
        """
        with self._lock:
            self._ledgers.resume(self.generation, came, next_round)

    def enter(self, generation: int, next_round: int, living: Collection[int]) -> None:
        """Lives in another membership from `next_round` on, and tells those who live in it.

        What is under way with them counts if both have sent their part before they entered; with
        others it is over. Rounds with a peer are void until it has said that it entered, too. Links
        that broke between those who live are made anew.
        """
        with self._lock:
            assert generation > self.generation, f"generation {generation} is no later one"
            self.generation = generation
            self._grants.release(self._last_round)
            self._ledgers.enter(living, reopens=getattr(self._transport, "reopens", False))
            if self._arrived:
                self._announce(Kind.ENTER, living, next_round)

    def arrive(self, next_round: int, living: Collection[int]) -> None:
        """Takes part from `next_round` on, where this rank has joined others, and tells them.

        Until then rounds with it are void at once on all of them.
        """
        with self._lock:
            self._arrived = True
            self._announce(Kind.ENTER, living, next_round)
