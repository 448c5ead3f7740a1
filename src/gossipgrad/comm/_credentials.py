"""What a rank shows to be let in by another, and how it is checked."""

import contextlib
import hmac
import secrets
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
from zmq.utils import z85

from gossipgrad.comm._seal import Opener, Sealer
from gossipgrad.comm._secret import SECRET_FILE, Secret
from gossipgrad.comm._wire import WireError
from gossipgrad.errors import AgreementError

__all__ = ["Credentials", "check_can_encrypt"]

_NONCE_BYTES = 16
_DOMAIN = b"gossipgrad"
_KEPT_LINKS = 8  # of one sender: what came over an earlier link may still wait to be read


class Credentials:
    """How the links of one rank's transport prove that both ends know the secret of the run.

    Unencrypted, a connection shows a keyed hash that is good once, for one receiver and its time of
    life; without a good one no message is taken in. Every header is then sealed with a key of that
    connection. Encrypted, all keys of CURVE are derived from the secret, and whoever lacks them
    does not get past the handshake.

    Args:
        secret: Of the run.
        rank: This rank.
        members: The ranks that may send to it.
        encrypt: Whether links are encrypted.

    Raises:
        ValueError: They are to be, and the ZeroMQ here cannot.
    """

    def __init__(
        self, secret: Secret, rank: int, members: Sequence[int], *, encrypt: bool = False
    ) -> None:
        if encrypt:
            check_can_encrypt()
        self.encrypt = encrypt
        self._secret = secret
        self._rank = rank
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._nonces: dict[int, bytes] = {}
        self._used: set[bytes] = set()
        self._openers: dict[str, Opener] = {}
        self._latest: defaultdict[int, deque[str]] = defaultdict(deque)
        self._allowed: dict[bytes, int] = {}
        if encrypt:
            for member in members:
                public = zmq.curve_public(self._curve("client", self._nonce, member))
                self._allowed[z85.decode(public)] = member

    def introduce(self, endpoint: str) -> list[Any]:
        """What this rank tells all others: where and how it listens, and that it knows the secret.

        Args:
            endpoint: Its address.
        """
        return [endpoint, self._nonce.hex(), self.encrypt, self._proof(self._rank, endpoint)]

    def meet(self, told: Mapping[int, Sequence[Any]]) -> dict[int, str]:
        """The addresses of all ranks, if all know the same secret.

        Args:
            told: What each of them introduced itself with, this rank among them.

        Raises:
            AgreementError: Some are encrypted and others not, or have another secret.
        """
        for rank, (_, _, encrypt, _) in told.items():
            if encrypt != self.encrypt:
                raise AgreementError(
                    f"rank {rank} has encrypt={encrypt}, rank {self._rank} has "
                    f"encrypt={self.encrypt}: give all ranks the same"
                )
        self._nonces = {rank: bytes.fromhex(nonce) for rank, (_, nonce, _, _) in told.items()}
        others = [
            str(rank)
            for rank, (endpoint, _, _, proof) in told.items()
            if not hmac.compare_digest(self._proof(rank, endpoint), proof)
        ]
        if others:
            raise AgreementError(
                f"rank {self._rank} and rank {', '.join(others)} have different secrets: see that "
                f"{SECRET_FILE} names a file with the same content on every rank, or is set on none"
            )
        return {rank: endpoint for rank, (endpoint, _, _, _) in told.items()}

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Lets a socket that will listen take in nobody without `admit`; before it is bound."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if self.encrypt:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve("server", self._nonce, self._rank))
        else:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def dress(self, socket: "zmq.Socket[bytes]", peer: int) -> Sealer | None:
        """Gives a socket that will connect to `peer` its credentials, and headers their seal."""
        nonce = self._nonces[peer]
        if self.encrypt:
            mine = self._curve("client", nonce, self._rank)
            server = zmq.curve_public(self._curve("server", nonce, peer))
            socket.setsockopt(zmq.CURVE_SECRETKEY, mine)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(mine))
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            return None
        link = secrets.token_bytes(_NONCE_BYTES)
        socket.setsockopt(zmq.PLAIN_USERNAME, f"{self._rank}.{link.hex()}".encode())
        word = self._of_link("knock", self._rank, peer, nonce, link).hex()
        socket.setsockopt(zmq.PLAIN_PASSWORD, word.encode())
        return Sealer(self._of_link("seal", self._rank, peer, nonce, link))

    def admit(self, mechanism: bytes, shown: Sequence[bytes]) -> str | None:
        """Whose connection it is, by a name of its own; None for a stranger's.

        Args:
            mechanism: How it shows what it shows.
            shown: Name and word, or a public key.
        """
        if self.encrypt:
            sender = self._allowed.get(shown[0]) if mechanism == b"CURVE" and shown else None
            return None if sender is None else str(sender)
        if mechanism != b"PLAIN" or len(shown) != 2:
            return None
        with contextlib.suppress(ValueError):
            name = shown[0].decode("ascii")
            number, _, told = name.partition(".")
            sender, link = int(number), bytes.fromhex(told)
            if name != f"{sender}.{link.hex()}" or not 0 <= sender < 1 << 32 or link in self._used:
                return None
            word = self._of_link("knock", sender, self._rank, self._nonce, link).hex()
            if not hmac.compare_digest(word.encode(), shown[1]):
                return None
            self._used.add(link)
            self._note(name, sender, link)
            return name
        return None

    def open(self, name: str, sealed: bytes, payload_bytes: int) -> bytes:
        """The header of a message that came over the connection of that name.

        Raises:
            WireError: It was not sealed there, or comes again.
        """
        if self.encrypt:
            return sealed
        opener = self._openers.get(name)
        if opener is None:
            raise WireError("it came over a link that is long over")
        return opener.open(sealed, payload_bytes)

    def _note(self, name: str, sender: int, link: bytes) -> None:
        key = self._of_link("seal", sender, self._rank, self._nonce, link)
        self._openers[name] = Opener(key)
        latest = self._latest[sender]
        latest.append(name)
        if len(latest) > _KEPT_LINKS:
            del self._openers[latest.popleft()]

    def _proof(self, rank: int, endpoint: str) -> str:
        nonce = self._nonce if rank == self._rank else self._nonces[rank]
        parts = (_number(rank), endpoint.encode(), nonce, b"curve" if self.encrypt else b"plain")
        return self._secret.derive("introduction", *parts).hex()

    def _of_link(
        self, purpose: str, sender: int, receiver: int, nonce: bytes, link: bytes
    ) -> bytes:
        return self._secret.derive(purpose, _number(sender), _number(receiver), nonce, link)

    def _curve(self, whose: str, nonce: bytes, rank: int) -> bytes:
        return z85.encode(self._secret.derive(f"curve {whose}", nonce, _number(rank)))


def check_can_encrypt() -> None:
    """Raise if the ZeroMQ here cannot encrypt.

    Raises:
        ValueError: It cannot.
    """
    if not zmq.has("curve"):
        raise ValueError(
            f"encrypt=True needs CURVE, and the ZeroMQ {zmq.zmq_version()} that pyzmq uses here "
            "was built without it: install pyzmq from its wheel, `pip install --force-reinstall "
            "--only-binary pyzmq pyzmq`, or leave encrypt out and use a network that encrypts, "
            "such as WireGuard"
        )


def _number(rank: int) -> bytes:
    return rank.to_bytes(8, "big")
