"""What a joiner does before it is a member: finds the run, fetches a replica, gets a number."""

import io
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import (
    Arrival,
    AskedStore,
    Membership,
    Record,
    ZeroMQTransport,
    joining_address,
)
from gossipgrad.engine._donor import PIECE_BYTES, RUN_KEY, WISH_KEY, RunInfo, answer_key
from gossipgrad.errors import GossipError

__all__ = ["Joiner", "address_of", "root_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:/\s]+):(\d{1,5})/(?:(\S.*)/)?(members/\d+)")
_STORE_SECONDS = 10.0
_LISTEN_SECONDS = 0.05
_ASK_SECONDS = 0.1
_STALLED_SECONDS = 60.0
_TRIES = 3


def address_of(store: dist.Store, name: str) -> str:
    """Where a joiner finds a run: host and port of its store, and where its keys are in it.

    Args:
        store: A `TCPStore`, below any prefixes.
        name: Of the membership.

    Raises:
        GossipError: The store does not answer.
    """
    root = root_of(store)
    asked = AskedStore(store)
    try:
        prefix = asked.ask(_prefix_of)
    except RuntimeError as error:
        raise GossipError(f"the store does not answer: {first_line(error)}") from error
    finally:
        asked.close()
    host = f"[{root.host}]" if ":" in root.host else root.host
    return "/".join(filter(None, (f"{host}:{root.port}", prefix, name)))


def root_of(store: dist.Store) -> Any:
    """The store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _prefix_of(store: dist.Store) -> str:
    """The prefix that a store puts before its keys, which torch does not tell."""
    probe = f"probe/{secrets.token_hex(8)}"
    store.set(probe, "")
    (found,) = (key for key in root_of(store).list_keys() if key.endswith(probe))
    store.delete_key(probe)
    return found.removesuffix(probe).removesuffix("/")


class _FailedError(Exception):
    """A donor failed; another may not."""


class _Wish:
    """What a joiner asks of the members in the store, and what becomes of it.

    Args:
        name: Of the membership.
        rank: That the joiner will have.
        introduction: Of its link.
    """

    def __init__(self, name: str, rank: int, introduction: Sequence[Any]) -> None:
        self.id = secrets.token_hex(8)
        self._name = name
        self._key, self._answer = f"{name}/{WISH_KEY}", f"{name}/{answer_key(self.id)}"
        self._text = json.dumps({"id": self.id, "rank": rank, "introduction": introduction})
        self._laid = False

    def look(self, store: dist.Store) -> str | None:
        """Asks, once no other joiner does; why the member that answered failed, if it did."""
        if not self._laid:
            self._laid = store.compare_set(self._key, "", self._text).decode() == self._text
        elif store.check([self._answer]):
            answer = json.loads(store.get(self._answer))
            if "error" in answer:
                return f"rank {answer['rank']} failed: {answer['error']}"
            if answer["rank"] not in Record(dist.PrefixStore(self._name, store)).read().living:
                return f"rank {answer['rank']} died or left in the middle"
        return None

    def withdraw(self, store: dist.Store) -> None:
        """Removes it, and its answer."""
        store.compare_set(self._key, self._text, "")
        store.delete_key(self._answer)


class Joiner:
    """What a joiner does before it is a member; a context manager.

    Args:
        address: Of the run.
        encrypt: As in `gossip()`.
        timeout_seconds: Within which a member must have begun to send its replica.

    Attributes:
        info: What the run says of itself.
        name: Of its membership.
        rank: This rank's number; -1 before `fetch`.

    Raises:
        ValueError: It is no address.
        GossipError: The store does not answer, or holds no such run.
    """

    def __init__(self, address: str, *, encrypt: bool | None, timeout_seconds: float) -> None:
        parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if parts is None:
            raise ValueError(
                f"{address!r} is no address of a run: give what session.join_address() returned"
            )
        self._host, port, prefix, self.name = parts.groups()
        self._host = self._host.strip("[]")
        self._where = f"{parts[1]}:{port}"
        self._encrypt = encrypt
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self.rank = -1

        def connect() -> dist.Store:
            store = dist.TCPStore(
                self._host,
                int(port),
                is_master=False,
                timeout=timedelta(seconds=_STORE_SECONDS),
                wait_for_workers=False,
            )
            return dist.PrefixStore(prefix, store) if prefix else store

        self._asked = AskedStore(connect, timeout_seconds=min(timeout_seconds, 2 * _STORE_SECONDS))
        try:
            self.info = self._read_info()
        except BaseException:
            self._asked.close()
            raise

    def __enter__(self) -> "Joiner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._asked.close()

    def check(self, here: dict[str, str]) -> None:
        """Refuses another model, optimizer or settings than the run's.

        Raises:
            ValueError: With the first difference.
        """
        there = self.info.fingerprint
        # Digests last: what makes them differ is told better by name.
        for key in sorted(
            {**here, **there}, key=lambda key: key.startswith(("order", "optimizer"))
        ):
            if here.get(key) != there.get(key):
                raise ValueError(
                    f"this is not what the run trains: {key} is {here.get(key) or 'missing'} here, "
                    f"but {there.get(key) or 'missing'} there. Build the same model and optimizer, "
                    "and give the same settings, as the other ranks; nothing was loaded"
                )

    def membership(self) -> Membership:
        """The newest."""
        return self._ask(lambda store: Record(dist.PrefixStore(self.name, store)).read())

    def clone_store(self) -> dist.Store:
        """Another connection to the store, for the session."""
        store = self._ask(lambda store: store.clone())  # pyrefly: ignore[missing-attribute]
        store.set_timeout(timedelta(minutes=5))
        return store

    def transport(self, membership: Membership, max_payload_bytes: int) -> ZeroMQTransport:
        """Links of this rank to the members.

        Raises:
            ValueError: The members cannot reach this host.
            AgreementError: They have another secret, or only they or this rank encrypt.
        """
        joined = {rank: list(j.introduction) for rank, j in membership.joined.items()}
        known = self.info.introductions | joined
        introductions = {rank: known[rank] for rank in membership.living if rank in known}
        endpoints = [endpoint for endpoint, *_ in introductions.values()]
        hosts = {e.removeprefix("tcp://").rpartition(":")[0].strip("[]") for e in endpoints}
        return ZeroMQTransport.joining(
            self.rank,
            self.info.world_size,
            introductions=introductions,
            bind=joining_address(hosts, towards=self._host),
            max_payload_bytes=max_payload_bytes,
            encrypt=self._encrypt,
        )

    def fetch(self) -> tuple[int, dict[str, Any]]:
        """Whose replica this rank got, and the replica; takes a number for this rank.

        Raises:
            GossipError: No member sends one.
            AgreementError: This rank has another secret.
        """
        membership = self.membership()
        if not membership.living:
            raise GossipError("the run is over: all of its ranks have left")
        number = self._ask(lambda store: store.add(f"{self.name}/joined", 1))
        self.rank = self.info.world_size - 1 + number
        link = self.transport(membership, 2 * PIECE_BYTES)
        failures: list[str] = []
        try:
            while len(failures) < _TRIES:
                try:
                    return self._fetch_once(link)
                except _FailedError as error:
                    failures.append(str(error))
                    logger.warning("%s; asking another member", error)
        finally:
            link.close()
        raise GossipError(f"{_TRIES} members failed to send a replica: {'; '.join(failures)}")

    def _fetch_once(self, link: ZeroMQTransport) -> tuple[int, dict[str, Any]]:
        wish = _Wish(self.name, self.rank, link.introduction)
        blob, asked_seconds = io.BytesIO(), 0.0
        moved_seconds = time.monotonic()
        try:
            while True:
                for event in link.receive(_LISTEN_SECONDS):
                    if not isinstance(event, Arrival) or event.payload is None:
                        continue
                    piece = json.loads(event.header)
                    if piece["id"] != wish.id:
                        continue  # of a donor that was given up
                    blob.write(event.payload.numpy().data)
                    moved_seconds = time.monotonic()
                    if blob.tell() >= piece["bytes"]:
                        blob.seek(0)
                        return piece["rank"], torch.load(blob, weights_only=True)
                now = time.monotonic()
                if blob.tell() == 0 and now > self._deadline:
                    raise GossipError(
                        f"no member gave its replica within {self._timeout_seconds:g} s: is the "
                        "run over, or are all its ranks busy with something else than steps?"
                    )
                if blob.tell() and now - moved_seconds > _STALLED_SECONDS:
                    raise _FailedError("a member stopped in the middle of its replica")
                if now - asked_seconds > _ASK_SECONDS:
                    asked_seconds = now
                    if (why := self._ask(wish.look)) is not None:
                        raise _FailedError(why)
        finally:
            with suppress(GossipError):
                self._ask(wish.withdraw)

    def _read_info(self) -> RunInfo:
        """What the run says of itself; waits a moment for one that has just begun."""
        deadline = time.monotonic() + min(self._timeout_seconds, _STORE_SECONDS)
        key = f"{self.name}/{RUN_KEY}"
        while not self._ask(lambda store: store.check([key])):
            if not self._ask(lambda store: store.check([f"{self.name}/membership"])):
                raise GossipError(
                    f"the store at {self._where} holds no such run: it is over, and another has "
                    "begun there. Ask a rank of a run that lasts for its address"
                )
            if time.monotonic() > deadline:
                raise GossipError("the run says nothing of itself: can it be joined?")
            time.sleep(_LISTEN_SECONDS)
        return RunInfo.from_text(self._ask(lambda store: store.get(key)))

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        try:
            return self._asked.ask(question)
        except RuntimeError as error:
            raise GossipError(
                f"the store of the run at {self._where} cannot be reached: {first_line(error)}. Is "
                "the run over, or does its store listen on its own host alone?"
            ) from error
