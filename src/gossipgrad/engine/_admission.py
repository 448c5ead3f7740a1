"""The member's side of joining: publish the run's description, and send the replica.

Members and joiners communicate through keys in the rendezvous store, under the name of the
membership:

* `run`: the run's description and requirements, written by every member.
* `wish`: the joiner that requests a replica now. A member claims the wish only after a step since
it saw it, so a member that evaluates or waits in a collective is never chosen.
* `claim/ID`: the member that has claimed the wish.

The replica is sent over a separate link: one `torch.save` in pieces, or an error. The membership
watches liveness.
"""

import io
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import (
    Group,
    Heartbeats,
    Received,
    all_parameters,
    is_joinable,
    is_sharded,
    plain,
    replica_state,
)
from gossipgrad.engine._arrival import position_of
from gossipgrad.engine._flow import Flow, Phase
from gossipgrad.engine._joiner import (
    PIECE_BYTES,
    RUN_FORMAT,
    RUN_KEY,
    WISH_KEY,
    address_of,
    claim_key,
    root_of,
)
from gossipgrad.engine._members import Members
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._rounds import Rounds
from gossipgrad.errors import GossipError
from gossipgrad.topology import Schedule

__all__ = ["Admission", "Carried", "why_not_join"]

logger = logging.getLogger(__name__)

Carried = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
_WHAT = "what session.carry gives"
_LOOK_SECONDS = 0.05
_STALLED_SECONDS = 60.0  # nothing was sent for so long: the joiner hangs, or cannot be reached
_LINGER_SECONDS = 10.0
_FAREWELL_SECONDS = 1.0


def why_not_join(
    replica: Replica, schedule: Schedule, flows: Sequence[Flow], heartbeats: Heartbeats | None
) -> str | None:
    """Return why a run's settings do not allow joining; None if they do."""
    if heartbeats is None:
        return "its membership never changes: leave heartbeats=None out"
    if any(is_sharded(each) for each in all_parameters(replica.model, replica.optimizers).values()):
        return "its replicas are sharded, and a joiner would need a whole mesh"
    topology = schedule.describe()
    if set(topology) != {"name", "world_size", "rotate", "seed"}:
        return (
            f"the schedule {topology['name']} was given for {schedule.world_size} ranks, and does "
            "not define more: use a topology by its name, such as topology='matching'"
        )
    if any(flow.phase is Phase.BEFORE_UPDATE for flow in flows):
        return (
            "it sends gradients during backward, at rounds that a joiner does not know yet: use "
            "payload='weights'"
        )
    return None


class Admission:
    """Lets ranks join the run of a session, where its settings allow it.

    Two threads of the session call it: the membership thread calls `look` at each beat, the
    training thread calls `poll` between two steps. Each transfer has its own thread.

    Args:
        group: The ranks at the start; joiners use its store.
        members: The session's members.
        rounds: The session's rounds.
        replica: The replica to send to joiners.
        fingerprint: Returns the requirements for a joiner: model, optimizers and settings.
        every: Steps in a round.
        refusal: Why joining is impossible, None if it may be possible.

    Attributes:
        refusal: Why joining is impossible, None if it is possible.
        given: Number of joiners that received this replica.
        seconds: Time that copies have blocked the training thread.
    """

    def __init__(
        self,
        group: Group,
        members: Members,
        rounds: Rounds,
        replica: Replica,
        fingerprint: Callable[[], dict[str, str]],
        *,
        every: int,
        refusal: str | None,
    ) -> None:
        self.given = 0
        self.seconds = 0.0
        self._group, self._members, self._rounds = group, members, rounds
        self._replica, self._fingerprint, self._every = replica, fingerprint, every
        self._carry: Carried = None
        self._info: str | None = None  # the description that is not in the store yet
        self._wish = ""  # the last wish that this rank saw
        self._stepped = self._closed = False  # since then
        self._claimed: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._transport: Any = rounds.channel.transport
        root = root_of(group.store)
        if refusal is None and not is_joinable(self._transport):
            refusal = "its links are not over TCP: use transport='tcp'"
        if refusal is None and not isinstance(root, dist.TCPStore):
            refusal = (
                f"its store is a {type(root).__name__}, which cannot be reached from another "
                "process: use a TCPStore, as init_process_group does"
            )
        self.refusal = refusal
        if refusal is None and members.watch is not None:
            self.publish()
            members.donor, members.watch.visit = self, self.look

    @property
    def carry(self) -> Carried:
        """See `Session.carry`."""
        return self._carry

    @carry.setter
    def carry(self, values: Carried) -> None:
        if values is not None and not callable(values):
            plain(values, _WHAT, False)
        self._carry = values

    def address(self) -> str:
        """See `Session.join_address`."""
        if self.refusal is not None:
            raise ValueError(f"none can join this run: {self.refusal}")
        return address_of(self._group, self._members.name)

    def publish(self) -> None:
        """Update the requirements for joiners; return immediately."""
        if self.refusal is None:
            info = {
                "format": RUN_FORMAT,
                "world_size": self._group.world_size,
                "fingerprint": self._fingerprint(),
                "shapes": self._replica.shapes() if self._replica.version else {},
                "introductions": self._transport.introductions,
                "secret": self._transport.published_secret,
            }
            self._info = json.dumps(info)

    def look(self, store: Any) -> None:
        """Publish, and claim a wish; in the membership thread, with the run's store."""
        if (info := self._info) is not None:
            store.set(RUN_KEY, info)
            if self._info is info:
                self._info = None
        # Creates the key, so that reading it does not wait.
        text = "" if self._closed else store.compare_set(WISH_KEY, "", "").decode()
        if text != self._wish:
            self._wish, self._stepped = text, False
        elif text and self._stepped:
            wish, mine = json.loads(text), str(self._group.rank)
            if store.compare_set(claim_key(wish["id"]), "", mine).decode() == mine:
                self._claimed.put(wish)
            store.compare_set(WISH_KEY, text, "")  # the rank that claimed it may have died

    def poll(self, steps: int) -> None:
        """Copy the replica if joiners wait for it; in the training thread, between two steps.

        All waiting joiners get the same copy. An error is sent to them and not raised here.
        """
        self._stepped = True
        if self._claimed.empty():
            return
        start = time.perf_counter()
        answer: dict[str, Any] | str = "its step was interrupted"
        try:
            answer = self._copy(steps)
        except Exception as error:
            answer = first_line(error)
        finally:  # also when Ctrl-C ends it
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while not self._claimed.empty():
                thread = threading.Thread(
                    target=self._give,
                    args=(self._claimed.get(), answer),
                    name="gossipgrad-donor",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()
            self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Stop sending; a joiner in the middle of a transfer gets an error."""
        self._closed = True
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _copy(self, steps: int) -> dict[str, Any]:
        """Copy everything a joiner needs, as tensors in host memory and plain values."""
        carried = self._carry() if callable(self._carry) else self._carry
        return {
            "replica": replica_state(self._replica.model, self._replica.optimizers),
            "position": position_of(self._rounds, steps, self._every),
            "run": self._rounds.channel.run,
            "carried": plain({} if carried is None else carried, _WHAT, True),
        }

    def _give(self, wish: Mapping[str, Any], answer: Mapping[str, Any] | str) -> None:
        """Send a copy or the error, and wait until it was sent."""
        joiner, header = int(wish["rank"]), {"id": wish["id"], "rank": self._group.rank}
        try:
            link = self._transport.beside(max_payload_bytes=2 * PIECE_BYTES)
            try:
                link.add_peer(joiner, wish["introduction"])
                if not isinstance(answer, str):
                    try:
                        self._send(link, joiner, header, _saved(answer))
                        self.given += 1
                        return
                    except Exception as error:
                        answer = first_line(error)
                link.send(joiner, json.dumps({**header, "error": answer}).encode())
                raise GossipError(answer)
            finally:
                link.close(0.0 if self._closed else _LINGER_SECONDS)
        except Exception as error:
            of = self._group.rank, joiner, first_line(error)
            logger.warning("rank %d could not send rank %d its replica: %s", *of)

    def _send(self, link: Any, joiner: int, header: dict[str, Any], blob: torch.Tensor) -> None:
        text = json.dumps({**header, "bytes": blob.numel()}).encode()
        tickets = deque(link.send(joiner, text, piece) for piece in blob.split(PIECE_BYTES))
        moved_seconds = time.monotonic()
        while True:
            if self._closed:
                raise GossipError(f"rank {self._group.rank} left the run")
            events = link.receive(_LOOK_SECONDS)
            if any(isinstance(event, Received) for event in events):
                return  # it has all of it
            if events:
                raise GossipError(f"the joiner, rank {joiner}, is gone or cannot be reached")
            while tickets and tickets[0].done:
                tickets.popleft()
                moved_seconds = time.monotonic()
            if time.monotonic() - moved_seconds > _STALLED_SECONDS:
                raise GossipError(f"the joiner, rank {joiner}, received nothing for a minute")


def _saved(copy: Mapping[str, Any]) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(dict(copy), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
