"""Seals on headers: who made one knows the secret, and each comes once, in order, none missing."""

import hashlib
import hmac
import struct

from gossipgrad.comm._wire import WireError

__all__ = ["SEAL_BYTES", "Numberer", "Opener", "Sealer", "Seals", "in_order", "numbered"]

_SIZES = struct.Struct("!QQ")  # number of the message, bytes of its payload
_NUMBER = struct.Struct("!Q")
_TAG_BYTES = 16
SEAL_BYTES = _NUMBER.size + _TAG_BYTES


def _tag(keyed: hashlib.blake2b, header: bytes, number: int, payload_bytes: int) -> bytes:
    own = keyed.copy()
    own.update(_SIZES.pack(number, payload_bytes))
    own.update(header)
    return own.digest()


def _keyed(key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(key=key, digest_size=_TAG_BYTES, person=b"header")


def numbered(sealed: bytes) -> tuple[bytes, int, bytes]:
    """Header, number and tag of what was sealed.

    Raises:
        WireError: It is too short.
    """
    if len(sealed) < SEAL_BYTES:
        raise WireError(f"{len(sealed)} bytes hold no seal")
    (number,) = _NUMBER.unpack(sealed[-SEAL_BYTES:-_TAG_BYTES])
    return sealed[:-SEAL_BYTES], number, sealed[-_TAG_BYTES:]


def in_order(number: int, last: int) -> int:
    """A message's number, if it is the next.

    Raises:
        WireError: It comes again, or one before it is missing.
    """
    if number <= last:
        raise WireError(f"message {number} comes again: {last} was the last")
    if number != last + 1:
        raise WireError(f"message {number} came behind message {last}: what was between is missing")
    return number


class Sealer:
    """Seals the headers that are sent over one connection, and numbers them.

    A seal is a keyed BLAKE2b of 16 bytes over the header, its number and its payload's size; the
    payload itself is not covered.

    Args:
        key: The connection's own, known to both ends.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = _keyed(key)
        self._number = 0

    def seal(self, header: bytes, payload_bytes: int) -> bytes:
        """The header with its number and seal behind it."""
        self._number += 1
        tag = _tag(self._keyed, header, self._number, payload_bytes)
        return header + _NUMBER.pack(self._number) + tag

    def take_back(self) -> None:
        """The last one was not sent: its number is free."""
        self._number -= 1


class Numberer:
    """Numbers the headers of a connection that is encrypted, and so needs no seal.

    Args:
        link: 16 bytes that tell the link from the earlier ones of the same two ranks.
    """

    def __init__(self, link: bytes) -> None:
        self._link = link
        self._number = 0

    def seal(self, header: bytes, payload_bytes: int) -> bytes:
        """The header with its number and link behind it."""
        self._number += 1
        return header + _NUMBER.pack(self._number) + self._link

    def take_back(self) -> None:
        """The last one was not sent: its number is free."""
        self._number -= 1


Seals = Sealer | Numberer


class Opener:
    """Opens what the `Sealer` of the same key has sealed: each once, in order, and none left out.

    Args:
        key: The connection's own.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = _keyed(key)
        self._last = 0

    def open(self, sealed: bytes, payload_bytes: int) -> bytes:
        """The header, if the seal is genuine and the message the next.

        Raises:
            WireError: It is not.
        """
        header, number, tag = numbered(sealed)
        if not hmac.compare_digest(_tag(self._keyed, header, number, payload_bytes), tag):
            raise WireError("its seal is not genuine")
        self._last = in_order(number, self._last)
        return header
