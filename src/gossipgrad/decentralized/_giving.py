"""A member's replica for newcomers: copied between two steps, sent beside training."""

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import MOST_BYTES, AskedStore, Joinable, ParcelEnd, ParcelError
from gossipgrad.errors import AgreementError

__all__ = ["Giving", "answer_key", "number_beside", "patience"]

logger = logging.getLogger(__name__)

_FAREWELL_SECONDS = 1.0
_LEAST_PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.05


def answer_key(name: str, wish: str) -> str:
    """Where a member answers a wish, in the store of the run whose membership has that name."""
    return f"{name}/answer/{wish}"


def number_beside(donor: int) -> int:
    """The number of a newcomer on the link that a donor's replica comes over; nobody else is on it.

    Its own in the run it gets when it has the replica.
    """
    return donor + 1


def patience(silent_seconds: float) -> float:
    """How long, in seconds, an end of that link may be silent, where a member may for so long."""
    return max(_LEAST_PATIENCE_SECONDS, silent_seconds)


class Giving:
    """Gives this rank's replica to newcomers, each over a link of its own, in a thread of its own.

    The training thread does nothing but copy the replica, once for all who wait for it. A newcomer
    that falls silent ends its thread, after `patience_seconds` at most.

    Args:
        rank: This rank.
        store: Of the run; a connection of its own is made for each answer.
        name: Of the membership.
        transport: Of this rank: links are made with its credentials.
        patience_seconds: How long a newcomer may be silent.

    Attributes:
        given: How many newcomers have got a replica.
        seconds: For how long the copies have held up the training thread.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store,
        name: str,
        transport: Joinable,
        *,
        patience_seconds: float,
    ) -> None:
        self.given = 0
        self.seconds = 0.0
        self._rank = rank
        self._store = store
        self._name = name
        self._transport = transport
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._waiting: list[Future[Any]] = []
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def asked(self) -> bool:
        """Whether a newcomer waits for a copy."""
        return bool(self._waiting)

    def hear(self, wish: str) -> None:
        """Begins to answer a wish; returns at once."""
        if self._closed:
            return
        thread = threading.Thread(
            target=self._answer, args=(wish,), name="gossipgrad-giving", daemon=True
        )
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def serve(self, copy: Callable[[], Any]) -> None:
        """Copies the replica for all who wait; what fails is told to them, and not raised."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        start = time.perf_counter()
        try:
            made = copy()
        except Exception as error:
            logger.warning("rank %d cannot give its replica: %s", self._rank, error)
            for future in waiting:
                future.set_exception(error)
        else:
            for future in waiting:
                future.set_result(made)
        self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Gives nothing any more; who is about to get it asks another."""
        self._closed = True
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _answer(self, text: str) -> None:
        try:
            wish = json.loads(text)
            number, introduction, expected = wish["id"], wish["introduction"], wish["of"]
            occasion = f"{self._transport.occasion}/{number}"
            beside = self._transport.beside(occasion, max_payload_bytes=MOST_BYTES)
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("rank %d cannot read a wish: %r", self._rank, error)
            return
        newcomer = number_beside(self._rank)
        end = ParcelEnd(
            beside,
            newcomer,
            patience_seconds=self._patience_seconds,
            stop=lambda: self._closed,
        )
        try:
            answer = {"introduction": beside.introduction}
            try:
                beside.take_in(newcomer, introduction)
                if list(expected) != self._transport.introduction:
                    answer = {"refused": "its invitation is one of another run"}
            except (AgreementError, ValueError, TypeError):
                answer = {"refused": "it has another secret, or only one of both encrypts"}
            self._tell(number, answer)
            if "refused" in answer:
                logger.warning(
                    "rank %d refused one that would join: %s", self._rank, answer["refused"]
                )
                return
            end.hear("ready")
            self.given += self._send(end)
        except (ParcelError, RuntimeError) as error:
            logger.warning(
                "rank %d could not give its replica to one that joins: %s",
                self._rank,
                first_line(error),
            )
        finally:
            end.close()

    def _send(self, end: ParcelEnd) -> bool:
        """Sends a copy that is made as soon as the training thread can; whether it has come."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append(future)
        try:
            while not future.done():
                end.send_sign()
                end.look(_LOOK_SECONDS)
        finally:
            with self._lock:
                self._waiting = [other for other in self._waiting if other is not future]
        try:
            made = future.result()
        except Exception as error:
            end.say("refuse", why=f"it cannot give its replica: {error}")
            return False
        end.send(made)
        return True

    def _tell(self, number: str, answer: dict[str, Any]) -> None:
        asked = AskedStore(self._store)
        try:
            key, text = answer_key(self._name, number), json.dumps(answer)
            asked.ask(lambda store: store.set(key, text))
        finally:
            asked.close()
