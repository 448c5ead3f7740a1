"""What came over the links to a rank: whose it is, and whether nothing is missing between."""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from gossipgrad.comm._seal import Opener, in_order, numbered
from gossipgrad.comm._wire import WireError

__all__ = ["BrokenLinkError", "LinksIn", "Opened"]

_KEPT_LINKS = 8  # of one sender: what came over an earlier link may still wait to be read
_MOST_SHOWN = 32  # connections of one link: a handshake that broke off is tried again


class BrokenLinkError(WireError):
    """What came over a link was made up, changed, left out or repeated: the link is over."""

    def __init__(self, sender: int, why: str) -> None:
        super().__init__(why)
        self.sender = sender


class Opened(NamedTuple):
    """A header that is genuine.

    Attributes:
        header: Its bytes.
        sender: Who is proven to have sent it.
        link: The link's name, if it is the first that came over it.
    """

    header: bytes
    sender: int
    link: str | None


@dataclass(slots=True)
class _Link:
    sender: int
    opener: Opener | None
    last: int = 0
    shown: int = 0
    speaker: str | None = None  # the connection over which it speaks
    over: bool = False

    def open(self, sealed: bytes, payload_bytes: int) -> bytes:
        if self.opener is not None:
            return self.opener.open(sealed, payload_bytes)
        header, number, _ = numbered(sealed)
        self.last = in_order(number, self.last)
        return header


class LinksIn:
    """The links over which others send to this rank, by name; the latest few of each sender."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._latest: defaultdict[int, deque[str]] = defaultdict(deque)
        self._forgotten: set[str] = set()

    def show(self, name: str, sender: int, key: bytes) -> str | None:
        """A name for one more connection of a link whose word was genuine, None if it is used up.

        It may come again for as long as nothing was said on it: its connection may have broken
        in the middle of the handshake. Nobody but who knows its key says anything on it.
        """
        link = self._links.get(name)
        if link is None:
            if name in self._forgotten:
                return None
            link = self._add(name, _Link(sender, Opener(key)))
        if link.speaker is not None or link.over or link.shown >= _MOST_SHOWN:
            return None
        link.shown += 1
        return f"{name}.{link.shown}"

    def open_sealed(self, connection: str, sealed: bytes, payload_bytes: int) -> Opened:
        """The header of a message of an unencrypted link.

        Args:
            connection: The name that `show` has given it.
            sealed: What came.
            payload_bytes: What came with it.

        Raises:
            BrokenLinkError: The link was genuine so far, and is over.
            WireError: It is none of a link.
        """
        name = connection.rpartition(".")[0]
        link = self._links.get(name)
        if link is None:
            raise WireError("it came over a link that is long over")
        if link.speaker not in (None, connection):
            raise WireError("it came over another connection than what came before")
        return self._open(name, link, connection, sealed, payload_bytes)

    def open_numbered(self, sender: int, sealed: bytes) -> Opened:
        """The header of a message of an encrypted link.

        Raises:
            BrokenLinkError: Something is missing before it: the link is over.
            WireError: It is none of a link.
        """
        _, _, identity = numbered(sealed)
        name = f"{sender}.{identity.hex()}"
        link = self._links.get(name)
        if link is None:
            if name in self._forgotten:
                raise WireError("it came over a link that is long over")
            link = self._add(name, _Link(sender, None))
        return self._open(name, link, name, sealed, 0)

    def _open(
        self, name: str, link: _Link, connection: str, sealed: bytes, payload_bytes: int
    ) -> Opened:
        if link.over:
            raise WireError("it came over a link that is over")
        try:
            header = link.open(sealed, payload_bytes)
        except WireError as error:
            if link.speaker is None and link.opener is not None:
                raise  # by one who saw the link's word, and does not know its key
            link.over = True
            raise BrokenLinkError(link.sender, str(error)) from error
        first = link.speaker is None
        link.speaker = connection
        return Opened(header, link.sender, name if first else None)

    def _add(self, name: str, link: _Link) -> _Link:
        self._links[name] = link
        latest = self._latest[link.sender]
        latest.append(name)
        if len(latest) > _KEPT_LINKS:
            forgotten = latest.popleft()
            del self._links[forgotten]
            self._forgotten.add(forgotten)
        return link
