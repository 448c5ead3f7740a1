"""The session of `sparsify`: averages gradients by sparse messages."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import (
    Group,
    Recorder,
    broadcast_replica,
    distance_to_mean,
    load_replica,
    misfit,
    replica_state,
    trained_parameters,
)
from gossipgrad.engine import Flow, Replica, Session
from gossipgrad.errors import GossipError
from gossipgrad.planning import Plan
from gossipgrad.sparsification._aggregation import Aggregation, Counters
from gossipgrad.sparsification._merged import Unsent
from gossipgrad.sparsification._planner import Planner
from gossipgrad.sparsification._queue import OrderedQueue
from gossipgrad.sparsification._session_state import (
    check_all_fit,
    load_session,
    session_misfit,
    session_state,
)
from gossipgrad.sparsification._settings import Settings, check_parameters, in_order_of
from gossipgrad.sparsification._stats import SparseStats, collect
from gossipgrad.sparsification._steps import Closure, StepWatch

__all__ = ["SparseSession"]


class SparseSession(Session):
    """The session that `sparsify` returns, on one rank.

    It has no partners: all ranks meet in collectives at the end of each backward pass.
    """

    settings: Settings  # pyrefly: ignore[bad-override-mutable-attribute]
    call = "sparsify"
    unknown_scaler_harm = "residuals carry gradients over into steps with another scale"
    counts_skipped_steps = False

    def __init__(
        self,
        replica: Replica,
        settings: Settings,
        *,
        group: Group,
        scaler: torch.amp.GradScaler | None,
        recorder: Recorder | None,
    ) -> None:
        self._scaler = scaler
        self._counters = Counters()
        self._sends = True  # False inside `no_sync()`
        self._aggregation: Aggregation | None = None
        self._planner: Planner | None = None
        self._watch: StepWatch | None = None
        self._finalizer: weakref.finalize | None = None
        self._at_close: SparseStats | None = None
        super().__init__(replica, settings, group=group, scaler=scaler, recorder=recorder)

    @property
    def position(self) -> int:
        """The run's rounds; with one rank, its steps."""
        return self._counters.rounds

    @property
    def plan(self) -> Plan | None:
        """The plan, given or computed by a rule that measures times.

        It does not change during the comparison with a dense plan. None before it is computed, with
        one rank, and for rules without times: `"wfbp"`, `"layerwise"`, `"single"` and a number of
        bytes.
        """
        return None if self._planner is None else self._planner.plan

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return the root mean square over ranks of the distance of weights to their mean.

        A collective; changes nothing. It is 0 unless weights were written on one rank alone.
        """
        if self._in_consensus:
            return super().consensus_distance()
        self._check_ready("consensus_distance")
        mean = self.group.mean_
        wide = (parameter.detach().double().cpu() for parameter in self.replica.model.parameters())
        return distance_to_mean(((own, mean(own.clone())) for own in wide), mean)

    def broadcast_(self) -> None:
        """See `Session.broadcast_`; also for another network, whose plan is measured again.

        A collective. The set of trained parameters is read again, and residuals are dropped;
        counters of rounds and bytes continue, and so does a warm-up. When it raises, the session is
        over: steps and backward passes raise until it is closed.

        Raises:
            AgreementError: If the ranks now differ in names, shapes or dtypes.
            GossipError: If a rank is gone.
        """
        self._check_ready("broadcast_")
        try:
            super().broadcast_()
        except BaseException as error:
            if self._aggregation is None:
                self.close()
            else:
                self._aggregation.end(
                    f"the session is over, its replicas could not be made equal: {error}. Close it "
                    "and start another with the ranks that live"
                )
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of backward passes inside in `.grad` without sending; local.

        For gradient accumulation, around all but the last pass of a step. Without it every pass is
        a round of the whole `.grad`, which costs another message. If all steps are taken, nothing
        is lost, but `momentum_correction` then counts the passes before the last more than once. A
        scaler requires it: a step that is skipped because its last pass was not finite loses
        everything that its earlier passes have sent, including residuals.
        """
        before, self._sends = self._sends, False
        self._arm()
        try:
            yield
        finally:
            self._sends = before
            self._arm()

    def stats(self) -> SparseStats:  # pyrefly: ignore[bad-override]
        """Return this rank's counters, even after `close()`; no communication."""
        if self._at_close is not None:
            return self._at_close
        if self._aggregation is not None and self._planner is not None:
            return collect(self._aggregation, self._planner)
        return SparseStats(rounds=self._counters.rounds)

    def state_dict(self, *, drain: bool = False, copy: bool = True) -> dict[str, Any]:
        """Return this rank's whole state, to continue exactly; local. See `Session.state_dict`.

        Call it between two steps on every rank, and save each rank's state under its own name:
        replicas are equal, residuals are not. `drain` has no effect: nothing is in flight.

        Raises:
            GossipError: In the middle of a backward pass, inside `consensus()`, after `close()`, or
                if something is no plain value.
        """
        own = self.own_state()
        replica = replica_state(self.replica.model, self.replica.optimizers, copy=copy)
        return {**replica, "session": own}

    def own_state(self) -> dict[str, Any]:
        """Return the `"session"` part of `state_dict`, to save the replica in another way; local.

        Raises:
            GossipError: As `state_dict`.
        """
        self._check_ready("state_dict")
        if self._aggregation is not None and self._aggregation.passes.began:
            raise GossipError("a state in the middle of a backward pass: take it between steps")
        return session_state(
            self.settings, self._aggregation, self._planner, self._counters, self.group
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; a collective.

        Every rank loads its own state, all saved after the same step. With the same plan, methods
        and number of ranks, training then continues bit for bit. Another plan keeps the residuals,
        and is measured again. With another number of ranks each loads any of the states: residuals
        are dropped with a warning, and the plan is measured again.

        Raises:
            ValueError: On every rank, if one's state does not fit; nothing is changed then.
            GossipError: If a rank is gone.
        """
        session, why = None, "it is no state from a session's state_dict()"
        if isinstance(state, Mapping) and "session" in state and "shard" in state:
            session = state["session"]
            why = self._misfit(session)
            why = why or misfit(self.replica.model, self.replica.optimizers, state)
        self._check_ready("load_state_dict")
        check_all_fit(self.group, why, session)
        load_replica(self.replica.model, self.replica.optimizers, state)
        self._load_own(session)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `own_state`; the caller loads the replica. A collective.

        Raises:
            ValueError: On every rank, if one's state does not fit; nothing is changed then.
            GossipError: If a rank is gone.
        """
        self._check_ready("load_own_state")
        check_all_fit(self.group, self._misfit(state), state)
        self._load_own(state)

    def close(self) -> None:
        """Close the session and remove all hooks; local, does not wait, may be called twice.

        Ranks that continue training get a `GossipError` from their next step. So does this rank if
        it is closed in the middle of a backward pass, by a signal handler, a hook or another
        thread: that pass raises, and leaves this rank's own gradients in `.grad`.
        """
        super().close()

    def _make_flows(self) -> list[Flow]:
        if self.world_size > 1:
            check_parameters(self._trained())
        return []

    def _begin(self) -> None:
        """Make the replicas equal, and create the aggregation; a collective."""
        group, replica = self.group, self.replica
        if self.world_size > 1:
            backwards = in_order_of(self.settings.plan, dict(reversed(self._trained().items())))
            planner = Planner(self.settings, [p.nbytes for p in backwards.values()], group)
            broadcast_replica(group, replica.model, replica.optimizers)
            self._end_rounds()
            self._aggregation = aggregation = Aggregation(
                backwards,
                group,
                self.settings,
                planner.first_merges,
                after_round=planner.after_round,
                counters=self._counters,
                scaler=self._scaler,
                recorder=self._recorder,
            )
            self._planner = planner
            self._watch = StepWatch(replica.model, replica.optimizers, aggregation, self._scaler)
            self._arm()
        # It does not reference the session: dropping model and optimizers is enough to close.
        queue = None if self._aggregation is None else self._aggregation.queue
        self._finalizer = weakref.finalize(self, _leave, group, queue)
        self._finalizer.atexit = False  # pyrefly: ignore[missing-attribute]

    def _rebuilt(self, gradient_map: Callable[[str, Tensor], Tensor] | None) -> None:
        """Begin again with the residuals of parameters that are still trained."""
        before = {} if self._aggregation is None else self._aggregation.unsent()
        super()._rebuilt(gradient_map)
        if self._aggregation is None or self._planner is None:
            return
        shapes = {name: parameter.shape for name, parameter in self._trained().items()}

        def follow(name: str, tensor: Tensor | None) -> Tensor | None:
            if tensor is not None and gradient_map is not None:
                tensor = gradient_map(name, tensor)
            return tensor if tensor is not None and tensor.shape == shapes[name] else None

        unsent = {
            name: Unsent(*(follow(name, each) for each in kept))
            for name, kept in before.items()
            if name in shapes
        }
        self._aggregation.regroup(self._planner.first_merges, unsent=unsent)

    def _before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        if self._watch is None:  # one rank: nothing is exchanged
            return super()._before_step(optimizer, closure)
        return self._watch.before_step(optimizer, closure)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._watch is None:
            super()._after_step(optimizer)
            self._counters.rounds = self._run.steps
        else:
            self._watch.after_step(optimizer)

    def _arm(self) -> None:
        if self._aggregation is not None:
            self._aggregation.passes.enabled = self._sends

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained now and have elements."""
        trained = trained_parameters(self.replica.model, self.replica.optimizers)
        return {name: p for name, p in trained.items() if p.numel()}

    def _misfit(self, session: Any) -> str | None:
        aggregation = self._aggregation
        trained = self._trained() if aggregation is None else aggregation.by_name
        return session_misfit(self.group, trained, session)

    def _load_own(self, session: Any) -> None:
        parts = self._aggregation, self._planner, self._counters
        load_session(self.settings, self.group, *parts, session)
        if self._aggregation is None:
            self._run.steps = self._counters.rounds
        if self._watch is not None:
            self._watch.start_over()

    def _end_rounds(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._aggregation is not None:
            self._aggregation.close()
        self._watch = self._aggregation = None

    def _close(self, wait_seconds: float, error: BaseException | None = None) -> None:
        try:
            if not self._is_closed:
                self._at_close = self.stats()
        finally:
            self._end_rounds()
            super()._close(wait_seconds, error)

    def _check_ready(self, method: str) -> None:
        super()._check_ready(method)
        if method == "state_dict" or self._aggregation is None:
            return
        if self._aggregation.broken is not None:
            raise GossipError(self._aggregation.broken)


def _leave(group: Group, queue: OrderedQueue | None) -> None:
    if queue is not None:
        queue.close()
    group.close()
