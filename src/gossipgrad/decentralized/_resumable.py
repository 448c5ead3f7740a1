"""Saving a session, and going on from what was saved."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import Group, Recorder, load_replica, misfit, replica_state
from gossipgrad.decentralized._averaging import Averaging
from gossipgrad.decentralized._gradients import GradientExchange
from gossipgrad.decentralized._making import make_rounds
from gossipgrad.decentralized._members import Members
from gossipgrad.decentralized._modes import Mode
from gossipgrad.decentralized._rounds import TOGETHER_SECONDS, Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._session_state import (
    VERSION,
    Carried,
    counters_of,
    load_counters,
    load_residuals,
    must_fit,
    residuals_of,
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
    def _pending_change(self) -> str | None: ...

    @abstractmethod
    def _begin(self, *, sends: bool = True) -> None: ...

    @abstractmethod
    def _close(self, wait_seconds: float) -> None: ...

    def state_dict(self, *, settle: bool = False, copy: bool = True) -> dict[str, Any]:
        """All that this rank needs to go on, at a boundary of rounds; nothing in flight is saved.

        To be taken between two steps, by every rank after equally many, and saved by each under
        its own name. Holds the model's parameters and buffers, the optimizers' state, and the
        session's own. Not the state of schedulers, scalers, samplers and random numbers, which are
        the user's, and not gradients, which a step may have accumulated.

        In modes overlap and sync it is local. What is late is awaited as in a step, and mixed; what
        is late still is given up, with a warning. The open round of overlap is opened again when
        the state is loaded, with the same weights. In the middle of a round of `every` steps that
        round is mixed now.

        In mode stale it is a collective: what is in flight is awaited and mixed on all ranks, as in
        `average_()`. Each rank calls it at its own step, for example when `position` comes to a
        number on which all have agreed.

        Args:
            settle: A collective in any mode, as in mode stale: for ranks that end after unequal
                steps.
            copy: False: of what lies in host memory the state holds the tensors themselves, and is
                right until the next step begins. For who copies them at once.

        Returns:
            Tensors, numbers, text, lists and dicts: `"model"` by name; `"residuals"`, what rounding
            took away from narrow weights, by the same names; `"extra"`, `"optimizers"` and
            `"shard"` as of `replica_state`; `"session"`.

        Raises:
            GossipError: In the middle of a step, inside `consensus()`, or if something is no plain
                value. Where it is a collective, also as `average_()`.
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
        rounds, every = self._rounds, self._settings.every
        if rounds is None:
            return self._state(0, copy=copy)
        if settle or isinstance(rounds, StaleRounds):
            self._averaging.meet("settle", self._pending_change())
            with self._averaging.together():
                rounds.settle(TOGETHER_SECONDS)  # what is late, too
            state = self._state(rounds.next_round, copy=copy)
            self._begin()
            return state
        self._watch.check(self._is_as_sent)
        early, begins = self._settings.sends_early, self._steps % every == 0
        rounds.catch_up(closes=early and not begins)
        self._watch.note()
        return self._state(rounds.next_round - (early and begins), copy=copy)

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
    def round_number(self) -> int:
        """Rounds behind this rank: closed, given up or jumped over; 0 without partners.

        States that were taken in one round belong together, also of ranks that have made unequal
        numbers of steps.
        """
        return 0 if self._rounds is None else self._rounds.next_round - self._settings.sends_early

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; a collective.

        Every rank loads its own, in a session of the same model, optimizers and settings, among as
        many ranks. In modes overlap and sync training then goes on bit for bit as it would have, if
        nothing was late and the states were taken after equally many steps. In mode stale the mean
        over ranks is that of the states.

        Raises:
            ValueError: On every rank, if one's state does not fit; nothing is changed then.
            GossipError: If a rank dies meanwhile. The session is closed then; make a new one, and
                load again.
        """
        self._check_ready("load_state_dict")
        rounds = self._rounds
        if rounds is not None:
            self._averaging.meet("load")
        next_round = self._agree_on(state)
        if rounds is None:
            self._carried = self._take_over(None, state)
            return
        try:
            with self._averaging.together():
                self._go_on(rounds, state, next_round)
        except BaseException:
            self._close(wait_seconds=0.0)
            raise

    def _state(self, next_round: int, *, copy: bool) -> dict[str, Any]:
        rounds, sections = self._rounds, self._sections
        members = self._members.current
        return {
            **replica_state(self._model, self._optimizers, copy=copy),
            "residuals": residuals_of(sections, copy=copy),
            "session": {
                "version": VERSION,
                "rank": self.group.rank,
                "world_size": self.group.world_size,
                "settings": must_fit(self._settings),
                "generation": members.generation,
                "living": list(members.living),
                "steps": self._steps,
                "equal_at_step": self._equal_at_step,
                "next_round": next_round,
                "starts": rounds.starts if isinstance(rounds, StaleRounds) else 0,
                "counters": counters_of(rounds, sections, self._averaging, self._carried),
            },
        }

    def _agree_on(self, state: Mapping[str, Any]) -> int:
        """In which round all ranks go on, if their states fit everywhere; a collective."""
        problem = self._misfit(state)
        mine = None if problem is not None else state["session"]["next_round"]
        told = self.group.all_gather_object([problem, mine])
        for rank, (why, _) in zip(self.group.members, told, strict=True):
            if why is not None:
                raise ValueError(f"the state cannot be loaded on rank {rank}: {why}")
        rounds = [round for _, round in told]
        if len(set(rounds)) > 1:
            warnings.warn(
                f"the states are of unlike rounds, {min(rounds)} to {max(rounds)}: an exchange "
                "that one end alone had mixed shifts the mean over ranks. Take them after equally "
                "many steps, or with state_dict(settle=True)",
                stacklevel=3,
            )
        return max(rounds)

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        """Why a state, whatever it is, cannot be loaded here; None if it can."""
        try:
            session = state["session"]
            if session["version"] < VERSION:
                return (
                    f"it is of version {session['version']}, from an older gossipgrad, and here is "
                    f"{VERSION}: go on with that release, or begin a session from its weights "
                    "(gg.load_replica)"
                )
            if session["version"] == VERSION:
                return (
                    self._unlike(session)
                    or misfit(self._model, self._optimizers, state)
                    or self._misses_residuals(state["residuals"])
                )
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

    def _misses_residuals(self, residuals: Mapping[str, Tensor]) -> str | None:
        here = {entry.spec.name for s in self._sections.weights for entry, _ in s.narrow}
        missing = sorted(here - residuals.keys())
        return f"it has no residual of {missing[0]}" if missing else None

    def _go_on(self, rounds: Rounds, state: Mapping[str, Any], next_round: int) -> None:
        """New rounds over the same links, from the round on that all have agreed on."""
        if self._gradients is not None:
            self._gradients.remove()
            self._gradients = None
        transport = rounds.hand_over()
        self._farewell.detach()
        of, news, recorder = self._settings, self._members.watch, self._recorder
        fresh = make_rounds(self.group, lambda *_: transport, self._sections, of, recorder, news)
        self._farewell = self._members.close_at_exit(self, fresh)
        self._rounds = fresh
        self._members.seat(fresh)
        self._averaging = Averaging(self.group, self._members, fresh)
        fresh.next_round = next_round
        if isinstance(fresh, StaleRounds):
            fresh.starts = state["session"]["starts"]
        carried = self._take_over(fresh, state)
        self.group.barrier()  # nobody sends before all listen for the new run
        self._carried = replace(carried, bytes_sent=carried.bytes_sent - fresh.channel.bytes_sent)
        self._begin()
        self._watch.note()

    def _take_over(self, rounds: Rounds | None, state: Mapping[str, Any]) -> Carried:
        session = state["session"]
        load_replica(self._model, self._optimizers, state)
        load_residuals(self._sections, state["residuals"])
        carried = load_counters(rounds, self._sections, self._averaging, session["counters"])
        self._steps, self._equal_at_step = session["steps"], session["equal_at_step"]
        self._mid_step = False
        self._watch.accept()
        return carried
