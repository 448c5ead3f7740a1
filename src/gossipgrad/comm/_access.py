"""Who may connect to a rank: anyone that reaches it, or only holders of the run's secret."""

import errno
import hashlib
import os
import stat
from collections import Counter
from pathlib import Path

import zmq
from zmq.auth import Authenticator
from zmq.utils import z85

from gossipgrad._messages import warn
from gossipgrad.comm._group import Group
from gossipgrad.errors import AgreementError, GossipError

__all__ = ["SECRET_FILE", "Access", "check_encrypt", "check_same", "check_secret", "meet_access"]

SECRET_FILE = "GOSSIPGRAD_SECRET_FILE"
_LEAST_BYTES, _MOST_BYTES = 32, 4096
_WAY_OUT = (
    f"make one with `openssl rand -hex {_LEAST_BYTES} > run.secret && chmod 600 run.secret`, copy "
    f"it to every rank, and name it there: {SECRET_FILE}=run.secret"
)


class Access:
    """Plain links, or links encrypted by CURVE between holders of a secret.

    All ranks have the same key pair, derived from the secret. A rank accepts connections only from
    holders of the secret, and connects only to them; nobody else can read or change a message.

    Args:
        secret: Random bytes that all ranks of a run know and nobody else; None: links are plain.

    Attributes:
        fingerprint: Equal for equal secrets, and reveals nothing about them; None: links are plain.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._keys: tuple[bytes, bytes] | None = None  # public, private
        self.fingerprint: str | None = None
        if secret is not None:
            key = hashlib.blake2b(secret, person=b"gossipgrad run").digest()
            private = z85.encode(_derive(key, b"curve"))
            self._keys = zmq.curve_public(private), private
            self.fingerprint = _derive(key, b"fingerprint").hex()

    @classmethod
    def resolve(cls, encrypt: bool | None) -> "Access":
        """Create the access from the file that `GOSSIPGRAD_SECRET_FILE` names.

        Args:
            encrypt: Whether to encrypt; None: if a file is named.

        Raises:
            ValueError: The file is missing or invalid, or ZeroMQ cannot encrypt here.
        """
        where = os.environ.get(SECRET_FILE)
        if encrypt is False or (encrypt is None and not where):
            return cls(None)
        check_encrypt(True)
        if not where:
            raise ValueError(f"encrypt=True needs a file with a secret: {_WAY_OUT}")
        return cls(_secret_in(where))

    def let_in(self, socket: "zmq.Socket[bytes]") -> Authenticator | None:
        """Make a listening socket refuse clients without the secret.

        Returns:
            The authenticator, which has its own thread; stop it before the socket's context ends.
            None if links are plain.
        """
        if self._keys is None:
            return None
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio

        authenticator = ThreadAuthenticator(socket.context)
        authenticator.configure_curve_callback(credentials_provider=self)
        authenticator.start()
        authenticator.thread.name = "gossipgrad-access"
        socket.curve_server = True
        socket.curve_secretkey = self._keys[1]
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with that public key may connect; called by the authenticator."""
        return self._keys is not None and key == self._keys[0]

    def identify(self, socket: "zmq.Socket[bytes]") -> None:
        """Give a connecting socket the run's keys."""
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys
            socket.curve_serverkey = self._keys[0]


def meet_access(group: Group, encrypt: bool | None) -> Access:
    """Return this rank's access after checking that all ranks have the same; a collective.

    Raises:
        ValueError: This rank's secret is missing or invalid.
        AgreementError: Ranks have different secrets, or only some encrypt.
        GossipError: Another rank's secret is missing or invalid.
    """
    access, mistake = Access(None), None
    try:
        access = Access.resolve(encrypt)
    except ValueError as error:
        mistake = error
    answers = group.all_gather_object([access.fingerprint, mistake and str(mistake)])
    if mistake is not None:
        raise mistake
    for rank, (_, why) in zip(group.members, answers, strict=True):
        if why is not None:
            raise GossipError(f"rank {rank} cannot encrypt: {why}")
    fingerprints = [fingerprint for fingerprint, _ in answers]
    usual = Counter(fingerprints).most_common(1)[0][0]
    for rank, fingerprint in zip(group.members, fingerprints, strict=True):
        check_same(rank, fingerprint, usual)
    return access


def check_same(rank: int, fingerprint: str | None, others: str | None) -> None:
    """Compare the fingerprint of a rank with that of the others.

    Raises:
        AgreementError: The secrets differ, or only one of the two encrypts.
    """
    if fingerprint == others:
        return
    if None in (fingerprint, others):
        one, rest = "does not encrypt", "do"
        if fingerprint is not None:
            one, rest = "encrypts", "do not"
        raise AgreementError(
            f"rank {rank} {one} its links, and others {rest}: name the same secret on every "
            f"rank ({SECRET_FILE}), or none"
        )
    raise AgreementError(
        f"rank {rank} has another secret than the others: make {SECRET_FILE} name a file with "
        "the same content on every rank"
    )


def check_secret(encrypt: bool | None) -> None:
    """Raise the error that would keep this rank from encrypting, before it meets others; local.

    Args:
        encrypt: Whether to encrypt; None: if a file with a secret is named.

    Raises:
        ValueError: The file is missing or invalid, or ZeroMQ cannot encrypt here.
    """
    Access.resolve(encrypt)


def check_encrypt(encrypt: object) -> None:
    """Check a value of `encrypt`.

    Raises:
        ValueError: It is not True, False or None, or ZeroMQ cannot encrypt here.
    """
    if encrypt is not None and not isinstance(encrypt, bool):
        raise ValueError(f"encrypt must be True, False or None, got {encrypt!r}")
    if encrypt and not zmq.has("curve"):
        raise ValueError(
            f"encryption needs CURVE, and the ZeroMQ {zmq.zmq_version()} that pyzmq uses here "
            "was built without it: install pyzmq from its wheel, `pip install --force-reinstall "
            "--only-binary pyzmq pyzmq`, or use a network that encrypts, such as WireGuard"
        )


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(key=key, digest_size=32, person=purpose).digest()


def _secret_in(where: str) -> bytes:
    """Return a file's stripped content; warn if other users can read it."""
    path = Path(where)
    try:
        if not path.is_file():  # a pipe might never end
            raise FileNotFoundError(errno.ENOENT, "not a plain file")
        mode, content = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ValueError(
            f"cannot read {SECRET_FILE}={where}: {error.strerror}; {_WAY_OUT}"
        ) from error
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        warn(f"other users can read the secret in {path}: chmod 600 {path}")
    if not _LEAST_BYTES <= len(content) <= _MOST_BYTES:
        raise ValueError(
            f"{SECRET_FILE}={where} holds {len(content)} bytes, but a secret has {_LEAST_BYTES} to "
            f"{_MOST_BYTES}: {_WAY_OUT}"
        )
    return content
