"""Who may speak on a run's links: holders of its secret."""

import errno
import hashlib
import hmac
import os
import secrets
import stat
from collections import Counter
from pathlib import Path

from gossipgrad._messages import warn
from gossipgrad.comm._group import Group
from gossipgrad.errors import AgreementError, GossipError

__all__ = ["SECRET_FILE", "Access", "check_same", "check_secret", "meet_access"]

SECRET_FILE = "GOSSIPGRAD_SECRET_FILE"
_LEAST_BYTES, _MOST_BYTES = 32, 4096
_WAY_OUT = (
    f"make one with `openssl rand -hex {_LEAST_BYTES} > run.secret && chmod 600 run.secret`, copy "
    f"it to every rank, and name it there: {SECRET_FILE}=run.secret"
)


class Access:
    """A secret that both ends of a link prove to know, without sending it."""

    def __init__(self, secret: bytes, *, is_from_file: bool) -> None:
        key = hashlib.blake2b(secret, person=b"gossipgrad run").digest()
        self._key = _derive(key, b"hello")
        # Equal for equal files, and reveals nothing about them.
        self.fingerprint = _derive(key, b"fingerprint").hex() if is_from_file else None
        # For the run's store.
        self.published = None if is_from_file else secret.hex()

    @classmethod
    def resolve(cls, published: str | None) -> "Access":
        """Return the access by the file that the environment names, or by a published secret."""
        if where := os.environ.get(SECRET_FILE):
            return cls(_secret_in(where), is_from_file=True)
        if published is None:
            raise ValueError(
                f"the run's links need the secret in a file, and {SECRET_FILE} names none here: "
                "copy the file from another rank of the run, and name it"
            )
        return cls(bytes.fromhex(published), is_from_file=False)

    def proof(self, *facts: bytes | bytearray) -> bytes:
        """Return 32 bytes that only a holder of the secret can compute from these facts."""
        return hmac.digest(self._key, b"".join(facts), "sha256")


def meet_access(group: Group) -> Access:
    """Return this rank's access, drawn by the lowest rank if no rank has a file; a collective."""
    drawn, mistake = secrets.token_hex(_LEAST_BYTES), None
    access = Access(bytes.fromhex(drawn), is_from_file=False)
    try:
        access = Access.resolve(drawn)
    except ValueError as error:
        mistake = error
    answers = group.all_gather_object([access.fingerprint, mistake and str(mistake), drawn])
    if mistake is not None:
        raise mistake
    for rank, (_, why, _) in zip(group.members, answers, strict=True):
        if why is not None:
            raise GossipError(f"rank {rank} has no secret: {why}")
    fingerprints = [fingerprint for fingerprint, *_ in answers]
    usual = Counter(fingerprints).most_common(1)[0][0]
    for rank, fingerprint in zip(group.members, fingerprints, strict=True):
        check_same(rank, fingerprint, usual)
    return access if access.fingerprint else Access.resolve(answers[0][2])


def check_same(rank: int, fingerprint: str | None, others: str | None) -> None:
    """Raise `AgreementError` unless a rank's file has the fingerprint of the others'."""
    if fingerprint == others:
        return
    if None in (fingerprint, others):
        one, rest = ("names no", "do") if fingerprint is None else ("names a", "do not")
        raise AgreementError(
            f"rank {rank} {one} file with a secret, and others {rest}: name the same secret on "
            f"every rank ({SECRET_FILE}), or none"
        )
    raise AgreementError(
        f"rank {rank} has another secret than the others: make {SECRET_FILE} name a file with "
        "the same content on every rank"
    )


def check_secret() -> None:
    """Check the file with the secret, if one is named, before this rank meets others; local.

    Raises:
        ValueError: The file is missing or invalid.
    """
    Access.resolve("")


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
