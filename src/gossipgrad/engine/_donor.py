"""A member that sends its replica to joiners: copied between two steps, sent in the background.

What members and joiners tell each other stands in the rendezvous store, under the name of the
membership:

* `run`: what a joiner must know and have, written by every member (`RunInfo`).
* `wish`: the joiner that asks for a replica now. A member that has made a step since it saw the
  wish claims it, so that nobody asks a member that evaluates or waits in a collective.
* `answer/ID`: which member has claimed the wish, and why it failed, if it did.

The replica travels over a link of its own: one `torch.save`, cut into pieces. Liveness is the
membership's: a joiner gives a donor up that is no member any more.
"""

import io
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gossipgrad._said import first_line
from gossipgrad.comm import Joinable, Lost, Store
from gossipgrad.errors import GossipError

__all__ = ["PIECE_BYTES", "RUN_KEY", "WISH_KEY", "Donor", "RunInfo", "answer_key"]

logger = logging.getLogger(__name__)

RUN_KEY, WISH_KEY = "run", "wish"
PIECE_BYTES = 1 << 18
_FORMAT = "gossipgrad run 1"
_LOOK_SECONDS = 0.05
_STALLED_SECONDS = 60.0  # nothing left for so long: the joiner hangs, or cannot be reached
_LINGER_SECONDS = 10.0
_FAREWELL_SECONDS = 1.0


def answer_key(wish: str) -> str:
    """Where a member answers the wish of that id."""
    return f"answer/{wish}"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a joiner must know of a run, and what it must have; not secret.

    Attributes:
        world_size: How many ranks took part at the start.
        fingerprint: Model, optimizers and settings; see `gossipgrad.comm.fingerprint`.
        introductions: Where the members listen.
    """

    world_size: int
    fingerprint: dict[str, str]
    introductions: dict[int, list[Any]]

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_text(cls, text: bytes) -> "RunInfo":
        """What `to_text` wrote.

        Raises:
            ValueError: Another version of gossipgrad wrote it.
        """
        fields = json.loads(text)
        if fields.pop("format", None) != _FORMAT:
            raise ValueError(
                "the run is one of another version of gossipgrad: install the same version here"
            )
        introductions = {int(rank): one for rank, one in fields.pop("introductions").items()}
        return cls(introductions=introductions, **fields)


class Donor:
    """Sends this rank's replica to joiners.

    Two threads of the session call it. The membership thread calls `look` in each of its turns; the
    training thread calls `poll` between two steps. Each transfer has a thread of its own.

    Args:
        rank: This rank.
        transport: Of this rank; transfers have links of their own, with the same access.
        info: What a joiner must know now; `publish` changes it.

    Attributes:
        given: How many joiners got this replica.
        seconds: For how long copies have held up the training thread.
    """

    def __init__(self, rank: int, transport: Joinable, info: RunInfo) -> None:
        self.given = 0
        self.seconds = 0.0
        self._rank = rank
        self._transport = transport
        self._info: RunInfo | None = info  # None: the store has it
        self._wish = ""  # that this rank saw last
        self._stepped = False  # since then
        self._lock = threading.Lock()
        self._waiting: list[Future[Mapping[str, Any]]] = []
        self._answers: deque[tuple[str, str]] = deque()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def publish(self, info: RunInfo) -> None:
        """Says what a joiner must know and have from now on; returns at once."""
        self._info = info

    def look(self, store: Store) -> None:
        """Publishes, answers and claims a wish; in the membership thread, with the run's store."""
        if (info := self._info) is not None:
            store.set(RUN_KEY, info.to_text())
            if self._info is info:
                self._info = None
        while self._answers:
            store.set(*self._answers[0])
            self._answers.popleft()
        # Makes the key, so that nothing waits for it.
        text = "" if self._closed else store.compare_set(WISH_KEY, "", "").decode()
        if not text:
            self._wish = ""
        elif text != self._wish:
            self._wish, self._stepped = text, False
        elif self._stepped:
            self._claim(store, text)

    def poll(self, copy_replica: Callable[[], Mapping[str, Any]]) -> None:
        """Copies the replica if a joiner waits for it; in the training thread, between two steps.

        One copy serves all who wait. What fails is told to them, and not raised.

        Args:
            copy_replica: Returns tensors in host memory, which nobody changes later, and plain
                values, in dicts and lists.
        """
        self._stepped = True
        if not self._waiting:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
        start = time.perf_counter()
        try:
            copy = copy_replica()
        except Exception as error:
            for future in waiting:
                future.set_exception(error)
        except BaseException:  # Ctrl-C
            for future in waiting:
                future.set_exception(GossipError("its step was interrupted"))
            raise
        else:
            for future in waiting:
                future.set_result(copy)
        self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Sends nothing any more; a joiner in the middle of it asks another member."""
        self._closed = True
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _claim(self, store: Store, text: str) -> None:
        """Takes the wish unless another member has; either removes it, if the other one died."""
        wish = json.loads(text)
        claim = json.dumps({"rank": self._rank})
        is_ours = store.compare_set(answer_key(wish["id"]), "", claim).decode() == claim
        store.compare_set(WISH_KEY, text, "")
        if is_ours:
            thread = threading.Thread(
                target=self._give, args=(wish,), name="gossipgrad-donor", daemon=True
            )
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]
            thread.start()

    def _give(self, wish: dict[str, Any]) -> None:
        try:
            transport = self._transport
            link = transport.beside(max_payload_bytes=2 * PIECE_BYTES)
            try:
                joiner = int(wish["rank"])
                link.take_in(joiner, wish["introduction"])
                self._send(link, joiner, str(wish["id"]), _saved(self._await_copy()))
                self.given += 1
            finally:
                link.close(0.0 if self._closed else _LINGER_SECONDS)
        except Exception as error:  # whatever it is, the joiner must hear of it
            why = first_line(error)
            logger.warning("rank %d could not give its replica: %s", self._rank, why)
            answer = json.dumps({"rank": self._rank, "error": why})
            self._answers.append((answer_key(str(wish["id"])), answer))

    def _await_copy(self) -> Mapping[str, Any]:
        future: Future[Mapping[str, Any]] = Future()
        with self._lock:
            self._waiting.append(future)
        while not future.done():
            self._check_open()
            time.sleep(_LOOK_SECONDS)
        return future.result()

    def _send(self, link: Any, joiner: int, wish: str, blob: torch.Tensor) -> None:
        """Sends all pieces and waits until they have left."""
        header = json.dumps({"id": wish, "rank": self._rank, "bytes": blob.numel()}).encode()
        tickets = deque(link.send(joiner, header, piece) for piece in blob.split(PIECE_BYTES))
        moved_seconds = time.monotonic()
        while tickets:
            self._check_open()
            if any(isinstance(event, Lost) for event in link.receive(_LOOK_SECONDS)):
                raise GossipError(f"the joiner, rank {joiner}, is gone or cannot be reached")
            while tickets and tickets[0].done:
                tickets.popleft()
                moved_seconds = time.monotonic()
            if time.monotonic() - moved_seconds > _STALLED_SECONDS:
                raise GossipError(f"the joiner, rank {joiner}, took nothing for a minute")

    def _check_open(self) -> None:
        if self._closed:
            raise GossipError(f"rank {self._rank} left the run")


def _saved(copy: Mapping[str, Any]) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(dict(copy), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
