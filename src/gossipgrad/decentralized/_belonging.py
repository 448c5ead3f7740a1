"""A session among the members of a run: who they are, and letting others join."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm import (
    Group,
    Heartbeats,
    Membership,
    all_parameters,
    fingerprint,
    is_joinable,
    is_sharded,
    plain,
    replica_state,
)
from gossipgrad.decentralized._arrival import Arrival, Arriving, place_of
from gossipgrad.decentralized._donor import Donor, RunInfo
from gossipgrad.decentralized._joiner import address_of, root_of
from gossipgrad.decentralized._members import Members
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._settings import Gradients, GradientsAndWeights, Settings
from gossipgrad.errors import GossipError

__all__ = ["Belonging"]

_CARRIED = "what session.carry gives"
_WORDS_BEATS = 2.0  # how long one that joins waits for others to say where they are

Values = Mapping[str, Any]


class Belonging(ABC):
    """What a session knows of the members, and what it does for those who join.

    Attributes:
        joined_with: What `carry` of the donor gave, where this rank has joined others; else None.
        joined_from: Which rank the donor was.
    """

    group: Group
    joined_with: dict[str, Any] | None = None
    joined_from: int | None = None
    _model: nn.Module
    _optimizers: list[Optimizer]
    _settings: Settings
    _heartbeats: Heartbeats | None
    _members: Members
    _rounds: Rounds | None
    _sections: Sections
    _arriving: Arriving | None = None
    _closed: bool
    _steps: int
    _steps_of_others = 0
    _carry: Values | Callable[[], Values] | None = None

    @abstractmethod
    def _begin(self, *, sends: bool = True) -> None: ...

    @property
    def carry(self) -> Values | Callable[[], Values] | None:
        """What a joiner gets from this rank beside its replica, for a loop's own position.

        Plain values (tensors, numbers, text, bytes, None, and lists and dicts of these), or a
        function that returns them. It is called in the training thread as `optimizer.step()`
        begins, when a joiner asks this rank: so schedulers and samplers are where they are for the
        step that is about to be made. If it fails then, the joiner is told why, and training goes
        on.

        Raises:
            GossipError: On assignment, if something is no plain value.
        """
        return self._carry

    @carry.setter
    def carry(self, values: Values | Callable[[], Values] | None) -> None:
        if values is not None and not callable(values):
            plain(values, _CARRIED, False)
        self._carry = values

    @property
    def membership(self) -> Membership:
        """Who lives in the generation that this rank trains in, who was lost, and who joined."""
        return self._members.current

    @property
    def unreachable(self) -> dict[int, str]:
        """Members that this rank lost while the rendezvous store could not be asked, and why."""
        return self._members.unreachable(self._rounds)

    @property
    def departed(self) -> set[int]:
        """Members that were lost, or left, while the rendezvous store could not be asked."""
        return self._members.departed(self._rounds)

    def join_address(self) -> str:
        """Where others find this run to join it with `gg.join`; local, but for the store.

        A short text: host and port of the rendezvous store, and where the run's keys are in it. Any
        member may give it at any time, and it stays good for as long as the run lasts. It is not
        secret: where links are encrypted, a joiner needs the secret of the run, too.

        Raises:
            ValueError: Nobody can join this run; the message says what would have to be otherwise.
            GossipError: The session is closed, or the store does not answer.
        """
        if self._closed:
            raise GossipError("the session is closed: a run is joined while it lasts")
        if (why := self._why_closed()) is not None:
            raise ValueError(f"nobody can join this run: {why}")
        return address_of(self.group.store, self._members.name)

    def _why_closed(self) -> str | None:
        """Why nobody can join this run, None if one can."""
        if self._rounds is None:
            return "it began with one rank, which has no links: begin with two"
        if self._heartbeats is None:
            return "its membership never changes: leave heartbeats=None out"
        if not is_joinable(self._rounds.channel.transport):
            return "its links are no ZeroMQ ones: use transport='zeromq'"
        if not isinstance(root_of(self.group.store), dist.TCPStore):
            return (
                f"its store is a {type(root_of(self.group.store)).__name__}, which cannot be "
                "reached from another process: use a TCPStore, as init_process_group does"
            )
        parameters = all_parameters(self._model, self._optimizers).values()
        if any(is_sharded(parameter) for parameter in parameters):
            return "its replicas are sharded, and one that joins would have to bring a whole mesh"
        topology = self._settings.schedule.describe()
        if set(topology) != {"name", "world_size", "rotate", "seed"}:
            return (
                f"the schedule {topology['name']} was given for {self.group.world_size} ranks, and "
                "says nothing of more: use a topology by its name, such as topology='matching'"
            )
        if isinstance(self._settings.payload, Gradients | GradientsAndWeights):
            return (
                f"payload {self._settings.payload} sends gradients during backward, at rounds that "
                "a joiner does not know yet: use payload='weights'"
            )
        return None

    def _begin_giving(self) -> None:
        """Sends this rank's replica to joiners from now on, if any can join."""
        watch = self._members.watch
        if self._why_closed() is not None or watch is None or self._rounds is None:
            return
        transport = self._rounds.channel.transport
        assert is_joinable(transport)
        self._members.donor = Donor(self.group.rank, transport, self._info())
        watch.visit = self._members.donor.look

    def _publish(self) -> None:
        """Says what a joiner must have, when that has changed."""
        if self._members.donor is not None:
            self._members.donor.publish(self._info())

    def _info(self) -> RunInfo:
        assert self._rounds is not None
        transport = self._rounds.channel.transport
        assert is_joinable(transport)
        settings = {**self._settings.describe(), "heartbeats": self._heartbeats}
        return RunInfo(
            world_size=self.group.world_size,
            fingerprint=fingerprint(self._model, self._optimizers, settings),
            introductions=transport.introductions,
        )

    def _poll_donor(self) -> None:
        """Copies the replica for joiners who wait for it, before a step."""
        if self._members.donor is not None:
            self._members.donor.poll(self._copy_replica)

    def _copy_replica(self) -> dict[str, Any]:
        rounds = self._rounds
        assert rounds is not None
        carried = self._carry() if callable(self._carry) else self._carry
        return {
            "replica": replica_state(self._model, self._optimizers),
            "place": place_of(rounds, self._steps, self._settings.every),
            "run": rounds.channel.run,
            "carried": plain({} if carried is None else carried, _CARRIED, True),
        }

    def _enter(self, arrival: Arrival) -> None:
        """Becomes a member of a run that others have begun."""
        rounds = self._rounds
        assert rounds is not None
        assert self._heartbeats is not None
        self._members.enter(rounds, arrival.donor)
        self._arriving = Arriving(arrival.place, self._settings.every)
        self._steps = self._arriving.begin(rounds, _WORDS_BEATS * self._heartbeats.interval_seconds)
        self._steps_of_others = self._steps
        self.joined_with, self.joined_from = arrival.carried, arrival.donor
        self._begin(sends=False)

    def _arrive_together(self, rounds: Rounds) -> None:
        """Takes part from the round that begins with a collective, if this rank has just joined."""
        if self._arriving is not None:
            steps = self._arriving.together(rounds, self.membership.living)
            self._go_to(self._steps if steps is None else steps)

    def _take_up(self, rounds: Rounds) -> None:
        """After a step: takes up the newest generation that is known.

        One that joined comes to the round that the others are at, in its first steps.
        """
        self._members.take_up(rounds)
        if self._arriving is None:
            return
        self._go_to(self._arriving.step(rounds, self._steps, self.membership.living))
        if self._arriving.is_over(rounds):
            self._arriving = None

    def _go_to(self, steps: int) -> None:
        """Counts steps that the others have made meanwhile."""
        self._steps_of_others += steps - self._steps
        self._steps = steps
