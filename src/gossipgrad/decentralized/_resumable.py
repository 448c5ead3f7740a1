"""Saving a session, and going on from what was saved."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import Group, Recorder, load_replica, misfit, replica_state
from gossipgrad.decentralized._averaging import Averaging
from gossipgrad.decentralized._delivery_log import DeliveryLog
from gossipgrad.decentralized._gradients import GradientExchange
from gossipgrad.decentralized._making import make_rounds
from gossipgrad.decentralized._members import Members
from gossipgrad.decentralized._modes import Mode
from gossipgrad.decentralized._outstanding import capture, is_complete, owe, restore, view_of
from gossipgrad.decentralized._rounds import TOGETHER_SECONDS, Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._session_state import (
    VERSION,
    Carried,
    averages_of,
    load_averages,
    load_residuals,
    load_rounds,
    must_fit,
    residuals_of,
    rounds_of,
)
from gossipgrad.decentralized._settings import Settings
from gossipgrad.decentralized._stale_rounds import StaleRounds
from gossipgrad.decentralized._watch import ReplicaWatch
from gossipgrad.errors import GossipError

__all__ = ["Resumable"]


class Resumable(ABC):
    """What a session adds to itself to be saved: each rank its own state, all load together."""

    group: Group
    _model: nn.Module
    _optimizers: list[Optimizer]
    _settings: Settings
    _recorder: Recorder | None
    _sections: Sections
    _members: Members
    _watch: ReplicaWatch
    _averaging: Averaging
    _rounds: Rounds | None
    _gradients: GradientExchange | None
    _carried: Carried
    _steps: int
    _equal_at_step: int
    _mid_step: bool

    @abstractmethod
    def _check_ready(self, method: str) -> None: ...

    @abstractmethod
    def _is_as_sent(self) -> bool: ...

    @abstractmethod
    def _begin(self, *, sends: bool = True) -> None: ...

    @abstractmethod
    def _close(self, wait_seconds: float) -> None: ...

    def state_dict(self, *, settle: bool = False, copy: bool = True) -> dict[str, Any]:
        """All that this rank needs to go on as if it had never stopped; local.

        To be taken between two steps, by every rank after equally many, and saved by each under
        its own name. Holds copies in host memory: the model's parameters and buffers, the
        optimizers' state, and the session's own, with the snapshots that are under way. Not the
        state of schedulers, scalers, samplers and random numbers, which are the user's, and not
        gradients, which a step may have accumulated.

        In the modes that wait, what is late is awaited as in a step, and mixed. In mode stale
        nothing is awaited; an exchange that was under way, and that the partner may have mixed
        already, is written into the state when it comes (`is_complete`). There ranks take their
        states as they come to the same round, each in its own step: see `Stale.cut_every`.

        Args:
            settle: Mix first what is under way, as `average_()` does: for ranks that end after
                unequal steps. A collective then.
            copy: False: of what lies in host memory the state holds the tensors themselves, and is
                right until the next step begins. For who copies them at once.

        Returns:
            Tensors, numbers, text, lists and dicts: `"model"` by name; `"outstanding"`, what has to
            be added to it to get this replica's part in the mean of all; `"extra"`,
            `"optimizers"` and `"shard"` as of `replica_state`; `"session"`.

        Raises:
            GossipError: In the middle of a step, inside `consensus()`, or if something is no plain
                value.
            ReplicaChangedError: If weights were changed since the last step.
        """
        self._check_ready("state_dict")
        if self._mid_step:
            raise GossipError(
                "state_dict() in the middle of a step: not all optimizers have stepped; call it "
                "when the last one has"
            )
        if self._gradients is not None and self._gradients.begun:
            raise GossipError(
                "state_dict() between backward and step: gradients of this step have been sent, "
                "and are in no state; call it when the optimizer has stepped"
            )
        rounds = self._rounds
        if rounds is not None:
            self._watch.check(self._is_as_sent)
            if settle:
                self._averaging.meet("settle")
                with self._averaging.together():
                    rounds.settle(TOGETHER_SECONDS)  # what is late, too
            else:
                rounds.catch_up()
            self._watch.note()
        state = self._state(opened=not settle, copy=copy)
        if settle:
            self._begin()
        return state

    def agree(self, value: Any) -> list[Any]:
        """What every living rank has, in the order of their numbers; a collective.

        For what is to be settled before states are saved or loaded, such as the step. Values are
        numbers, text, None, and lists and dicts of these. It waits as `consensus()` does, and for a
        rank that has to do its last collective again.

        Raises:
            GossipError: If a member is lost meanwhile (call again), or the ranks come for different
                things again and again.
        """
        self._check_ready("agree")
        return self._averaging.agree(value)

    @property
    def mode(self) -> Mode:
        """When snapshots travel and are mixed."""
        return self._settings.mode

    @property
    def cuts(self) -> int:
        """How many rounds this rank has passed at which states are taken; see `Stale.cut_every`."""
        return self._rounds.cuts if isinstance(self._rounds, StaleRounds) else 0

    @property
    def round_number(self) -> int:
        """Rounds behind this rank: closed, given up or jumped over; 0 without partners.

        States that were taken in one round belong together, also of ranks that have made unequal
        numbers of steps.
        """
        return 0 if self._rounds is None else self._rounds.next_round - self._settings.sends_early

    @property
    def delivery_log(self) -> DeliveryLog | None:
        """What this rank has opened and mixed so far, in mode stale with `record`; not a copy."""
        return self._rounds.log if isinstance(self._rounds, StaleRounds) else None

    @staticmethod
    def is_complete(state: Mapping[str, Any]) -> bool:
        """Whether a state lacks nothing that may still come; always, but in mode stale.

        One that lacks something can be loaded, too. What it lacks is sent again by its partner, or,
        if that had mixed it already, is lost to this rank, and told.
        """
        rounds = state["session"]["rounds"]
        return rounds is None or rounds["stale"] is None or is_complete(rounds["under_way"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; a collective.

        Every rank loads its own, in a session of the same model, optimizers and settings, among as
        many ranks. What both ends had under way is sent again. In the modes that wait training then
        goes on bit for bit as it would have, if the states were taken after equally many steps.

        Raises:
            ValueError: On every rank, if one's state does not fit; nothing is changed then.
            GossipError: If a rank dies meanwhile. The session is closed then; make a new one, and
                load again.
        """
        self._check_ready("load_state_dict")
        rounds = self._rounds
        if rounds is not None:
            self._averaging.meet("load")
        views = self._agree_on(state)
        if rounds is None:
            self._take_over(state["session"], state)
            return
        try:
            with self._averaging.together():
                self._go_on(rounds, state, views)
        except BaseException:
            self._close(wait_seconds=0.0)
            raise

    def _state(self, *, opened: bool, copy: bool) -> dict[str, Any]:
        rounds, sections = self._rounds, self._sections
        owed: dict[str, Tensor] = {}
        for section in sections.weights:
            _owe_residuals(owed, section)
        of_rounds = None
        if rounds is not None:
            early = self._settings.sends_early
            entries = capture(rounds, sections, early=early, owed=owed, copy=copy)
            of_rounds = {**rounds_of(rounds, self._carried), "under_way": entries}
        members = self._members.current
        return {
            **replica_state(self._model, self._optimizers, copy=copy),
            "outstanding": owed,
            "session": {
                "version": VERSION,
                "rank": self.group.rank,
                "world_size": self.group.world_size,
                "settings": must_fit(self._settings),
                "generation": members.generation,
                "living": list(members.living),
                "steps": self._steps,
                "equal_at_step": self._equal_at_step,
                "opened": opened,
                "residuals": residuals_of(sections, copy=copy),
                "clamps": [int(section.clamped) for section in sections.all],
                "averaging": averages_of(self._averaging),
                "rounds": of_rounds,
            },
        }

    def _agree_on(self, state: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """What all ranks are about to load, if it fits everywhere; a collective."""
        problem, mine = self._misfit(state), None
        if problem is None and (rounds := state["session"]["rounds"]) is not None:
            mine = view_of(rounds["next_round"], rounds["under_way"], rounds["mixed"])
        told = self.group.all_gather_object([problem, mine])
        for rank, (why, _) in zip(self.group.members, told, strict=True):
            if why is not None:
                raise ValueError(f"the state cannot be loaded on rank {rank}: {why}")
        return {
            rank: {
                **view,
                "awaits": {tuple(met) for met in view["awaits"]},
                "mixed": {tuple(met) for met in view["mixed"]},
            }
            for rank, (_, view) in zip(self.group.members, told, strict=True)
            if view is not None
        }

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        """Why a state, whatever it is, cannot be loaded here; None if it can."""
        try:
            session = state["session"]
            if session["version"] == VERSION:
                return self._unlike(session) or misfit(self._model, self._optimizers, state)
        except (KeyError, TypeError, IndexError, AttributeError):
            pass
        return f"it is no state that state_dict() of a session gives (version {VERSION})"

    def _unlike(self, session: Mapping[str, Any]) -> str | None:
        if session["world_size"] != self.group.world_size:
            return (
                f"it was saved by {session['world_size']} ranks, here are "
                f"{self.group.world_size}: begin a session from the consensus of all "
                "(gg.average_states)"
            )
        if session["rank"] != self.group.rank:
            return f"it is the state of rank {session['rank']}: load each rank's own"
        settings = must_fit(self._settings)
        for name in session["settings"] | settings:
            was, here = session["settings"].get(name), settings.get(name)
            if was != here:
                return f"{name} was {was}, here it is {here}: use the same"
        if any(rank >= session["world_size"] for rank in session["living"]):
            return (
                f"it was saved among the ranks {', '.join(map(str, session['living']))}, some of "
                "which had joined: begin a session from the consensus of all (gg.average_states)"
            )
        if self._members.current.generation > 0:
            return "ranks were lost or have joined since the session began: load into a new one"
        return None

    def _go_on(
        self, rounds: Rounds, state: Mapping[str, Any], views: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """New rounds over the same links, in the places and with the snapshots of the state."""
        if self._gradients is not None:
            self._gradients.remove()
            self._gradients = None
        transport = rounds.hand_over()
        self._farewell.detach()
        of, session = self._settings, state["session"]
        saved = session["rounds"]
        news, recorder = self._members.watch, self._recorder
        fresh = make_rounds(self.group, lambda *_: transport, self._sections, of, recorder, news)
        self._farewell = self._members.close_at_exit(self, fresh)
        self._rounds = fresh
        self._members.seat(fresh)
        self._averaging = Averaging(self.group, self._members, fresh)
        self._take_over(session, state)
        load_rounds(fresh, saved)
        self.group.barrier()  # nobody sends before all listen for the new run
        torn = restore(fresh, self._sections, saved["under_way"], views)
        told = Carried(**saved["carried"])
        self._carried = replace(
            told,
            bytes_sent=told.bytes_sent - fresh.channel.bytes_sent,
            torn_rounds=told.torn_rounds + torn,
        )
        self._begin(sends=not session["opened"])
        self._watch.note()

    def _take_over(self, session: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        load_replica(self._model, self._optimizers, state)
        load_residuals(self._sections, session["residuals"])
        for section, clamps in zip(self._sections.all, session["clamps"], strict=True):
            section.clamped.fill_(clamps)
        load_averages(self._averaging, session["averaging"])
        self._steps, self._equal_at_step = session["steps"], session["equal_at_step"]
        self._mid_step = False
        self._watch.accept()


def _owe_residuals(owed: dict[str, Tensor], section: Any) -> None:
    for bucket, layout in enumerate(section.plan.buckets):
        residuals: Sequence[Tensor | None] = section.residuals(bucket)
        if any(residual is not None for residual in residuals):
            flat = torch.cat(
                [
                    torch.zeros(section.plan.specs[i].numel) if e is None else e.flatten().cpu()
                    for i, e in zip(layout.indices, residuals, strict=True)
                ]
            )
            owe(owed, section, bucket, flat, 1.0)
