"""The secret of a run: who knows it may speak."""

import errno
import hashlib
import os
import secrets
import stat
import warnings
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm._asked_store import AskedStore
from gossipgrad.comm._group import Group
from gossipgrad.errors import AgreementError, GossipError

__all__ = [
    "SECRET_FILE",
    "Secret",
    "given_secret",
    "joining_secret",
    "meet_secret",
    "secret_in",
]

SECRET_FILE = "GOSSIPGRAD_SECRET_FILE"
_LEAST_BYTES, _MOST_BYTES = 32, 4096
_STORE_KEY = "secret"


class Secret:
    """Random bytes that all ranks of a run know and nobody else; shows them to no one.

    Keys for different purposes are derived from it, so that one tells nothing of another.

    Args:
        random_bytes: At least 32.

    Example:
        >>> secret = Secret(bytes(32))
        >>> secret
        Secret(...)
        >>> secret.derive("links", b"0", b"1") == secret.derive("links", b"01")
        False
    """

    __slots__ = ("_key",)

    def __init__(self, random_bytes: bytes) -> None:
        if len(random_bytes) < _LEAST_BYTES:
            raise ValueError(
                f"a secret has {_LEAST_BYTES} random bytes at least, got {len(random_bytes)}: use "
                f"secrets.token_bytes({_LEAST_BYTES})"
            )
        self._key = hashlib.blake2b(random_bytes, person=b"gossipgrad run").digest()

    def derive(self, purpose: str, *parts: bytes) -> bytes:
        """A key of 32 bytes for a purpose (16 letters at most) and what it is bound to."""
        keyed = hashlib.blake2b(key=self._key, digest_size=32, person=purpose.encode())
        for part in parts:
            keyed.update(len(part).to_bytes(8, "big") + part)
        return keyed.digest()

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret stays in its process: every rank reads or asks for its own")


def given_secret() -> Secret | None:
    """What the file holds that `GOSSIPGRAD_SECRET_FILE` names, None if that is not set.

    Space at both ends of the content is left out. A warning says if other users can read it.

    Raises:
        ValueError: It cannot be read, or is too short or too long.
    """
    where = os.environ.get(SECRET_FILE)
    if not where:
        return None
    way_out = f"make one with `openssl rand -hex {_LEAST_BYTES}`, the same for every rank"
    try:
        content = _content(Path(where))
    except OSError as error:
        raise ValueError(
            f"cannot read {SECRET_FILE}={where}: {error.strerror}; {way_out}"
        ) from error
    if len(content) < _LEAST_BYTES:
        raise ValueError(
            f"{SECRET_FILE}={where} holds {len(content)} bytes, white space at its ends left out, "
            f"but a secret has {_LEAST_BYTES} at least: {way_out}"
        )
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{SECRET_FILE}={where} holds more than {_MOST_BYTES} bytes: {way_out}")
    return Secret(content)


def _content(path: Path) -> bytes:
    """What a file holds, with space at its ends left out; a little more than a secret may have."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe may have no writer

    with open(path, "rb", opener=opener) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
            warnings.warn(
                f"other users can read the secret in {path}: chmod 600 {path}", stacklevel=2
            )
        return file.read(_MOST_BYTES + 64).strip()


def meet_secret(group: Group) -> Secret:
    """The secret of a run, equal on all ranks; a collective.

    It is the one in the file that `GOSSIPGRAD_SECRET_FILE` names, and then leaves no rank. Where no
    rank has one, the lowest makes 32 random bytes and puts them into the store of the group: who
    can read the store knows them.

    Raises:
        ValueError: This rank's file cannot be read, or is too short.
        AgreementError: Some ranks have a file, and others have none.
        GossipError: Another rank's file is no good, or the store does not answer.
    """
    mine: Secret | None = None
    mistake: ValueError | None = None
    try:
        mine = given_secret()
    except ValueError as error:
        mistake = error
    if mine is None and mistake is None and group.rank == group.members[0]:
        _ask(group, make=True)
    told = group.all_gather_object([mine is not None, None if mistake is None else str(mistake)])
    if mistake is not None:
        raise mistake
    for rank, (_, why) in zip(group.members, told, strict=True):
        if why is not None:
            raise GossipError(f"rank {rank} has no secret: {why}")
    has = [given for given, _ in told]
    if len(set(has)) > 1:
        one, other = (group.members[has.index(given)] for given in (True, False))
        raise AgreementError(
            f"rank {one} has a secret from {SECRET_FILE} and rank {other} has none: set it on "
            "every rank, or on none"
        )
    return _ask(group, make=False) if mine is None else mine


def joining_secret(held: bytes | None) -> Secret:
    """The secret of a run, for one that joins it; local.

    Args:
        held: What the store of the run holds as its secret, None if nothing.

    Raises:
        ValueError: This rank has a file and the run has none, or the other way round, or the file
            is no good.
    """
    mine = given_secret()
    if (mine is None) == (held is None):
        raise ValueError(
            f"the run has its secret {'from a file' if held is None else 'in its store'}, and "
            f"{SECRET_FILE} {'is not set' if mine is None else 'is set'} here: set it for those "
            "who join as for the others"
        )
    if mine is not None:
        return mine
    assert held is not None
    return Secret(held)


def secret_in(store: dist.Store) -> bytes | None:
    """What a store of a run holds as its secret, None if nothing."""
    return store.get(_STORE_KEY) if store.check([_STORE_KEY]) else None


def _ask(group: Group, *, make: bool) -> Secret:
    """The secret in the store; made if there is none, which may not be awaited by others."""
    asked = AskedStore(group.store)
    try:
        if make:
            fresh = secrets.token_hex(_LEAST_BYTES)
            held = asked.ask(lambda store: store.compare_set(_STORE_KEY, "", fresh))
        else:
            held = asked.ask(lambda store: store.get(_STORE_KEY))
    except RuntimeError as error:
        raise GossipError(
            f"rank {group.rank} could not {'leave' if make else 'find'} the secret of the run in "
            f"the rendezvous store: {first_line(error)}"
        ) from error
    finally:
        asked.close()
    return Secret(held)
