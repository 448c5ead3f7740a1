"""What a pass has kept so far: states place after place, each knowing where it comes from."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from ._fronts import Front

__all__ = ["Made", "States"]

_NONE = -1


class Made(NamedTuple):
    """States of one place: their times, what they can finish at, and where they come from.

    What one that is joined can finish at holds for all mixtures with the one before it, too.
    """

    first: Float[np.ndarray, " state"]
    second: Float[np.ndarray, " state"]
    joined: Bool[np.ndarray, " state"]
    finish: Float[np.ndarray, " state"]
    choice: Int[np.ndarray, " state"]
    parent: Int[np.ndarray, " state"]

    def take(self, places: Int[np.ndarray, " taken"]) -> "Made":
        """Some of them, in that order."""
        return Made(*(column[places] for column in self))


class States:
    """The states of all places, in arrays that grow.

    Attributes:
        start: Where the states of each place begin.
        count: How many each place has.
        least_first: The least first time of each place; infinite without a state.
        least_second: The least second time.
        first: Of each state.
        second: Of each state.
        joined: Whether mixtures of it with the one before it count.
    """

    def __init__(self, places: int, origin: int) -> None:
        self.start = np.zeros(places, np.int64)
        self.count = np.zeros(places, np.int64)
        self.least_first = np.full(places, np.inf)
        self.least_second = np.full(places, np.inf)
        self.first = np.empty(places)
        self.second = np.empty(places)
        self.joined = np.empty(places, bool)
        self._choice = np.empty(places, np.int64)
        self._parent = np.empty(places, np.int64)
        self._used = 0
        zero, none = np.zeros(1), np.full(1, _NONE)
        self.add(origin, Made(zero, zero, np.zeros(1, bool), zero, none, none))

    def add(self, place: int, made: Made) -> None:
        """Keep the states of a place, the first time rising and the second falling."""
        begin, end = self._used, self._used + made.first.size
        if end > self.first.size:
            room = max(end, 2 * self.first.size)
            self.first, self.second = np.resize(self.first, room), np.resize(self.second, room)
            self.joined = np.resize(self.joined, room)
            self._choice = np.resize(self._choice, room)
            self._parent = np.resize(self._parent, room)
        self.first[begin:end] = made.first
        self.second[begin:end] = made.second
        self.joined[begin:end] = made.joined
        self._choice[begin:end] = made.choice
        self._parent[begin:end] = made.parent
        self.start[place], self.count[place], self._used = begin, end - begin, end
        self.least_first[place], self.least_second[place] = made.first[0], made.second[-1]

    def front(self, place: int) -> Front | None:
        """The states of a place; None if it has none."""
        begin = self.start[place]
        end = begin + self.count[place]
        if begin == end:
            return None
        return Front(self.first[begin:end], self.second[begin:end], self.joined[begin:end])

    def way_to(self, place: int) -> list[int]:
        """The choices that led to the state with the least second time; none if it has none."""
        chosen = []
        if self.count[place]:
            at = int(self.start[place] + self.count[place] - 1)
            while self._parent[at] != _NONE:
                chosen.append(int(self._choice[at]))
                at = int(self._parent[at])
        return chosen
