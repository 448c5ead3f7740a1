"""The members' side of joining: publish what the run is, and send a joiner a replica.

    joiner                          store                     lowest member        other members
    reads what the run is <──────── run <──── publishes it ────────┘
    asks for a replica ───────────> generation g + 1
                                       └── all read it at a heartbeat, and enter it ───────┘
    waits                <───── its replica, over a link ──────────┘
    loads it, becomes a member ───> generation g + 2
    makes its first step

Collectives wait for the joiner from generation g + 2 on, so none is held up by the transfer. Rounds
with it are void until its first step. If it cannot load the replica, or none arrives, it gives up,
and nothing in the run has changed.
"""

import io
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import (
    Group,
    Heartbeats,
    all_parameters,
    is_sharded,
    replica_state,
)
from gossipgrad.engine._flow import Flow, Phase
from gossipgrad.engine._joiner import RUN_FORMAT, RUN_KEY, address_of, root_of
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._rounds import Rounds
from gossipgrad.errors import GossipError
from gossipgrad.topology import Schedule, Weighted

__all__ = ["Invitation", "why_not_join"]

logger = logging.getLogger(__name__)


def why_not_join(
    replica: Replica, schedule: Schedule, flows: Sequence[Flow], heartbeats: Heartbeats | None
) -> str | None:
    """Return why a run's settings do not allow joining; None if they do."""
    if heartbeats is None:
        return "its membership never changes: leave heartbeats=None out"
    if any(is_sharded(each) for each in all_parameters(replica.model, replica.optimizers).values()):
        return "its replicas are sharded, and a joiner would need a whole mesh"
    if isinstance(schedule, Weighted):
        return "its ranks count unequally (weight=), and what a joiner counts is not known"
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


class Invitation:
    """Lets ranks join the run of a session, unless `refusal` says why not."""

    def __init__(
        self,
        group: Group,
        name: str,
        rounds: Rounds,
        replica: Replica,
        fingerprint: Callable[[], dict[str, str]],
        *,
        refusal: str | None,
    ) -> None:
        self._group, self._name, self._rounds = group, name, rounds
        self._replica, self._fingerprint = replica, fingerprint
        self._transport: Any = rounds.channel.transport
        root = root_of(group.store)
        if refusal is None and not hasattr(self._transport, "add_peer"):
            refusal = "its links are not over TCP: use transport='tcp'"
        if refusal is None and not isinstance(root, dist.TCPStore):
            refusal = (
                f"its store is a {type(root).__name__}, which cannot be reached from another "
                "process: use a TCPStore, as init_process_group does"
            )
        self.refusal = refusal

    def address(self) -> str:
        """See `Session.join_address`."""
        if self.refusal is not None:
            raise ValueError(f"none can join this run: {self.refusal}")
        return address_of(self._group, self._name)

    def publish(self) -> None:
        """Publish what the run is, if this is its lowest rank; again after a change of it."""
        if self.refusal is not None or self._group.rank != self._group.members[0]:
            return
        what = {
            "format": RUN_FORMAT,
            "run": self._rounds.channel.run.hex(),
            "world_size": self._group.world_size,
            "fingerprint": self._fingerprint(),
            "shapes": self._replica.shapes() if self._replica.version else {},
            "introductions": self._transport.introductions,
            "secret": self._transport.published_secret,
        }
        try:
            self._group.ask(lambda store: store.set(f"{self._name}/{RUN_KEY}", json.dumps(what)))
        except GossipError as error:  # no reason not to train
            logger.warning("rank %d: none can join: %s", self._group.rank, first_line(error))

    def send_replica(
        self, joiners: Sequence[int], position: dict[str, int], *, is_first: bool = True
    ) -> None:
        """Copy the replica, between two steps, and send it to joiners in the background.

        An error is sent, too. Of an island the first rank sends: the joining one hands it on
        inside.
        """
        try:
            state = None
            if is_first:
                state = replica_state(self._replica.model, self._replica.optimizers)
            answer: dict[str, Any] = {"replica": state, "position": position}
        except Exception as error:
            answer = {"error": first_line(error)}

        def send() -> None:
            buffer = io.BytesIO()
            torch.save(answer, buffer)
            state = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
            for joiner in joiners:
                self._rounds.channel.send_state(state, joiner)

        threading.Thread(target=send, name="gossipgrad-donor", daemon=True).start()
