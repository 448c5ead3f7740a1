"""What a channel reports about other ranks, and what it asks about them."""

from collections.abc import Collection

__all__ = ["Liveness"]


class Liveness:
    """Notified and asked by a channel; every method returns at once. This one: all ranks live."""

    def hear_generation(self, generation: int) -> None:
        """A message of a later generation than this rank's has arrived."""

    def hear_end(self, peer: int, *, left: bool) -> None:
        """A link ended: its peer said that it leaves, or nothing."""

    def is_member(self) -> bool:
        """Whether this rank may send; asked before each part."""
        return True

    def expelled(self) -> Collection[int]:
        """Ranks that others have found dead, and that are to be given up here as well."""
        return ()
