"""Getting a replica from one of the members of a run, and a number in it."""

import json
import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import (
    MOST_BYTES,
    AskedStore,
    Membership,
    ParcelEnd,
    ParcelError,
    ParcelRefusedError,
    Record,
    ZeroMQTransport,
    here,
    is_loopback,
    joining_address,
    joining_secret,
    secret_in,
    wish_key,
)
from gossipgrad.decentralized._giving import answer_key, number_beside, patience
from gossipgrad.decentralized._invitation import Invitation
from gossipgrad.errors import AgreementError, GossipError

__all__ = ["Taking"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_STORE_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_ANSWER_BEATS = 8.0  # within so many the donor hears of the wish, or stands still
_LEAST_ANSWER_SECONDS = 3.0
_PAUSE_SECONDS = 0.2
_COPY_SECONDS = 3.0  # for a donor's step to end; for the next one's twice as long


class _UnansweredError(Exception):
    """A member does not give its replica; another may."""


class Taking:
    """What one that joins does before it is a rank; a context manager.

    Args:
        invited: By this invitation.
        timeout_seconds: Within which a member must have begun to send its replica.

    Attributes:
        secret: Of the run.
        address: Where this rank will listen.

    Raises:
        ValueError: This host cannot join the run: another host, or a secret from elsewhere.
        GossipError: The store does not answer, or holds no such run.
    """

    def __init__(self, invited: Invitation, *, timeout_seconds: float) -> None:
        self._invited = invited
        self._deadline_seconds = time.monotonic() + timeout_seconds
        self._timeout_seconds = timeout_seconds
        self.address = _address(invited)
        self._asked = AskedStore(
            lambda: _connect(invited),
            timeout_seconds=min(timeout_seconds, 2 * _STORE_SECONDS),
        )
        try:
            there = self._ask(lambda store: store.check([f"{invited.name}/membership"]))
            if not there:
                raise GossipError(
                    f"the store at {invited.host}:{invited.port} holds no such run: it is over, "
                    "and another has begun there. Ask a rank of a run that lasts for an invitation"
                )
            self.secret = joining_secret(self._ask(secret_in))
        except BaseException:
            self._asked.close()
            raise

    def __enter__(self) -> "Taking":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._asked.close()

    def membership(self) -> Membership:
        """The newest there is."""
        name = self._invited.name
        return self._ask(lambda store: Record(dist.PrefixStore(name, store)).read())

    def introductions(self, membership: Membership) -> dict[int, list[Any]]:
        """What the members introduced themselves with."""
        known = self._invited.introductions
        joined = {rank: list(j.introduction) for rank, j in membership.joined.items()}
        return {rank: {**known, **joined}[rank] for rank in membership.living}

    def take(self) -> tuple[int, Any]:
        """The replica of one of the members, and whose it is; another is asked if one fails.

        Raises:
            GossipError: Nobody gives one in time.
            AgreementError: This rank has another secret.
        """
        failed: dict[int, str] = {}
        refused: set[int] = set()
        wait_seconds = _COPY_SECONDS
        while True:
            membership = self.membership()
            if not membership.living:
                raise GossipError("the run is over: all of its ranks have left")
            fresh = sorted(set(membership.living) - failed.keys())
            donor = random.Random(secrets.token_bytes(8)).choice(fresh or [*membership.living])
            try:
                return donor, self._take_from(donor, membership, wait_seconds)
            except (_UnansweredError, ParcelError) as error:
                failed[donor] = first_line(error)
                if isinstance(error, ParcelRefusedError):
                    refused.add(donor)
                logger.warning("rank %d gives no replica: %s; asking on", donor, failed[donor])
            if len(fresh) <= 1:
                time.sleep(_PAUSE_SECONDS)
            wait_seconds *= 2
            if refused >= {*membership.living}:
                raise GossipError(f"no member can give its replica: {failed[donor]}")
            if time.monotonic() > self._deadline_seconds:
                told = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(failed.items()))
                raise GossipError(
                    f"no member gave its replica within {self._timeout_seconds:g} s ({told}): is "
                    "the run over, or are all its ranks busy with something else than steps?"
                )

    def become_a_rank(self) -> tuple[int, Membership, dist.Store]:
        """A number that nobody had before; the newest membership; a connection to the store."""
        name = self._invited.name
        number = self._ask(lambda store: store.add(f"{name}/joined", 1))
        store = self._ask(lambda store: store.clone())  # pyrefly: ignore[missing-attribute]
        store.set_timeout(timedelta(minutes=5))
        return self._invited.world_size - 1 + number, self.membership(), store

    def _take_from(self, donor: int, membership: Membership, wait_seconds: float) -> Any:
        number, of = secrets.token_hex(8), self.introductions(membership)[donor]
        beside = ZeroMQTransport.joining(
            self.secret,
            number_beside(donor),
            self._invited.world_size,
            occasion=f"{self._invited.occasion}/{number}",
            introductions={},
            bind=self.address,
            max_payload_bytes=MOST_BYTES,
            encrypt=self._invited.encrypt,
        )
        deadline = self._deadline_seconds
        end = ParcelEnd(
            beside,
            donor,
            patience_seconds=patience(self._invited.heartbeats["silent_seconds"]),
            stop=lambda: time.monotonic() > deadline,
        )
        try:
            wish = json.dumps({"id": number, "introduction": beside.introduction, "of": of})
            answer = self._answer(donor, number, wish)
            if "refused" in answer:
                raise AgreementError(f"rank {donor} refused this one: {answer['refused']}")
            beside.take_in(donor, answer["introduction"])
            end.say("ready")
            deadline = min(deadline, time.monotonic() + wait_seconds)
            end.await_word("begin")
            deadline = math.inf  # it may take as long as it needs
            return end.receive()
        finally:
            end.close()

    def _answer(self, donor: int, number: str, wish: str) -> dict[str, Any]:
        """What the donor says to a wish, which is taken back if it says nothing."""
        place = f"{self._invited.name}/{wish_key(donor)}"
        key = answer_key(self._invited.name, number)
        beats = _ANSWER_BEATS * self._invited.heartbeats["interval_seconds"]
        deadline = time.monotonic() + max(_LEAST_ANSWER_SECONDS, beats)
        laid = False
        while time.monotonic() < deadline:
            if not laid:
                held = self._ask(lambda store: store.compare_set(place, "", wish))
                laid = held == wish.encode()
            elif self._ask(lambda store: store.check([key])):
                answer = self._ask(lambda store: store.get(key))
                self._ask(lambda store: store.delete_key(key))
                return json.loads(answer)
            time.sleep(_LOOK_SECONDS)
        self._ask(lambda store: store.compare_set(place, wish, ""))
        raise _UnansweredError("it does not answer" if laid else "others ask it")

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        try:
            return self._asked.ask(question)
        except RuntimeError as error:
            raise GossipError(
                f"the store of the run at {self._invited.host}:{self._invited.port} cannot be "
                f"reached: {first_line(error)}. Is the run over?"
            ) from error


def _connect(at: Invitation) -> dist.Store:
    """A connection to the store of a run, with its prefix."""
    timeout = timedelta(seconds=_STORE_SECONDS)
    store = dist.TCPStore(
        at.host, at.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return dist.PrefixStore(at.prefix, store) if at.prefix else store


def _address(invited: Invitation) -> str:
    endpoints = [endpoint for endpoint, *_ in invited.introductions.values()]
    addresses = {
        endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]") for endpoint in endpoints
    }
    alone = [a for a in (invited.host, *sorted(addresses)) if is_loopback(a)]
    if alone and here() != invited.where:
        raise ValueError(
            f"the run listens on {alone[0]}, which only its own host reaches, and this is another: "
            "start it with GOSSIPGRAD_BIND, and its store on an address that others reach"
        )
    return joining_address(addresses, towards=invited.host)
