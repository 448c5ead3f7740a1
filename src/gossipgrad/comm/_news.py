"""Between a channel, which hears of other ranks, and whoever knows who lives."""

from collections.abc import Collection

__all__ = ["News"]


class News:
    """Is notified in the thread that listens, and returns at once; this one knows nobody lost."""

    def ahead(self, generation: int) -> None:
        """A message of a later generation than this rank's has arrived."""

    def gone(self, peer: int, *, left: bool) -> None:
        """A link ended: its peer said that it leaves, or nothing."""

    def is_member(self) -> bool:
        """Whether this rank may send; asked before each part."""
        return True

    def expelled(self) -> Collection[int]:
        """Ranks that others have found dead, and that are to be given up here as well."""
        return ()
