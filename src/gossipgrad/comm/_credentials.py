"""What a rank shows to be let in by another, and how it is checked."""

import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
from zmq.utils import z85

from gossipgrad.comm._door import Admission
from gossipgrad.comm._introduction import NONCE_BYTES, Introduction
from gossipgrad.comm._links_in import LinksIn, Opened
from gossipgrad.comm._seal import Numberer, Sealer, Seals
from gossipgrad.comm._secret import SECRET_FILE, Secret
from gossipgrad.comm._wire import WireError
from gossipgrad.errors import AgreementError

__all__ = ["Credentials", "check_can_encrypt"]

_LINK_BYTES = 16
_LATER = 32  # ranks that may have joined beyond the highest that is known
_DOMAIN = b"gossipgrad"
_STRANGER = Admission(None)


class Credentials:
    """How the links of one rank's transport prove that both ends know the secret of the run.

    Unencrypted, a connection shows a keyed hash that is good until something was said on it, for
    one receiver and its time of life; without a good one no message is taken in. Every header is
    then sealed with a key of that link. Encrypted, all keys of CURVE are derived from the secret,
    and whoever lacks them does not get past the handshake; headers are numbered.

    Ranks introduce themselves to each other in two steps: each tells where it listens and random
    bytes of its own; all of that together is the *occasion*, to which each then binds its proof
    that it knows the secret. So no proof is good on another occasion. Who comes later
    proves itself for the same one.

    Args:
        secret: Of the run.
        rank: This rank.
        members: The ranks at the start. Who comes later has a higher number.
        encrypt: Whether links are encrypted.

    Attributes:
        occasion: Tells this meeting of ranks from all others; no secret. Empty before it.
        introductions: Of all ranks that are known, itself among them, with their proofs.
    """

    def __init__(
        self, secret: Secret, rank: int, members: Sequence[int], *, encrypt: bool = False
    ) -> None:
        if encrypt:
            check_can_encrypt()
        self.encrypt = encrypt
        self.occasion = ""
        self.introductions: dict[int, list[Any]] = {}
        self._secret = secret
        self._rank = rank
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._met: dict[int, Introduction] = {}
        self._links = LinksIn()
        self._allowed: dict[bytes, int] = {}  # public keys
        self._last_member = self._last_allowed = max(members)
        if encrypt:
            for member in members:
                self._allow(member)

    def introduce(self, endpoint: str) -> list[Any]:
        """What this rank tells all others first: where and how it listens.

        Args:
            endpoint: Its address.
        """
        self._met[self._rank] = Introduction(endpoint, self._nonce, self.encrypt)
        return self._met[self._rank].told()

    def meet(self, told: Mapping[int, Any]) -> str:
        """This rank's proof that it knows the secret, to be told to all others then.

        Args:
            told: What each of them introduced itself with, this rank among them.

        Raises:
            AgreementError: It is no introduction, or some are encrypted and others not.
        """
        met = {rank: Introduction.read(rank, one) for rank, one in told.items()}
        if met[self._rank] != self._met[self._rank]:
            raise AgreementError(
                f"what rank {self._rank} told of itself comes back as something else: it was "
                "changed on its way"
            )
        for rank, one in met.items():
            self._check_kind(rank, one)
        self._met = met
        content = json.dumps([[rank, met[rank].told()] for rank in sorted(met)])
        self.occasion = hashlib.blake2b(content.encode(), digest_size=32).hexdigest()
        return self._proof(self._rank, met[self._rank])

    def check(self, proofs: Mapping[int, Any]) -> None:
        """Believes what those told whom this rank has met, if all know the same secret.

        Raises:
            AgreementError: Some have another secret.
        """
        others = [
            str(rank) for rank, one in self._met.items() if not self._is_proof(rank, one, proofs)
        ]
        if others:
            raise AgreementError(
                f"rank {self._rank} and rank {', '.join(others)} have different secrets: see that "
                f"{SECRET_FILE} names a file with the same content on every rank, or is set on none"
            )
        for rank, one in self._met.items():
            self._take_in(rank, one, proofs[rank])

    def join(self, occasion: str) -> None:
        """Goes to a meeting that is long over, for which `introduce` came before.

        Args:
            occasion: Which one.
        """
        self.occasion = occasion
        own = self._met[self._rank]
        self._take_in(self._rank, own, self._proof(self._rank, own))

    def take_in(self, rank: int, introduction: Any) -> Introduction:
        """Learns where a rank listens that this one has not met; from any thread.

        Args:
            rank: Its number.
            introduction: What it told, with its proof for this occasion.

        Raises:
            AgreementError: It has not proven that it knows the secret, its links are not
                encrypted as here, or that number is another rank's.
        """
        *told, proof = introduction if isinstance(introduction, list) else [introduction]
        one = Introduction.read(rank, told)
        self._check_kind(rank, one)
        if not self._is_proof(rank, one, {rank: proof}):
            raise AgreementError(
                f"rank {rank} has not proven to rank {self._rank} that it knows the secret of this "
                f"run: see that {SECRET_FILE} names a file with the same content on every rank, or "
                "is set on none"
            )
        if self._met.setdefault(rank, one) != one:
            raise AgreementError(f"rank {rank} is known already, and listens elsewhere")
        self._take_in(rank, one, proof)
        return one

    def introduction_of(self, rank: int) -> Introduction:
        """Where and how a rank listens."""
        return self._met[rank]

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Lets a socket that will listen take in nobody without `admit`; before it is bound."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if self.encrypt:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve("server", self._nonce, self._rank))
        else:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def dress(self, socket: "zmq.Socket[bytes]", peer: int) -> Seals:
        """Gives a socket that will connect to `peer` its credentials, and headers their seal."""
        nonce = self._met[peer].nonce
        link = secrets.token_bytes(_LINK_BYTES)
        if self.encrypt:
            mine = self._curve("client", nonce, self._rank)
            server = zmq.curve_public(self._curve("server", nonce, peer))
            socket.setsockopt(zmq.CURVE_SECRETKEY, mine)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(mine))
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            return Numberer(link)
        socket.setsockopt(zmq.PLAIN_USERNAME, f"{self._rank}.{link.hex()}".encode())
        word = self._of_link("knock", self._rank, peer, nonce, link).hex()
        socket.setsockopt(zmq.PLAIN_PASSWORD, word.encode())
        return Sealer(self._of_link("seal", self._rank, peer, nonce, link))

    def admit(self, mechanism: bytes, shown: Sequence[bytes]) -> Admission:
        """Whose connection it is, by a name of its own.

        Args:
            mechanism: How it shows what it shows.
            shown: Name and word, or a public key.
        """
        if self.encrypt:
            sender = self._sender_of(shown[0]) if mechanism == b"CURVE" and shown else None
            return _STRANGER if sender is None else Admission(str(sender))
        if mechanism != b"PLAIN" or len(shown) != 2:
            return _STRANGER
        with contextlib.suppress(ValueError):
            name = shown[0].decode("ascii")
            number, _, told = name.partition(".")
            sender, link = int(number), bytes.fromhex(told)
            if name != f"{sender}.{link.hex()}" or not 0 <= sender < 1 << 32:
                return _STRANGER
            word = self._of_link("knock", sender, self._rank, self._nonce, link).hex()
            if not hmac.compare_digest(word.encode(), shown[1]):
                return _STRANGER
            key = self._of_link("seal", sender, self._rank, self._nonce, link)
            connection = self._links.show(name, sender, key)
            return Admission(connection, name if connection is None else None)
        return _STRANGER

    def open(self, connection: str, sealed: bytes, payload_bytes: int) -> Opened:
        """The header of a message that came over the connection of that name.

        Raises:
            BrokenLinkError: The link was genuine so far: it was tampered with, and is over.
            WireError: It was not sealed there.
        """
        if not self.encrypt:
            return self._links.open_sealed(connection, sealed, payload_bytes)
        if not connection.isdecimal():
            raise WireError("it came over no connection of a member")
        return self._links.open_numbered(int(connection), sealed)

    def _take_in(self, rank: int, one: Introduction, proof: str) -> None:
        self.introductions[rank] = [*one.told(), proof]

    def _sender_of(self, key: bytes) -> int | None:
        """Whose public key it is; one that has joined may come before this rank hears of that."""
        last = max([self._last_member, *self.introductions]) + _LATER
        while key not in self._allowed and self._last_allowed < last:
            self._last_allowed += 1
            self._allow(self._last_allowed)
        return self._allowed.get(key)

    def _allow(self, rank: int) -> None:
        public = zmq.curve_public(self._curve("client", self._nonce, rank))
        self._allowed[z85.decode(public)] = rank

    def _check_kind(self, rank: int, one: Introduction) -> None:
        if one.encrypt != self.encrypt:
            raise AgreementError(
                f"rank {rank} has encrypt={one.encrypt}, rank {self._rank} has "
                f"encrypt={self.encrypt}: give all ranks the same"
            )

    def _is_proof(self, rank: int, one: Introduction, proofs: Mapping[int, Any]) -> bool:
        expected, told = self._proof(rank, one), proofs.get(rank)
        return isinstance(told, str) and hmac.compare_digest(expected.encode(), told.encode())

    def _proof(self, rank: int, one: Introduction) -> str:
        kind = b"curve" if one.encrypt else b"plain"
        parts = (_number(rank), one.endpoint.encode(), one.nonce, kind, self.occasion.encode())
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
