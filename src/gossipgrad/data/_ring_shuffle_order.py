"""The order in which an epoch hands out a shard."""

import numpy as np
from jaxtyping import Bool, Int


class EpochOrder:
    """The slots of an epoch in their order, and how far it has come.

    Args:
        slots: In their order; copied where it changes.
        place: How many of them were handed out.

    Example:
        >>> order = EpochOrder(np.array([4, 2, 3, 0, 1]))
        >>> order.take(2).tolist()
        [4, 2]
        >>> order.put_off(np.array([False, False, False, True, False]))
        >>> order.rest.tolist()
        [0, 1, 3]
    """

    def __init__(self, slots: Int[np.ndarray, " row"] | None = None, place: int = 0) -> None:
        self.slots = np.empty(0, dtype=np.int64) if slots is None else slots
        self.place = place

    @property
    def used(self) -> Int[np.ndarray, " used"]:
        """The slots that were handed out."""
        return self.slots[: self.place]

    @property
    def rest(self) -> Int[np.ndarray, " rest"]:
        """The slots that were not handed out."""
        return self.slots[self.place :]

    def take(self, size: int) -> Int[np.ndarray, " batch"]:
        """The next slots, at most `size`, which count as handed out."""
        taken = self.rest[:size]
        self.place += len(taken)
        return taken

    def put_off(self, late: Bool[np.ndarray, " slot"]) -> None:
        """Brings those of the rest that are late to its end."""
        is_late = late[self.rest]
        self.slots = np.concatenate([self.used, self.rest[~is_late], self.rest[is_late]])
