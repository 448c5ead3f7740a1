"""The state of a session beside the replica: position, counters and residuals."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipgrad._messages import warn
from gossipgrad.comm import Group, Membership, load_replica, local, misfit, replica_state
from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._driver import StepDriver
from gossipgrad.engine._flow import Flow
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._rounds import Rounds
from gossipgrad.engine._settings import RoundSettings
from gossipgrad.errors import GossipError

__all__ = ["StateKeeper"]

VERSION = 3


class StateKeeper:
    """Saves and loads the state of one session; local except for `check_together`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        settings: RoundSettings,
        replica: Replica,
        rounds: Rounds | None,
        averaging: Averaging,
        driver: StepDriver,
    ) -> None:
        self._rank, self._world_size, self._settings = rank, world_size, settings
        self._replica, self._rounds = replica, rounds
        self._averaging, self._driver = averaging, driver

    def settle(self, *, drains: bool) -> int:
        """Mix what is in flight, a collective if it `drains`; return the round to continue at."""
        rounds, driver = self._rounds, self._driver
        if driver.is_mid_step:
            raise GossipError(
                "state_dict() in the middle of a step: not all optimizers have stepped; call it "
                "when the last one has"
            )
        if rounds is None:
            return 0
        if drains:
            self._averaging.enter_collective("drain", driver.pending_change())
            self._averaging.drain()
            return rounds.next_round
        driver.check()
        is_ahead = driver.sends_ahead
        rounds.catch_up(closes=is_ahead and not driver.is_boundary)
        is_open = is_ahead and driver.is_boundary  # the loaded state opens its round once more
        return rounds.next_round - 1 if is_open else rounds.next_round

    def state_dict(
        self, next_round: int, members: Membership, family: Mapping[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        """See `Session.state_dict`; rounds continue at `next_round`."""
        rounds, driver = self._rounds, self._driver
        return {
            **replica_state(self._replica.model, self._replica.optimizers, copy=copy),
            "residuals": _residuals(driver.flows, copy=copy),
            "session": {
                "version": VERSION,
                "rank": self._rank,
                "world_size": self._world_size,
                "settings": self._settings.must_fit(),
                "generation": members.generation,
                "living": list(members.living),
                "steps": driver.steps,
                "equal_at_step": driver.equal_at_step,
                "next_round": next_round,
                "starts": 0 if rounds is None else rounds.starts,
                "counters": {
                    "clamps": sum(int(b.clamped) for f in driver.flows for b in f.buckets),
                    "averages": self._averaging.state_dict(),
                    "rounds": None if rounds is None else rounds.state_dict(),
                },
                "family": family,
            },
        }

    def misfit(self, state: Any, generation: int) -> str | None:
        """Return why a state cannot be loaded here; None if it can."""
        try:
            if state["session"]["version"] == VERSION:
                return (
                    self._unlike(state["session"], generation)
                    or misfit(self._replica.model, self._replica.optimizers, state)
                    or _missing_residual(self._driver.flows, state["residuals"])
                )
        except (KeyError, TypeError, IndexError, AttributeError):
            pass
        return f"it is no state from a session's state_dict() (version {VERSION})"

    def check_together(self, group: Group, state: Any, problem: str | None) -> int:
        """Return the round in which ranks continue from these states, or raise `ValueError` on all.

        `problem` is why this rank's state cannot be loaded.
        """
        mine = None if problem is not None else state["session"]["next_round"]
        gathered = group.all_gather_object([problem, mine])
        for rank, (why, _) in zip(group.members, gathered, strict=True):
            if why is not None:
                raise ValueError(f"the state cannot be loaded on rank {rank}: {why}")
        next_rounds = [each for _, each in gathered]
        if len(set(next_rounds)) > 1:
            warn(
                f"the states are of unlike rounds, {min(next_rounds)} to {max(next_rounds)}: an "
                "exchange that only one end had mixed shifts the mean over ranks. Save them after "
                "equally many steps, or with state_dict(drain=True)"
            )
        return max(next_rounds)

    def load_state_dict(self, state: Mapping[str, Any], next_round: int) -> None:
        """Continue from a state that fits, with nothing in flight."""
        session, rounds, driver = state["session"], self._rounds, self._driver
        driver.drop_hooks()
        if rounds is not None:
            rounds.cancel()
            rounds.next_round = next_round
            rounds.starts = session["starts"]
        load_replica(self._replica.model, self._replica.optimizers, state)
        _load_residuals(driver.flows, state["residuals"])
        counters = session["counters"]
        buckets = [bucket for flow in driver.flows for bucket in flow.buckets]
        for bucket in buckets:
            bucket.clamped.zero_()
        if buckets:
            buckets[0].clamped.fill_(counters["clamps"])
        self._averaging.load_state_dict(counters["averages"])
        if rounds is not None and counters["rounds"] is not None:
            rounds.load_state_dict(counters["rounds"])
        driver.steps, driver.equal_at_step = session["steps"], session["equal_at_step"]
        driver.is_mid_step = False
        self._replica.accept()

    def _unlike(self, session: Mapping[str, Any], generation: int) -> str | None:
        if session["world_size"] != self._world_size:
            return (
                f"it was saved by {session['world_size']} ranks, here are {self._world_size}: "
                "begin a session from the consensus of all (gg.average_states)"
            )
        if session["rank"] != self._rank:
            return f"it is the state of rank {session['rank']}: load each rank's own"
        settings = self._settings.must_fit()
        for name in session["settings"] | settings:
            was, here = session["settings"].get(name), settings.get(name)
            if was != here:
                return f"{name} was {was}, here it is {here}: use the same"
        if any(rank >= session["world_size"] for rank in session["living"]):
            return (
                f"it was saved among the ranks {', '.join(map(str, session['living']))}, some of "
                "which had joined: begin a session from the consensus of all (gg.average_states)"
            )
        if generation > 0:
            return "ranks were lost or have joined since the session began: load into a new one"
        return None


def _residuals(flows: Sequence[Flow], *, copy: bool = True) -> dict[str, Tensor]:
    """Return the rounding errors of narrow weights, by parameter name."""
    found: dict[str, Tensor] = {}
    for bucket in (bucket for flow in flows for bucket in flow.buckets):
        for entry, residual in zip(bucket.entries, bucket.residuals, strict=True):
            if residual is None:
                continue
            if entry.rows is None:
                found[entry.spec.name] = residual.to("cpu", copy=copy)
                continue
            shape = local(entry.parameter).shape
            whole = found.setdefault(
                entry.spec.name, torch.zeros(shape, dtype=residual.dtype, device="cpu")
            )
            whole.narrow(0, *entry.rows).copy_(residual)
    return found


@torch.no_grad()
def _load_residuals(flows: Sequence[Flow], state: Mapping[str, Tensor]) -> None:
    for bucket in (bucket for flow in flows for bucket in flow.buckets):
        for entry, residual in zip(bucket.entries, bucket.residuals, strict=True):
            if residual is not None:
                whole = state[entry.spec.name]
                residual.copy_(whole if entry.rows is None else whole.narrow(0, *entry.rows))


def _missing_residual(flows: Sequence[Flow], state: Mapping[str, Any]) -> str | None:
    missing = sorted(_residuals(flows, copy=False).keys() - state.keys())
    return f"it has no residual of {missing[0]}" if missing else None
