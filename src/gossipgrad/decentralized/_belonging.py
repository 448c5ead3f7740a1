"""A session among the members of a run: who they are, and letting others join."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm import (
    AskedStore,
    Group,
    Heartbeats,
    Membership,
    all_parameters,
    fingerprint,
    here,
    is_joinable,
    is_sharded,
    plain,
    replica_state,
)
from gossipgrad.decentralized._arrival import Arrival, Arriving, place_of
from gossipgrad.decentralized._giving import Giving, patience
from gossipgrad.decentralized._invitation import Invitation, settings_of
from gossipgrad.decentralized._members import Members
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._settings import Settings
from gossipgrad.errors import GossipError

__all__ = ["Belonging"]

_WORDS_BEATS = 2.0  # how long one that joins waits for others to say where they are

Values = Mapping[str, Any]


class Belonging(ABC):
    """What a session knows of the members, and what it does for those who join.

    Attributes:
        carry: What a newcomer gets from this rank beside its replica, for a loop's own position:
            plain values (tensors, numbers, text, None, and lists and dicts of these), or a function
            that returns them. It is called in the training thread as `optimizer.step()` begins,
            when a newcomer asks this rank: so schedulers and samplers are where they are for the
            step that is about to be made.
        joined_with: What `carry` of the donor gave, where this rank has joined others; else None.
        joined_from: Which rank the donor was.
    """

    group: Group
    carry: Values | Callable[[], Values] | None = None
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

    @abstractmethod
    def _begin(self, *, sends: bool = True) -> None: ...

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

    def invitation(self) -> str:
        """What others need to know to join this run with `gg.join`; local, but for the store.

        Text that may be written to a file or sent; any member may give one, at any time, and it is
        good for any number of newcomers as long as the run lasts. It is not secret and lets nobody
        in: the secret of the run does.

        Raises:
            ValueError: Nobody can join this run; the message says what would have to be otherwise.
            GossipError: The session is closed, or the store does not answer.
        """
        if self._closed:
            raise GossipError("the session is closed: a run is joined while it lasts")
        if (why := self._why_closed()) is not None:
            raise ValueError(f"nobody can join this run: {why}")
        assert self._rounds is not None
        assert self._heartbeats is not None
        transport = self._rounds.channel.transport
        assert is_joinable(transport)
        root = _root_of(self.group.store)
        asked = AskedStore(self.group.store)
        try:
            prefix = asked.ask(_prefix_of)
        except RuntimeError as error:
            raise GossipError(f"the store does not answer: {error}") from error
        finally:
            asked.close()
        settings = {**self._settings.describe(), "heartbeats": self._heartbeats}
        return Invitation(
            host=root.host,
            port=root.port,
            prefix=prefix,
            name=self._members.name,
            where=here(),
            world_size=self.group.world_size,
            settings=settings_of(self._settings),
            heartbeats=asdict(self._heartbeats),
            fingerprint=fingerprint(self._model, self._optimizers, settings),
            occasion=transport.occasion,
            introductions={
                rank: told
                for rank, told in transport.introductions.items()
                if rank in self.membership.living
            },
        ).to_text()

    def _why_closed(self) -> str | None:
        """Why nobody can join this run, None if one can."""
        if self._rounds is None:
            return "it began with one rank, which has no links: begin with two"
        if self._heartbeats is None:
            return "its membership never changes: leave heartbeats=None out"
        if not is_joinable(self._rounds.channel.transport):
            return "its links are no ZeroMQ ones: use transport='zeromq'"
        if not isinstance(_root_of(self.group.store), dist.TCPStore):
            return (
                f"its store is a {type(_root_of(self.group.store)).__name__}, which cannot be "
                "reached from another process: use a TCPStore, as init_process_group does"
            )
        parameters = all_parameters(self._model, self._optimizers).values()
        if any(is_sharded(parameter) for parameter in parameters):
            return "its replicas are sharded, and one that joins would have to bring a whole mesh"
        try:
            settings_of(self._settings)
        except ValueError as error:
            return str(error)
        return None

    def _open_door(self) -> None:
        """Hears from now on what newcomers ask of this rank, if any can join."""
        watch = self._members.watch
        if self._why_closed() is not None or watch is None or self._rounds is None:
            return
        assert self._heartbeats is not None
        transport = self._rounds.channel.transport
        assert is_joinable(transport)
        giving = Giving(
            self.group.rank,
            self.group.store,
            self._members.name,
            transport,
            patience_seconds=patience(self._heartbeats.silent_seconds),
        )
        self._members.giving, watch.wishes.heard = giving, giving.hear

    def _give(self) -> None:
        """Copies the replica for newcomers who wait for it, before a step."""
        giving = self._members.giving
        if giving is not None and giving.asked:
            giving.serve(self._gift)

    def _gift(self) -> dict[str, Any]:
        rounds = self._rounds
        assert rounds is not None
        carried = self.carry() if callable(self.carry) else self.carry
        return {
            "replica": replica_state(self._model, self._optimizers),
            "place": place_of(rounds, self._steps, self._settings.every),
            "run": rounds.channel.run.hex(),
            "carried": plain({} if carried is None else carried, "what session.carry gives", True),
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


def _root_of(store: dist.Store) -> Any:
    """The store under all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _prefix_of(store: dist.Store) -> str:
    """The prefix that a store puts before its keys, found out by one of them."""
    probe = f"probe/{secrets.token_hex(8)}"
    store.set(probe, "")
    (found,) = (key for key in _root_of(store).list_keys() if key.endswith(probe))
    store.delete_key(probe)
    return found.removesuffix(probe).removesuffix("/")
