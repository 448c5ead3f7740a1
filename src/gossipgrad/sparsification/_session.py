"""A session: the user's model and optimizer, with gradients averaged by sparse messages."""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad.comm import (
    Group,
    Recorder,
    agree_on,
    broadcast_replica,
    distance_to_mean,
    load_replica,
    mean_buffers,
    misfit,
    replica_state,
    trained_parameters,
)
from gossipgrad.engine import Claim
from gossipgrad.errors import GossipError
from gossipgrad.planning import Plan
from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._planner import Planner
from gossipgrad.sparsification._queue import OrderedQueue
from gossipgrad.sparsification._session_state import (
    change,
    check_all_fit,
    counts_of_session,
    load_session,
    new_counts,
    session_misfit,
    session_state,
)
from gossipgrad.sparsification._settings import Settings, check_parameters, in_order_of
from gossipgrad.sparsification._stats import SparseStats, collect, collect_single
from gossipgrad.sparsification._steps import SingleRank, StepWatch

__all__ = ["SparseSession"]


class SparseSession:
    """What `sparsify` returns: see there. One of its ranks; made by it alone.

    Attributes:
        group: Private collectives among the ranks of this session.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        *,
        group: Group,
        scaler: torch.amp.GradScaler | None,
        recorder: Recorder | None,
    ) -> None:
        self.group = group
        self._model = model
        self._optimizers = list(optimizers)
        self._settings = settings
        self._scaler = scaler
        self._recorder = recorder
        self._in_consensus = self._closed = False
        self._aggregation: Aggregation | None = None
        self._single: SingleRank | None = None
        self._no_sync_blocks = 0
        self._planner: Planner | None = None
        self._watch: StepWatch | None = None
        self._finalizer: weakref.finalize | None = None
        self._at_close: SparseStats | None = None
        self._claim = Claim("sparsify")
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return self.group.world_size

    @property
    def plan(self) -> Plan | None:
        """The plan, which was given or computed by a rule that measures times.

        It stays while a dense one is compared with it. None until it is there, with one rank, and
        for rules without times: `"wfbp"`, `"layerwise"`, `"single"` and a number of bytes.
        """
        return None if self._planner is None else self._planner.plan

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, floating buffers (BatchNorm's statistics) are the mean over ranks.

        Weights are equal on all ranks anyway. A collective to enter, local to leave.

        Raises:
            GossipError: If a rank is gone, or inside another.
        """
        self._check_together("consensus")
        with mean_buffers(self._model, self.group.mean_):
            self._in_consensus = True
            try:
                yield
            finally:
                self._in_consensus = False

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root mean square over ranks of the distance between weights and their mean, now.

        A collective; changes nothing. It is 0 unless weights were written on one rank alone.
        """
        self._check_together("consensus_distance")
        mean = self.group.mean_
        wide = (parameter.detach().double().cpu() for parameter in self._model.parameters())
        return distance_to_mean(((own, mean(own.clone())) for own in wide), mean)

    def broadcast_(self) -> None:
        """Makes every replica that of rank 0 again: parameters, buffers and optimizer state.

        A collective, for after `load_state_dict` on one rank, re-initialisation or
        `add_param_group`: the set of trained parameters is taken anew. Residuals are given up, and
        a plan that is measured is measured anew; rounds and bytes are counted on, so that a warm-up
        goes on where it was.
        When it raises, the session is over: steps and backward passes raise until it is closed.

        Raises:
            AgreementError: If the ranks now differ in names, shapes or dtypes.
            GossipError: If a rank is gone.
        """
        self._check_together("broadcast_")
        try:
            self._begin()
        except BaseException as error:
            if self._aggregation is None:
                self.close()
            else:
                self._aggregation.end(
                    f"the session is over, its replicas could not be made equal: {error}. Close it "
                    "and start another with the ranks that live"
                )
            raise

    def replan(self) -> None:
        """Measures backward, selection and network anew, and plans by that; a collective.

        For when the network or the density has changed for good: nothing is measured again by
        itself. The next steps go as the first ones of the session did. Called between two steps.

        Raises:
            ValueError: The plan is not one that is measured.
            GossipError: If a rank is gone, or the ranks are not at the same step.
        """
        self._check_together("replan")
        if self._aggregation is not None and self._planner is not None:
            self._planner.restart(self._aggregation)

    def agree(self, value: Any) -> list[Any]:
        """What every rank has, a value of JSON, by rank; a collective."""
        self._check_together("agree")
        return self.group.all_gather_object(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside are not sent, but added up in `.grad`; local.

        For gradient accumulation, around all but the last pass of a step. Without it every pass is
        a round, of all that `.grad` holds, and costs a message more. Where all steps are taken,
        nothing is lost by that, but `momentum_correction` then counts the passes before the last
        more than once. With a scaler it is needed: a step that is left out because its last pass
        was not finite is lost with all that its earlier passes have sent, residuals in it.
        """
        self._no_sync_blocks += 1
        self._enable_rounds()
        try:
            yield
        finally:
            self._no_sync_blocks -= 1
            self._enable_rounds()

    def stats(self) -> SparseStats:
        """What this rank has done so far, also when the session is closed; no communication."""
        if self._at_close is not None:
            return self._at_close
        if self._aggregation is not None and self._planner is not None:
            return collect(self._aggregation, self._planner)
        return collect_single(0 if self._single is None else self._single.rounds)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on as if it had never stopped; local.

        To be taken between two steps, by every rank, and saved by each under its own name: replicas
        are equal, residuals are not. Holds copies in host memory: the model's parameters and
        buffers, the optimizers' state, and the session's own. Not the state of schedulers, scalers,
        samplers and random numbers, which are the user's, and not gradients.

        Returns:
            Tensors, numbers, text, lists and dicts: `"model"` and the rest of a replica's state by
            name; `"session"` with residuals by name of the parameter.

        Raises:
            GossipError: In the middle of a backward pass, inside `consensus()`, after `close()`, or
                if something is no plain value.
        """
        own = self.own_state()
        return {**replica_state(self._model, self._optimizers), "session": own}

    def own_state(self) -> dict[str, Any]:
        """What `state_dict` has as `"session"`, for who saves the replica in another way; local.

        Raises:
            GossipError: As `state_dict`.
        """
        self._check_ready("state_dict")
        if self._aggregation is not None and self._aggregation.passes.began:
            raise GossipError("a state in the middle of a backward pass: take it between steps")
        own = session_state(self._settings, self._aggregation, self._planner, self.group)
        if self._single is not None:
            own["counted"] = {**new_counts(), "rounds": self._single.rounds}
        return own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; a collective.

        Every rank loads its own, all saved after the same step; `deal_states` makes those of
        another number of ranks. With the same plan asked for, of the same methods, training then
        goes on bit for bit as it would have with as many ranks. Another plan takes over what is
        carried over, and is measured anew. One rank withholds nothing: what several carried over is
        given up there, and a warning says so; its steps count as rounds.

        Raises:
            ValueError: On every rank, if one's state does not fit; nothing is changed then.
            GossipError: If a rank is gone.
        """
        session, why = None, "it is no state that state_dict() of a session gives"
        if isinstance(state, Mapping) and "session" in state and "shard" in state:
            session = state["session"]
            why = self._misfit(session)
            why = why or misfit(self._model, self._optimizers, state)
        self._check_together("load_state_dict")
        check_all_fit(self.group, why, session)
        load_replica(self._model, self._optimizers, state)
        self._load_own(session)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Takes up what `own_state` gave; the replica is the caller's to load. A collective.

        Raises:
            ValueError: On every rank, if one's state does not fit; nothing is changed then.
            GossipError: If a rank is gone.
        """
        self._check_together("load_own_state")
        check_all_fit(self.group, self._misfit(state), state)
        self._load_own(state)

    def close(self) -> None:
        """Ends the session and takes all hooks off; local, waits for nobody, may be called twice.

        Ranks that go on training get a `GossipError` from their next step. So does this one where
        it is closed in the middle of a backward pass, by a signal handler, a hook or another
        thread: that pass raises, and leaves this rank's own gradients in `.grad`.
        """
        try:
            if not self._closed:
                self._closed = True
                self._at_close = self.stats()
        finally:
            self._remove_hooks()
            self._claim.release()
            self.group.close()

    def __enter__(self) -> "SparseSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """Makes the replicas equal, and the hooks, which may be there already; a collective."""
        of, group = self._settings, self.group
        parameters = self._trained()
        self._claim.take(parameters)
        counts = new_counts() if self._aggregation is None else counts_of_session(self._aggregation)
        if self._single is not None:
            counts["rounds"] = self._single.rounds
        if self.world_size == 1:
            self._remove_hooks()
            self._single = SingleRank(self._optimizers, counts["rounds"], self._scaler)
            self._single.session = self
        else:
            check_parameters(parameters)
            agree_on(group, self._model, self._optimizers, of.describe())
            backwards = in_order_of(of.plan, dict(reversed(parameters.items())))
            planner = Planner(of, [p.nbytes for p in backwards.values()], group)
            broadcast_replica(group, self._model, self._optimizers)
            self._remove_hooks()
            self._aggregation = Aggregation(
                backwards,
                group,
                of,
                planner.first_merges,
                after_round=planner.after_round,
                scaler=self._scaler,
                recorder=self._recorder,
            )
            self._aggregation.count_from(counts)
            self._enable_rounds()
            self._planner = planner
            self._watch = StepWatch(self._model, self._optimizers, self._aggregation, self._scaler)
            self._watch.session = self
        # It holds nothing that holds the session: who drops model and optimizers need not close.
        aggregation = self._aggregation
        of_rounds = () if aggregation is None else (aggregation.queue, aggregation.passes.handles)
        self._finalizer = weakref.finalize(self, _leave, group, *of_rounds)
        self._finalizer.atexit = False  # pyrefly: ignore[missing-attribute]

    def _enable_rounds(self) -> None:
        if self._aggregation is not None:
            self._aggregation.passes.enabled = not self._no_sync_blocks

    def _trained(self) -> dict[str, nn.Parameter]:
        """What is trained now, and has elements."""
        trained = trained_parameters(self._model, self._optimizers)
        return {name: p for name, p in trained.items() if p.numel()}

    def _misfit(self, session: Any) -> str | None:
        trained = self._trained()
        changed = None if self._aggregation is None else change(self._aggregation, trained)
        return changed or session_misfit(self._settings, self.group, trained, session)

    def _load_own(self, session: Any) -> None:
        if self._single is not None:
            self._single.count_from(session["counted"]["rounds"])
            if any(bool(residual.any()) for residual in session["residuals"].values()):
                warnings.warn(
                    "what several ranks carried over in residuals is given up: one rank sends "
                    "nothing, and carries nothing over",
                    stacklevel=3,
                )
        elif self._aggregation is not None and self._planner is not None:
            load_session(self._settings, self._aggregation, self._planner, session)
        if self._watch is not None:
            self._watch.start_over()

    def _remove_hooks(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        for hooks in (self._single, self._watch):
            if hooks is not None:
                hooks.remove()
        if self._aggregation is not None:
            self._aggregation.close()
        self._single = self._watch = self._aggregation = None

    def _check_together(self, method: str) -> None:
        self._check_ready(method)
        if self._aggregation is not None and self._aggregation.broken is not None:
            raise GossipError(self._aggregation.broken)

    def _check_ready(self, method: str) -> None:
        if self._closed:
            raise GossipError("the session is closed: call sparsify() for a new one")
        if self._in_consensus:
            raise GossipError(
                f"{method}() inside consensus(): the buffers are the mean of all ranks, and go "
                "back to this rank's own on exit. Call it after the block"
            )


def _leave(
    group: Group, queue: OrderedQueue | None = None, handles: Sequence[RemovableHandle] = ()
) -> None:
    for handle in handles:
        handle.remove()
    if queue is not None:
        queue.close()
    group.close()
