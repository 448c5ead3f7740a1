"""What a member does for joiners: says where the run is, and gives them its replica."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from gossipgrad.comm import (
    Group,
    Heartbeats,
    all_parameters,
    is_joinable,
    is_sharded,
    plain,
    replica_state,
)
from gossipgrad.engine._arrival import place_of
from gossipgrad.engine._donor import Donor, RunInfo
from gossipgrad.engine._flow import Flow, Phase
from gossipgrad.engine._joiner import address_of, root_of
from gossipgrad.engine._members import Members
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._rounds import Rounds
from gossipgrad.topology import Schedule

__all__ = ["Admission", "Carried", "why_not_join"]

Carried = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
_WHAT = "what session.carry gives"


def why_not_join(
    replica: Replica, schedule: Schedule, flows: Sequence[Flow], heartbeats: Heartbeats | None
) -> str | None:
    """Why none can join a run, as far as its settings say; None if one can."""
    if heartbeats is None:
        return "its membership never changes: leave heartbeats=None out"
    if any(is_sharded(each) for each in all_parameters(replica.model, replica.optimizers).values()):
        return "its replicas are sharded, and one that joins would have to bring a whole mesh"
    topology = schedule.describe()
    if set(topology) != {"name", "world_size", "rotate", "seed"}:
        return (
            f"the schedule {topology['name']} was given for {schedule.world_size} ranks, and says "
            "nothing of more: use a topology by its name, such as topology='matching'"
        )
    if any(flow.phase is Phase.BEFORE_UPDATE for flow in flows):
        return (
            "it sends gradients during backward, at rounds that a joiner does not know yet: use "
            "payload='weights'"
        )
    return None


class Admission:
    """Lets others join the run of a session, unless something speaks against it.

    Args:
        group: The ranks at the start; its store is where joiners look.
        members: Of the session.
        rounds: Of the session.
        replica: What joiners get.
        fingerprint: Returns what a joiner must have: model, optimizers and settings.
        every: Steps in a round.
        refusal: Why none can join, None if nothing is known against it.
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
        self._group, self._members, self._rounds = group, members, rounds
        self._replica, self._fingerprint, self._every = replica, fingerprint, every
        self._carry: Carried = None
        root = root_of(group.store)
        if refusal is None and not is_joinable(rounds.channel.transport):
            refusal = "its links are no ZeroMQ ones: use transport='zeromq'"
        if refusal is None and not isinstance(root, dist.TCPStore):
            refusal = (
                f"its store is a {type(root).__name__}, which cannot be reached from another "
                "process: use a TCPStore, as init_process_group does"
            )
        self.refusal = refusal
        if refusal is None and members.watch is not None:
            transport = rounds.channel.transport
            assert is_joinable(transport)
            members.donor = Donor(group.rank, transport, self._info())
            members.watch.visit = members.donor.look

    @property
    def carry(self) -> Carried:
        """What a joiner gets beside the replica: see `Session.carry`."""
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
        return address_of(self._group.store, self._members.name)

    def publish(self) -> None:
        """Says what a joiner must have, when that has changed."""
        if self._members.donor is not None:
            self._members.donor.publish(self._info())

    def poll(self, steps: int) -> None:
        """Copies the replica for joiners that wait for it, between two steps."""
        if self._members.donor is not None:
            self._members.donor.poll(lambda: self._copy(steps))

    def _info(self) -> RunInfo:
        transport = self._rounds.channel.transport
        assert is_joinable(transport)
        return RunInfo(
            world_size=self._group.world_size,
            fingerprint=self._fingerprint(),
            introductions=transport.introductions,
        )

    def _copy(self, steps: int) -> dict[str, Any]:
        carried = self._carry() if callable(self._carry) else self._carry
        return {
            "replica": replica_state(self._replica.model, self._replica.optimizers),
            "place": place_of(self._rounds, steps, self._every),
            "run": self._rounds.channel.run,
            "carried": plain({} if carried is None else carried, _WHAT, True),
        }
