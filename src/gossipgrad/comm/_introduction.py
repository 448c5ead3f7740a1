"""How a rank introduces itself to the others of its run: where and how it listens."""

import re
from dataclasses import dataclass
from typing import Any

from gossipgrad.errors import AgreementError

__all__ = ["NONCE_BYTES", "Introduction"]

NONCE_BYTES = 16
_ENDPOINT = re.compile(r"tcp://(?:\[(?P<bracketed>[0-9A-Za-z:.%]+)\]|(?P<plain>[^:/\s]+)):\d{1,5}")


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank tells of itself.

    Attributes:
        endpoint: Where it listens.
        nonce: Random bytes of its transport's time of life.
        encrypt: Whether its links are encrypted.
    """

    endpoint: str
    nonce: bytes
    encrypt: bool

    @classmethod
    def read(cls, rank: int, told: Any) -> "Introduction":
        """What `rank` told, checked before it is believed.

        Raises:
            AgreementError: It is no introduction.
        """
        match told:
            case [str(endpoint), str(nonce), bool(encrypt)] if _ENDPOINT.fullmatch(
                endpoint
            ) and re.fullmatch(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", nonce):
                return cls(endpoint, bytes.fromhex(nonce), encrypt)
        raise AgreementError(
            f"rank {rank} introduces itself with {str(told)[:200]!r}: install the same version of "
            "gossipgrad on every rank"
        )

    def told(self) -> list[Any]:
        """As values of JSON."""
        return [self.endpoint, self.nonce.hex(), self.encrypt]

    @property
    def host(self) -> str:
        """Of its address."""
        match = _ENDPOINT.fullmatch(self.endpoint)
        assert match is not None
        return match["bracketed"] or match["plain"]
