"""What one rank of mode stale has opened and mixed, step by step: enough to do it all again."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["DeliveryLog", "Opening"]

_HEAD = 4

Mixed = list[tuple[int, int]]  # round and bucket of each delta, in the order in which they came


@dataclass(slots=True)
class Opening:
    """The end of one round and the beginning of the next.

    Attributes:
        round: The one that began.
        sent: Whether this rank sent its part of it.
        closed: What was mixed at the end of the round before.
        taken: What was mixed right after the beginning.
    """

    round: int
    sent: bool = True
    closed: Mixed = field(default_factory=list)
    taken: Mixed = field(default_factory=list)


class DeliveryLog:
    """Openings in their order, a few integers each, by their numbers from 0.

    It grows with the run, in memory and in every state that is saved. Who saves states calls
    `forget` after each: the log in a state is then that since the state before, which is enough to
    go from there to here again.

    Example:
        >>> log = DeliveryLog()
        >>> log.add(Opening(round=3, closed=[(1, 0)]))
        >>> log[0], len(log), DeliveryLog(log.tensor())[0].round
        (Opening(round=3, sent=True, closed=[(1, 0)], taken=[]), 1, 3)
        >>> log.forget(before=1)
        >>> log.first, len(log), log.tensor().numel()
        (1, 1, 1)
    """

    def __init__(self, values: Tensor | Sequence[int] = ()) -> None:
        held = values.tolist() if isinstance(values, Tensor) else list(values)
        self._first = held[0] if held else 0
        self._values = array("q", held[1:])
        self._starts = array("q")
        place = 0
        while place < len(self._values):
            self._starts.append(place)
            place += _HEAD + 2 * (self._values[place + 2] + self._values[place + 3])

    @property
    def first(self) -> int:
        """The number of the first opening that is not forgotten."""
        return self._first

    def __len__(self) -> int:
        """How many openings there were, with those that are forgotten."""
        return self._first + len(self._starts)

    def __getitem__(self, number: int) -> Opening:
        """One of them.

        Raises:
            IndexError: It was not yet, or is forgotten.
        """
        if not self._first <= number < len(self):
            raise IndexError(
                f"opening {number} is not in the log, which has {self._first} to {len(self) - 1}"
            )
        start = self._starts[number - self._first]
        round, sent, closed, taken = self._values[start : start + _HEAD]
        start += _HEAD
        return Opening(
            round=round,
            sent=bool(sent),
            closed=self._pairs(start, closed),
            taken=self._pairs(start + 2 * closed, taken),
        )

    def add(self, opening: Opening) -> None:
        """One more."""
        mixed = [*opening.closed, *opening.taken]
        self._starts.append(len(self._values))
        head = [opening.round, opening.sent, len(opening.closed), len(opening.taken)]
        self._values.extend(head)
        self._values.extend(number for pair in mixed for number in pair)

    def forget(self, *, before: int) -> None:
        """Drops the openings before a number, at most all; the others keep their numbers."""
        count = max(0, min(before, len(self)) - self._first)
        end = self._starts[count] if count < len(self._starts) else len(self._values)
        del self._values[:end]
        self._starts = array("q", (start - end for start in self._starts[count:]))
        self._first += count

    def tensor(self) -> Tensor:
        """All that is not forgotten as integers, shape `(numbers,)`."""
        return torch.tensor([self._first, *self._values], dtype=torch.int64)

    def _pairs(self, start: int, count: int) -> Mixed:
        flat = self._values[start : start + 2 * count]
        return list(zip(flat[::2], flat[1::2], strict=True))
