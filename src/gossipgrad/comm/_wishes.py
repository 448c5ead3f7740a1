"""What newcomers ask of a member, by way of the store."""

from collections.abc import Callable

from gossipgrad.comm._membership import Store

__all__ = ["Wishes", "wish_key"]


def wish_key(rank: int) -> str:
    """Where a newcomer lays what it asks of a rank; one wish at a time."""
    return f"wish/{rank}"


class Wishes:
    """The place in the store where newcomers lay what they ask of one rank.

    Args:
        rank: This rank.

    Attributes:
        heard: Gets each wish as it is taken, in the thread that looks; returns at once. None: this
            rank gives nothing, and wishes stay until those who laid them take them back.
    """

    def __init__(self, rank: int) -> None:
        self.heard: Callable[[str], object] | None = None
        self._key = wish_key(rank)

    def look(self, store: Store) -> None:
        """Takes the wish that lies there, if there is one."""
        if self.heard is None:
            return
        text = store.compare_set(self._key, "", "")  # makes the place, so that nothing waits
        if text and not store.compare_set(self._key, text.decode(), ""):
            self.heard(text.decode())
