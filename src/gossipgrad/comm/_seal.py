"""Seals on headers: who made one knows the secret, and it comes once and in order."""

import hashlib
import hmac
import struct

from gossipgrad.comm._wire import WireError

__all__ = ["SEAL_BYTES", "Opener", "Sealer"]

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


class Opener:
    """Opens what the `Sealer` of the same key has sealed, each once, and none behind a later one.

    Args:
        key: The connection's own.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = _keyed(key)
        self._last = 0

    def open(self, sealed: bytes, payload_bytes: int) -> bytes:
        """The header, if the seal is genuine and was not seen before.

        Raises:
            WireError: It is not, or was.
        """
        header, number_bytes = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:-_TAG_BYTES]
        if len(sealed) < SEAL_BYTES:
            raise WireError(f"{len(sealed)} bytes hold no seal")
        (number,) = _NUMBER.unpack(number_bytes)
        tag = _tag(self._keyed, header, number, payload_bytes)
        if not hmac.compare_digest(tag, sealed[-_TAG_BYTES:]):
            raise WireError("its seal is not genuine")
        if number <= self._last:
            raise WireError(f"message {number} comes again: {self._last} was the last")
        self._last = number
        return header
