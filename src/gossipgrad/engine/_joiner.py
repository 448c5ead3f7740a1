"""The joiner's side before it is a member: find the run, get a rank, fetch a replica."""

import io
import json
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import (
    AskedStore,
    Group,
    Membership,
    Received,
    Record,
    TCPTransport,
    joining_address,
)
from gossipgrad.engine._arrival import Arrival
from gossipgrad.errors import GossipError

__all__ = [
    "PIECE_BYTES",
    "RUN_FORMAT",
    "RUN_KEY",
    "WISH_KEY",
    "Joiner",
    "address_of",
    "claim_key",
    "root_of",
]

T = TypeVar("T")
RUN_KEY, WISH_KEY = "run", "wish"
RUN_FORMAT = "gossipgrad run 2"
PIECE_BYTES = 1 << 18
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:/\s]+):(\d{1,5})/(?:(\S.*)/)?(members/\d+)")
_STORE_SECONDS = 10.0
_LISTEN_SECONDS = 0.05
_ASK_SECONDS = 0.1
_STALLED_SECONDS = 60.0


def claim_key(wish: str) -> str:
    """Return the key under which a member claims the wish of that id."""
    return f"claim/{wish}"


def address_of(group: Group, name: str) -> str:
    """Return a run's address: host and port of its store, and the prefix of its keys.

    Args:
        group: The run's group; its store is a `TCPStore`, below any prefixes.
        name: The name of the membership.

    Raises:
        GossipError: The store does not answer.
    """
    root, prefix = root_of(group.store), group.ask(_prefix_of)
    host = f"[{root.host}]" if ":" in root.host else root.host
    return "/".join(filter(None, (f"{host}:{root.port}", prefix, name)))


def root_of(store: dist.Store) -> Any:
    """Return the store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _prefix_of(store: dist.Store) -> str:
    """Return the prefix of a store's keys, which torch does not expose."""
    probe = f"probe/{secrets.token_hex(8)}"
    store.set(probe, "")
    (found,) = (key for key in root_of(store).list_keys() if key.endswith(probe))
    store.delete_key(probe)
    return found.removesuffix(probe).removesuffix("/")


class Joiner:
    """Prepares a joiner before it is a member; `close()` it.

    Args:
        address: The run's address.
        timeout_seconds: How long to wait until a member starts to send its replica.

    Attributes:
        world_size: The number of ranks at the run's start.
        shapes: Shapes of parameters and buffers, if the model has shrunk since.
        rank: This rank's number; -1 before `fetch`.

    Raises:
        ValueError: The address is invalid, or the run uses another version of gossipgrad.
        GossipError: The store does not answer, or holds no such run.
    """

    def __init__(self, address: str, *, timeout_seconds: float) -> None:
        parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if parts is None:
            raise ValueError(
                f"{address!r} is no address of a run: pass the result of session.join_address()"
            )
        host, port, prefix, self._name = parts.groups()
        self._host, self._where = host.strip("[]"), f"{host}:{port}"
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self.rank = -1

        def connect() -> dist.Store:
            try:  # A store's client tries again until its time is up; a run that is over refuses.
                socket.create_connection((self._host, int(port)), timeout=_STORE_SECONDS).close()
            except ConnectionRefusedError as error:
                raise RuntimeError("the connection was refused") from error
            except OSError:
                pass  # its client knows more ways, and says why
            limit = timedelta(seconds=_STORE_SECONDS)
            store = dist.TCPStore(
                self._host, int(port), is_master=False, timeout=limit, wait_for_workers=False
            )
            return dist.PrefixStore(prefix, store) if prefix else store

        self._asked = AskedStore(connect, timeout_seconds=min(timeout_seconds, 2 * _STORE_SECONDS))
        try:
            info = self._read_info()
        except BaseException:
            self.close()
            raise
        self.world_size: int = info["world_size"]
        self.shapes: dict[str, list[int]] = info["shapes"]
        self._fingerprint: dict[str, str] = info["fingerprint"]
        self._secret: str | None = info["secret"]
        self._introductions = {int(rank): each for rank, each in info["introductions"].items()}

    @property
    def bucket_bytes(self) -> int:
        """The size of the run's messages, which fits the model with which it began."""
        return int(self._fingerprint["setting 'bucket_bytes'"])

    def close(self) -> None:
        """Close the connection to the store."""
        self._asked.close()

    def check(self, here: dict[str, str]) -> None:
        """Refuse a model, optimizer or settings that differ from the run's.

        Raises:
            ValueError: They differ; the message has the first difference.
        """
        there = self._fingerprint
        # Digests last: prefer to report a difference by name.
        for key in sorted(
            {**here, **there}, key=lambda key: key.startswith(("order", "optimizer"))
        ):
            if here.get(key) != there.get(key):
                raise ValueError(
                    f"this is not what the run trains: {key} is {here.get(key) or 'missing'} here, "
                    f"but {there.get(key) or 'missing'} there. Build the same model and optimizer, "
                    "and give the same settings, as the other ranks; nothing was loaded"
                )

    def clone_store(self) -> dist.Store:
        """Return another connection to the store, for the session."""
        store = self._ask(lambda store: store.clone())  # pyrefly: ignore[missing-attribute]
        store.set_timeout(timedelta(minutes=5))
        return store

    def transport(self, membership: Membership, max_payload_bytes: int) -> TCPTransport:
        """Return this rank's links to the members.

        Raises:
            ValueError: The members cannot reach this host.
            AgreementError: They have another secret, or only one side has a file.
        """
        joined = {rank: list(j.introduction) for rank, j in membership.joined.items()}
        known = self._introductions | joined
        introductions = {rank: known[rank] for rank in membership.living if rank in known}
        endpoints = [endpoint for endpoint, *_ in introductions.values()]
        hosts = {e.removeprefix("tcp://").rpartition(":")[0].strip("[]") for e in endpoints}
        return TCPTransport.joining(
            self.rank,
            self.world_size,
            introductions=introductions,
            bind=joining_address(hosts, towards=self._host),
            max_payload_bytes=max_payload_bytes,
            secret=self._secret,
        )

    def fetch(self) -> tuple[Any, Arrival]:
        """Fetch a member's replica and the information to enter; reserve a rank.

        Raises:
            GossipError: No member sends one, or the transfer fails; nothing has changed.
            AgreementError: This rank has another secret.
        """
        membership = self._read_membership()
        if not membership.living:
            raise GossipError("the run is over: all of its ranks have left")
        number = self._ask(lambda store: store.add(f"{self._name}/joined", 1))
        self.rank = self.world_size - 1 + number
        link = self.transport(membership, 2 * PIECE_BYTES)
        try:
            donor, gift = self._receive(link)
        finally:
            link.close(_LISTEN_SECONDS)
        arrival = Arrival(
            membership=self._read_membership(),
            name=self._name,
            donor=donor,
            position=gift["position"],
            run=gift["run"],
            carried=gift["carried"],
        )
        return gift["replica"], arrival

    def _receive(self, link: TCPTransport) -> tuple[int, dict[str, Any]]:
        """Request a replica; return the member that sent it and its content."""
        wish = secrets.token_hex(8)
        text = json.dumps({"id": wish, "rank": self.rank, "introduction": link.introduction})
        claim, key = f"{self._name}/{claim_key(wish)}", f"{self._name}/{WISH_KEY}"
        is_asked, donor, blob, asked_seconds = False, -1, io.BytesIO(), 0.0
        moved_seconds = time.monotonic()

        def fail(why: str) -> NoReturn:
            raise GossipError(
                f"rank {donor} sent no replica: {why}. Nothing was loaded, and the run continues: "
                "try again"
            )

        try:
            while True:
                for event in link.receive(_LISTEN_SECONDS):
                    if not isinstance(event, Received):
                        continue
                    header = json.loads(event.header)
                    donor = header["rank"]
                    if event.payload is None:
                        fail(header["error"])
                    blob.write(event.payload.numpy().data)
                    moved_seconds = time.monotonic()
                    if blob.tell() >= header["bytes"]:
                        link.send(donor, b"received")
                        blob.seek(0)
                        return donor, torch.load(blob, weights_only=True)
                now = time.monotonic()
                if blob.tell() == 0 and now > self._deadline:
                    raise GossipError(
                        f"no member sent its replica within {self._timeout_seconds:g} s: is the "
                        "run over, or are all its ranks busy with something else than steps?"
                    )
                if blob.tell() and now - moved_seconds > _STALLED_SECONDS:
                    fail("it stopped in the middle")
                if now - asked_seconds < _ASK_SECONDS:
                    continue
                asked_seconds = now
                if not is_asked:  # until no other joiner asks
                    put = self._ask(lambda store: store.compare_set(key, "", text))
                    is_asked = put.decode() == text
                elif donor < 0 and self._ask(lambda store: store.check([claim])):
                    donor = int(self._ask(lambda store: store.get(claim)))
                elif donor >= 0 and donor not in self._read_membership().living:
                    fail("it died or left in the middle")
        finally:
            with suppress(GossipError):
                self._ask(lambda store: store.compare_set(key, text, ""))
                self._ask(lambda store: store.delete_key(claim))

    def _read_membership(self) -> Membership:
        return self._ask(lambda store: Record(dist.PrefixStore(self._name, store)).read())

    def _read_info(self) -> dict[str, Any]:
        """Read the run's description; wait briefly for a run that has just started."""
        deadline = time.monotonic() + min(self._timeout_seconds, _STORE_SECONDS)
        key = f"{self._name}/{RUN_KEY}"
        while not self._ask(lambda store: store.check([key])):
            if not self._ask(lambda store: store.check([f"{self._name}/membership"])):
                raise GossipError(
                    f"the store at {self._where} holds no such run: it is over, and another has "
                    "started there. Get the address from a rank of a current run"
                )
            if time.monotonic() > deadline:
                raise GossipError("the run has published no description: can it be joined?")
            time.sleep(_LISTEN_SECONDS)
        info = json.loads(self._ask(lambda store: store.get(key)))
        if info.get("format") != RUN_FORMAT:
            raise ValueError(
                "the run uses another version of gossipgrad: install the same version here"
            )
        return info

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        try:
            return self._asked.ask(question)
        except RuntimeError as error:
            raise GossipError(
                f"the store of the run at {self._where} cannot be reached: {first_line(error)}. Is "
                "the run over, or does its store listen on its own host alone?"
            ) from error
