"""The joiner's side: find the run, get a rank, become a member, and receive a replica."""

import io
import json
import re
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import (
    AskedStore,
    Group,
    Joining,
    Record,
    TCPTransport,
    difference,
    joining_address,
)
from gossipgrad.engine._island import Island
from gossipgrad.engine._members import Members
from gossipgrad.engine._rounds import Rounds
from gossipgrad.errors import GossipError

__all__ = ["RUN_FORMAT", "RUN_KEY", "Joiner", "address_of", "own_address", "root_of"]

T = TypeVar("T")
RUN_KEY = "run"
RUN_FORMAT = "gossipgrad run 3"
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:/\s]+):(\d{1,5})/(?:(\S.*)/)?(members/\d+)")
_STORE_SECONDS = 10.0
_LISTEN_SECONDS = 0.05
_LOOK_SECONDS = 0.5
_RETRY = "Nothing was loaded, and the run continues: try again"
_STALLED_SECONDS = 60.0


def address_of(group: Group, name: str) -> str:
    """Return a run's address: host and port of its store, and the prefix of its keys."""
    root, prefix = root_of(group.store), group.ask(_prefix_of)
    host = f"[{root.host}]" if ":" in root.host else root.host
    return "/".join(filter(None, (f"{host}:{root.port}", prefix, name)))


def own_address(address: object, island: Island | None) -> object:
    """Return the address that is for this rank: that of its number in an island.

    Raises:
        ValueError: The run has islands of another size.
    """
    if not isinstance(address, str):
        return address
    addresses, size = address.split(","), 1 if island is None else island.size
    if len(addresses) != size:
        raise ValueError(
            f"the run has islands of {len(addresses)} ranks, and here are {size}: join with as "
            "many ranks, and give all of them island="
        )
    return addresses[0 if island is None else island.index]


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
    """A joiner's way into a run; `close()` it when it is in.

    Args:
        address: The run's address.
        timeout_seconds: How long to wait until a member starts to send its replica.

    Attributes:
        world_size: The number of ranks at the run's start.
        shapes: Shapes of parameters and buffers, if the model has shrunk since.
        run: The run's 16 bytes.
        name: The name of the membership.
        membership: The newest generation that was read; the joiner is not in it yet.
        rank: This rank's number, which no rank had before; -1 before `reserve_rank`.
        joining: How this rank asked for its replica, None before that.
        position: The donor's position in rounds and steps, with its replica.

    Raises:
        ValueError: The address is invalid, or the run uses another version of gossipgrad.
        GossipError: The store does not answer, or holds no such run.
    """

    def __init__(self, address: object, *, timeout_seconds: float) -> None:
        parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if parts is None:
            raise ValueError(
                f"{address!r} is no address of a run: pass the result of session.join_address()"
            )
        host, port, prefix, self.name = parts.groups()
        self._host, self._where = host.strip("[]"), f"{host}:{port}"
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self.rank = -1
        self.joining: Joining | None = None
        self.position: dict[str, int] = {}

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
        self.run = bytes.fromhex(info["run"])
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
        if (key := difference(here, there)) is not None:
            raise ValueError(
                f"this is not what the run trains: {key} is {here.get(key, 'missing')} here, but "
                f"{there.get(key, 'missing')} there. Build the same model and optimizer, and give "
                "the same settings, as the other ranks; nothing was loaded"
            )

    def reserve_rank(self, island: Island | None = None) -> None:
        """Read who the members are, and get a number, which all ranks of an island share.

        Raises:
            GossipError: The run is over, or the store does not answer.
        """
        self.membership = self._ask(lambda store: Record(dist.PrefixStore(self.name, store)).read())
        if not self.membership.living:
            raise GossipError("the run is over: all of its ranks have left")
        number = 0
        if island is None or island.index == 0:
            number = self._ask(lambda store: store.add(f"{self.name}/joined", 1))
        if island is not None:
            number = island.agree(number)[0]
        self.rank = self.world_size - 1 + number

    def clone_store(self) -> dist.Store:
        """Return another connection to the store, for the session."""
        store = self._ask(lambda store: store.clone())  # pyrefly: ignore[missing-attribute]
        store.set_timeout(timedelta(minutes=5))
        return store

    def transport(self) -> TCPTransport:
        """Return this rank's links to the members.

        Raises:
            ValueError: The members cannot reach this host.
            AgreementError: They have another secret, or only one side has a file.
        """
        joined = {rank: list(j.introduction) for rank, j in self.membership.joined.items()}
        known = self._introductions | joined
        introductions = {rank: known[rank] for rank in self.membership.living if rank in known}
        endpoints = [endpoint for endpoint, *_ in introductions.values()]
        hosts = {e.removeprefix("tcp://").rpartition(":")[0].strip("[]") for e in endpoints}
        return TCPTransport.joining(
            self.rank,
            self.world_size,
            introductions=introductions,
            bind=joining_address(hosts, towards=self._host),
            secret=self._secret,
        )

    def receive(self, rounds: Rounds, members: Members) -> Any:
        """Ask for a replica, and return it; the donor's position is noted.

        Raises:
            GossipError: All members have ended, none sends its replica in time, or the donor fails.
        """
        self.joining = members.ask(rounds)
        channel, donor = rounds.channel, self.joining.donor
        looked_seconds = moved_seconds = time.monotonic()
        before = 0
        while True:
            channel.poll(_LISTEN_SECONDS)
            state, arrived = channel.received_state()
            if state is not None:
                break
            now, is_gone = time.monotonic(), donor in channel.gone
            if now - looked_seconds > _LOOK_SECONDS:
                looked_seconds, is_gone = now, is_gone or not members.is_in_record(donor)
            moved_seconds, before = (now, arrived) if arrived > before else (moved_seconds, before)
            if is_gone:
                why = "it died or left in the middle."
            elif arrived and now - moved_seconds > _STALLED_SECONDS:
                why = "it stopped in the middle."
            elif not arrived and now > self._deadline:
                why = (
                    f"nothing came within {self._timeout_seconds:g} s: is it busy with something "
                    "else than steps?"
                )
            else:
                continue
            raise GossipError(f"rank {donor} sent no replica: {why} {_RETRY}")
        sent = torch.load(io.BytesIO(state.numpy().data), weights_only=True)
        if "error" in sent:
            raise GossipError(f"rank {donor} sent no replica: {sent['error']}. {_RETRY}")
        self.position = sent["position"]
        return sent["replica"]

    def _read_info(self) -> dict[str, Any]:
        """Read the run's description; wait briefly for a run that has just started."""
        deadline = time.monotonic() + min(self._timeout_seconds, _STORE_SECONDS)
        key = f"{self.name}/{RUN_KEY}"
        while not self._ask(lambda store: store.check([key])):
            if not self._ask(lambda store: store.check([f"{self.name}/membership"])):
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
