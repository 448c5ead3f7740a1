"""What a channel tells of other ranks, as it hears it."""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

__all__ = ["News", "Unheard"]


@runtime_checkable
class News(Protocol):
    """Is told in the thread that listens, and returns at once."""

    def ahead(self, generation: int) -> None:
        """A message came of a generation later than this rank's."""
        ...

    def gone(self, peer: int, *, left: bool) -> None:
        """A link ended: its peer said that it leaves, or nothing."""
        ...

    def is_member(self) -> bool:
        """Whether this rank may send; asked before each part."""
        ...

    def expelled(self) -> Collection[int]:
        """Ranks that others have found dead, and that are to be given up here as well."""
        ...


class Unheard:
    """Nobody who wants to know."""

    def ahead(self, generation: int) -> None:
        """Does nothing."""

    def gone(self, peer: int, *, left: bool) -> None:
        """Does nothing."""

    def is_member(self) -> bool:
        """It is."""
        return True

    def expelled(self) -> Collection[int]:
        """None."""
        return ()
