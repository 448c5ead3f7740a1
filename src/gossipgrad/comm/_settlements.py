"""The collectives that a rank has come to, and the parts of others that they make void."""

from collections import deque
from collections.abc import Iterable

__all__ = ["Settlements"]


class Settlements:
    """Tells which parts were sent by a peer that had not heard yet that this rank had settled.

    Hearing it, that peer takes for void what it has sent past this rank's last round: those rounds
    would else keep it waiting. Its parts may arrive at any time after that, also when the
    collective has failed and this rank goes on with these very rounds: they are void here, too.

    Example:
        >>> settlements = Settlements()
        >>> settlements.add(generation=0, last=4)
        1
        >>> settlements.makes_void(0, known=0, at=5), settlements.makes_void(0, known=1, at=5)
        (True, False)
    """

    def __init__(self) -> None:
        self._all: deque[tuple[int, int, int]] = deque()  # generation, number in it, last round
        self._newest = (0, 0)

    def add(self, generation: int, last: int) -> int:
        """Takes note that nothing comes past the place `last` for a while; numbers that, from 1."""
        number = self.number(generation) + 1
        self._newest = (generation, number)
        self._all.append((generation, number, last))
        return number

    def number(self, generation: int) -> int:
        """That of the last settlement in a generation, 0 before the first."""
        return self._newest[1] if self._newest[0] == generation else 0

    def makes_void(self, generation: int, *, known: int, at: int) -> bool:
        """Whether a part is void whose sender knew of the first `known` of a generation."""
        for when, number, last in self._all:
            if when == generation and number > known:
                return at > last
        return False

    def forget(self, heard: Iterable[tuple[int, int]]) -> None:
        """Forgets what all peers have heard of: up to which generation, and number in it."""
        first = min(heard, default=self._newest)
        while self._all and self._all[0][:2] <= first:
            self._all.popleft()
