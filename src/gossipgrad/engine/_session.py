"""The base of every family's session, attached to the user's model and optimizers."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad.comm import (
    Channel,
    Group,
    Heartbeats,
    Hub,
    Membership,
    Recorder,
    Transport,
    agree_on,
    broadcast_replica,
    broadcast_values,
    digest,
    fingerprint,
    is_sharded,
    load_replica,
    local,
    misfit,
)
from gossipgrad.engine._averaging import Averaging, own_work
from gossipgrad.engine._check_replica import is_averaged
from gossipgrad.engine._disagreement import measure_disagreement
from gossipgrad.engine._driver import StepDriver
from gossipgrad.engine._flow import Flow, memory_of
from gossipgrad.engine._invitation import Invitation, why_not_join
from gossipgrad.engine._island import Island
from gossipgrad.engine._island_gradients import IslandGradients
from gossipgrad.engine._joiner import Joiner
from gossipgrad.engine._members import Members
from gossipgrad.engine._modes import Mode
from gossipgrad.engine._repeated_shards import RepeatedShards
from gossipgrad.engine._replica import Replica, retried
from gossipgrad.engine._rounds import Rounds
from gossipgrad.engine._saving import warn_of_load, watch_state_dict, watch_states
from gossipgrad.engine._settings import RoundSettings
from gossipgrad.engine._signal_handlers import check_not_in_handler
from gossipgrad.engine._state import StateKeeper
from gossipgrad.engine._stats import Stats, collect
from gossipgrad.engine._step_hooks import Closure, StepHooks
from gossipgrad.errors import AgreementError, GossipError

__all__ = ["Session"]

S = TypeVar("S", bound="Session")

_CLOSE_SECONDS = 10.0  # how long a normal close waits for parts in flight and for sending


@own_work(
    *("consensus_state_dict", "average_", "consensus_distance", "disagreement", "broadcast_"),
    *("rebuild", "mean_", "wait", "agree", "state_dict", "load_state_dict"),
    *("_before_state_dict", "_before_load", "_close"),
)
class Session:
    """Trains one of several replicas inside the user's own loop; the base of all sessions.

    A family defines the tensors to exchange, as flows, and their phase of a step; the session
    exchanges them with the partner of the round. `close()` it, or use it in a `with` statement.
    Leaving the context by an exception closes without waiting.

    Args:
        replica: The user's model and optimizers.
        settings: The settings of rounds.
        group: Runs collectives; closes with the session.
        transport: Creates the links of flows from the group.
        scaler: The `torch.amp.GradScaler` that steps the optimizer, if one does.
        recorder: Gets spans of time.
        heartbeats: How ranks watch each other; None: the membership never changes.
        island: The ranks that share this replica, None for this one alone. It closes with the
            session.

    Attributes:
        group: Private collectives among the living ranks of this session.
        schedule: The partners of each round while all ranks live.
        replica: The user's model and optimizers.
        settings: The settings of rounds.
        joined_from: For a joiner the rank whose replica it began with, otherwise None.
    """

    call: ClassVar[str] = "gossip"
    """The function that creates such a session, for messages."""
    unknown_scaler_harm: ClassVar[str] = (
        "a step that the scaler skips will leave this rank's partner waiting"
    )
    """The consequence of a scaler that was not passed, for a warning."""
    counts_skipped_steps: ClassVar[bool] = True
    """Whether a step that the scaler skips counts as a step of the session."""

    can_grow: ClassVar[bool] = False
    """Whether the set of trained parameters may grow; otherwise the next step raises then."""

    def __init__(
        self,
        replica: Replica,
        settings: RoundSettings,
        *,
        group: Group,
        transport: Callable[[Group], Transport] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        recorder: Recorder | None = None,
        heartbeats: Heartbeats | None = None,
        joiner: Joiner | None = None,
        island: Island | None = None,
    ) -> None:
        self.group, self.replica, self._island = group, replica, island
        self._gradients: IslandGradients | None = None
        self._island_address = ""
        self.schedule, self.settings = settings.schedule, settings
        self._recorder, self._heartbeats = recorder, heartbeats
        self.joined_from: int | None = None
        self._in_consensus = self._is_closed = False
        self._process = os.getpid()
        self._before_loads: list[Tensor] | None = None  # checksums, if a state was loaded
        self._kept: list[tuple[Tensor, Tensor]] = []  # what consensus() shows, and what it restores
        self._rounds: Rounds | None = None
        self._driver: StepDriver | None = None
        self._hooks: StepHooks | None = None
        self._invitation: Invitation | None = None
        self._at_exit: Any = None
        self._watches: list[RemovableHandle] = []
        membership = None if joiner is None else joiner.membership
        if island is not None and not island.exchanges:
            membership = Membership(generation=0, living=group.members)
        try:
            self._members = Members(
                group,
                settings.schedule,
                heartbeats if island is None or island.exchanges else None,
                membership=membership,
                name="" if joiner is None else joiner.name,
            )
        except BaseException:
            replica.close()
            raise
        try:
            self._watches = [watch_state_dict(replica.model, self._before_state_dict)]
            flows = self._begin_flows()
            if group.world_size > 1 and transport is not None:
                self._connect(flows, transport, joiner)
            self._averaging = Averaging(group, replica.model, self._members, self._rounds, island)
            self._driver = StepDriver(
                replica,
                settings,
                self._members,
                self._rounds,
                self._averaging,
                recorder,
                flows=flows,
                check=replica.check_loaded if self.can_grow else replica.check,
                after_update=self._after_update,
            )
            self._watches += watch_states(
                replica.model, replica.optimizers, self.wait, self._before_load
            )
            self._hooks = StepHooks(
                replica.optimizers,
                scaler,
                self._before_step,
                self._after_step,
                counts_skipped=self.counts_skipped_steps,
                call=self.call,
                harm=self.unknown_scaler_harm,
            )
            if joiner is None:
                self._begin()
            else:
                assert heartbeats is not None
                assert joiner.joining is not None
                assert self._rounds is not None
                self._members.enter(self._rounds, joiner.joining)
                self._run.enter(joiner.position, heartbeats.interval_seconds)
                self.joined_from = joiner.joining.donor
            group.call = f"a step or a collective of {self.call}()"
        except BaseException:
            self._close(wait_seconds=0.0)
            raise

    def _make_flows(self) -> list[Flow]:
        """Create the flows, in the order of the buckets in the channel's plan; for families.

        Called again after `broadcast_()` and `rebuild()`. Flows must not reference the session:
        transfers in flight keep flows alive, and a session that is no longer referenced must end.
        """
        raise NotImplementedError

    def _begin(self) -> None:
        """Called at the start of training, after `broadcast_()` and `rebuild()`; for families."""
        self._run.begin()

    def _after_update(self) -> None:
        """Called after the optimizers stepped, before anything is mixed; for families."""

    def _family_state(self) -> dict[str, Any]:
        """Return a family's part of the state: tensors and plain values."""
        return {}

    def _load_family_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `_family_state`."""

    # -- what a user calls ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank; at least `world_size` for a joiner."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks at the start."""
        return self.group.world_size

    @property
    def membership(self) -> Membership:
        """The living, lost and joined ranks of the generation that this rank trains in."""
        return self._members.current

    @property
    def unreachable(self) -> dict[int, str]:
        """Members whose links ended while the rendezvous store cannot be reached, and why.

        `"left"` for members that closed their sessions. They are still in `membership`.
        """
        return self._members.unreachable()

    @property
    def position(self) -> int:
        """The run's steps; no communication.

        These are this rank's own steps. In mode stale they are those of all rounds, including
        rounds jumped over: a slow rank reaches the others' position in fewer steps. A joiner
        continues at the others' position, and reaches it again after its first step. Use it for
        learning rate schedules and the end of training.
        """
        return self._run.position

    @property
    def flows(self) -> list[Flow]:
        """The flows of the session."""
        return self._run.flows

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Set the model to the exact average of the living replicas inside, and restore it after.

        Entering is a collective, leaving is local. Running statistics (BatchNorm's) are averaged,
        too; other buffers, and parameters that no optimizer trains, stay this rank's own. Training
        is not disturbed:
        deltas in flight count in the average and are mixed later as usual, so a run with
        evaluations equals one without, bit for bit. Ranks may call it after unequal step counts;
        partners that are ahead do not wait.

        Raises:
            GossipError: If a member is lost in the middle (call again), or is gone while the store
                cannot be reached or without heartbeats; or inside another `consensus()`; or if all
                others closed their sessions while this rank waited for them. The model is then
                unchanged.
            ReplicaChangedError: On every rank, if one's optimizer was loaded, or, in families that
                do not allow it, its weights were changed since its last step.
        """
        with self._show_consensus(lambda: True):
            yield

    def consensus_state_dict(self, dst: int = 0) -> dict[str, Any] | None:
        """Return the `state_dict()` of the consensus on one rank, to save it.

        A collective that all ranks call, without any `if`::

            state = session.consensus_state_dict()
            if state is not None:
                torch.save(state, "model.pt")

        Training is not disturbed, as by `consensus()`.

        Args:
            dst: The rank that gets it; if it is no longer a member, the lowest living rank.

        Returns:
            Copies in host memory, of sharded tensors on their device; None on other ranks.

        Raises:
            ValueError: There never was such a rank.
            GossipError, ReplicaChangedError: As `consensus()`.
        """
        of = self.membership
        known = {*range(self.world_size), *of.living, *of.gone}
        if dst not in known:
            raise ValueError(
                f"dst must be a rank of the session, one of {sorted(known)}, got {dst}"
            )

        def gets_it() -> bool:
            living, island = self.membership.living, self._island
            if island is not None and island.is_whole and island.index > 0:
                return False
            return self.rank == (dst if dst in living else living[0])

        with self._show_consensus(gets_it):
            if not gets_it():
                return None
            return {
                name: value.detach().to("cpu", copy=True)
                if isinstance(value, Tensor) and not is_sharded(value)
                else deepcopy(value)
                for name, value in self.replica.model.state_dict().items()
            }

    def average_(self) -> None:
        """Set all living replicas to their exact average, with optimizer state if it is exchanged.

        A collective. Parts in flight are mixed first. Running statistics (BatchNorm's) are
        averaged, too; other buffers stay each rank's own. If the set of trained parameters has
        grown since (unfrozen layers, `add_param_group`), it is read again, and all of it averaged.
        In `gossip()` the next `optimizer.step()` does this by itself, on all ranks.

        Raises:
            GossipError: As `consensus()`; parts in flight may have been mixed.
        """
        self._check_ready("average_")
        self._averaging.enter_collective("average", self._run.pending_change())
        self._averaging.average(self.flows)
        if self.can_grow and self._averaging.is_any(self.replica.set_change() is not None):
            self._adopt()
        self._run.equal_at_step = self._run.steps
        self._run.begin()

    def consensus_distance(self) -> float:
        """Return the root mean square over ranks of the distance of weights to their mean.

        A collective; changes nothing. It costs an average of all weights, and inside `consensus()`,
        where the average is there, a single number: all ranks call it there, or none.

        Raises:
            GossipError: As `consensus()`.
        """
        if self._in_consensus:
            return self._averaging.distance((own, shown) for shown, own in self._kept)
        self._check_ready("consensus_distance")
        self._averaging.enter_collective("distance", self._run.pending_change())
        means = self._averaging.means(self._weights)
        return self._averaging.distance((bucket.total(), mean) for bucket, mean in means)

    def disagreement(self, batch: Tensor) -> float:
        """Return the distance between the living replicas' predictions for one batch.

        The Jensen-Shannon distance of their softmax outputs: the square root of the divergence
        `entropy(mean of p) - mean of entropy(p)` over replicas, in nats, of each row, and the mean
        of these over the rows. 0 for equal predictions, at most `sqrt(log(world_size))`. Replicas
        with distant weights may predict the same; this compares their predictions.

        A collective; changes nothing: the model runs in eval mode without gradients, and the random
        state is restored.

        Args:
            batch: The model's input, the same on every rank, on the model's device. A few hundred
                rows suffice; probabilities of all of them are averaged over the ranks in fp64.

        Returns:
            The same on every rank.

        Raises:
            ValueError: On every rank, if batches differ; or the model does not return logits.
            GossipError: As `consensus()`.

        References:
            Koneputugodage et al., Factored Gossip DiLoCo, arXiv:2606.22768, which monitors replicas
            by this distance. Deviation: theirs may be of pairs; this one is of all ranks.
        """
        self._check_ready("disagreement")
        return measure_disagreement(self.replica, self._averaging, batch)

    def broadcast_(self) -> None:
        """Overwrite every replica with that of rank 0: parameters, buffers and optimizer state.

        A collective, for after `load_state_dict`, re-initialisation or `add_param_group` in the
        middle of a session: the set of trained parameters is read again, and checked to be the same
        on all ranks. Exchanges in flight are cancelled.

        Raises:
            AgreementError: If the ranks now differ in names, shapes or dtypes.
            GossipError: As `consensus()`; replicas may then be partly overwritten, so call it
                again.
        """
        self._check_ready("broadcast_")
        self._before_loads = None
        self._averaging.enter_collective("broadcast")
        with self._averaging.together(), self.replica.accepting():
            flows = self._begin_flows()
            if self._rounds is not None:
                self._rounds.cancel()
            self._run.use(flows)
            self._broadcast()
            self.group.barrier()  # no rank sends by the new plan until all have it
        self.replica.accept()
        if self._invitation is not None:
            self._invitation.publish()
        self._run.equal_at_step = self._run.steps
        self._begin()

    def rebuild(
        self,
        change: Callable[[], object] | None = None,
        *,
        digest: str = "",
        gradient_map: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        """Continue with parameters of other shapes, or with others; a collective.

        The ranks meet, mix what is in flight, call `change`, and create messages of the parameters
        as they then are::

            def narrow():
                with torch.no_grad():
                    model.up.weight.set_(model.up.weight[:64].clone())
                    model.down.weight.set_(model.down.weight[:, :64].clone())

            session.rebuild(narrow)

        It costs the wait for late ranks, as `consensus()`, and a few small collectives; nothing as
        large as the model is sent, except by `sparsify()`. Replicas stay as they are: if `change`
        is linear in the weights, the mean of the replicas is what it makes of their mean. Optimizer
        state is left to `change`. Families begin as in a new session: the outer momentum of
        `local_steps` and the trackers and duals of `suda()` at zero, the plan of `sparsify()` with
        another measurement. If no trained parameter changed, the call only mixes what is in flight.

        A rank that is lost before all have met does not count. If one is lost later, the others
        complete the change. A rank that is late is waited for, as in `consensus()`.

        Args:
            change: Changes model and optimizers of this rank, once. It must not fail. None: they
                were changed before the call; parts in flight of former shapes are then cancelled,
                which may shift the mean over ranks by what one end had mixed.
            digest: Text that identifies the change; the ranks compare it before any makes it.
            gradient_map: Returns what a tensor that is linear in a parameter's gradients becomes,
                given its name: residuals of `sparsify()` follow. None: those of parameters whose
                shapes change are dropped.

        Raises:
            AgreementError: On every rank. The digests differ; nothing is changed then. Or the
                replicas differ in names, shapes or dtypes afterwards.
            GossipError: As `consensus()`.
            ReplicaChangedError: On every rank, if one's optimizer was loaded.
        """
        if self._island is not None:
            raise GossipError(
                "rebuild() in an island is not possible: begin a new session with the new shapes"
            )
        if self._rounds is not None and self.replica.has_other_shapes():
            self._run.drop_hooks()  # parts in flight do not fit any more
            self._rounds.cancel()
        self._check_ready("rebuild")
        averaging, is_made, is_renewed = self._averaging, False, False

        def attempt() -> bool:
            nonlocal is_made, is_renewed
            pending = None if is_made else self._run.pending_change(self.replica.check_loaded)
            averaging.enter_collective("rebuild", pending)
            with averaging.together():
                if len(set(self.group.all_gather_object(digest))) > 1:
                    raise AgreementError(
                        "the ranks pass different changes to rebuild(); nothing was changed. Make "
                        "them from equal numbers on all ranks, such as means over ranks"
                    )
                if not is_made:
                    averaging.drain()
                    if change is not None:
                        change()
                    is_made = True
                differs = self.replica.has_other_shapes() or bool(self.replica.set_change())
                if not averaging.is_any(is_renewed or differs):
                    return False
                self._renew()
                is_renewed = True  # a try that fails at the barrier is no reason to forget it
                self.group.barrier()  # no rank sends by the new plan until all have it
            return True

        # A rank may have made the change already, so no living rank may abandon it. Ranks whose
        # last collective failed continue here as their next one.
        if retried(attempt):
            self._rebuilt(gradient_map)
        else:
            self._run.begin()

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors outside of the replica by their mean over the living ranks, in place.

        A collective, for a family's measurements; all ranks pass as many, of equal shapes.

        Raises:
            GossipError: As `consensus()`; some of the tensors may then be means.
        """
        self._check_ready("mean_")
        self._averaging.mean_(tensors)

    def synchronize(self) -> None:
        """Mix the gradients of this round with the partner's now, so that they can be clipped.

        For payloads with gradients, after the last backward pass of a step; otherwise
        `optimizer.step()` does it. No effect for other payloads.
        """
        self._run.mix_gradients()

    def wait(self) -> None:
        """Mix the exchange of the last step, so that weights can be read directly; local.

        In mode sync the exchange hides behind the next forward pass: each layer is mixed when a
        module is about to read it. Call this before other code reads weights between two steps,
        such as an average of them. The session's own methods call it, and so do `state_dict()` and
        `load_state_dict()` of model and optimizers. Waits for the partner as a step does; no effect
        in other modes.
        """
        self._run.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside; for loops that run with every family.

        Backward passes inside send nothing. Only `sparsify()` does otherwise, and an island whose
        gradients the session averages; the pass after it averages the sum.
        """
        means = self._gradients
        before = means is not None and means.is_off
        if means is not None:
            means.is_off = True
        try:
            yield
        finally:
            if means is not None:
                means.is_off = before

    def agree(self, value: Any) -> list[Any]:
        """Return every living rank's value, in rank order; a collective.

        For agreements before states are saved or loaded, such as the step. Values are numbers,
        text, None, and lists and dicts of these. It waits as `consensus()` does, and for a rank
        that has to retry its last collective.

        Raises:
            GossipError: If a member is lost in the middle (call again), or the ranks call different
                collectives again and again.
        """
        self._check_ready("agree")
        return self._averaging.agree(value)

    def state_dict(self, *, drain: bool = False, copy: bool = True) -> dict[str, Any]:
        """Return this rank's whole state at a round boundary; nothing in flight is saved.

        Call it between two steps, on every rank after equally many steps, and save each rank's
        state under its own name. It holds the model's parameters and buffers, the optimizers'
        state, and the session's own. It does not hold the state of schedulers, scalers, samplers
        and random numbers, nor accumulated gradients.

        In modes overlap and sync it is local. It waits for late parts as in a step, and mixes them;
        parts that are still late are cancelled, with a warning. The open round of overlap is opened
        again when the state is loaded, with the same weights. A round of `every` steps that is not
        complete is mixed now.

        In mode stale it is a collective: parts in flight are mixed on all ranks, as in
        `average_()`. Each rank calls it at its own step, for example when `position` reaches a
        number on which all have agreed.

        Args:
            drain: Make it a collective in any mode, as in mode stale: for ranks that end after
                unequal steps.
            copy: False: the state shares tensors that are in host memory, and is valid until the
                next step begins. For callers that copy it immediately.

        Returns:
            Tensors, numbers, text, lists and dicts in host memory: `"model"` by name;
            `"residuals"`, the rounding errors of narrow weights, by the same names; `"extra"`,
            `"optimizers"` and `"shard"` as of `replica_state`; `"session"`.

        Raises:
            GossipError: In the middle of a step, inside `consensus()`, or if a value is not plain.
                If it is a collective, also as `average_()`.
            ReplicaChangedError: If weights were changed since the last step.
        """
        self._check_ready("state_dict")
        keeper, rounds = self._keeper, self._rounds
        drains = drain or (rounds is not None and rounds.never_waits)
        next_round = keeper.settle(drains=drains)
        members, family = self._members.current, self._family_state()
        state = keeper.state_dict(next_round, members, family, copy=copy)
        if drains:
            self._run.begin()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; a collective.

        Every rank loads its own state, in a session of the same model, optimizers, settings and
        number of ranks. In modes overlap and sync training then continues bit for bit, if nothing
        was late and the states were saved after equally many steps. In mode stale the mean over
        ranks is that of the states.

        Raises:
            ValueError: On every rank, if one's state does not fit; nothing is changed then.
            GossipError: If a rank dies in the middle. The session is then closed; create a new one,
                and load again.
        """
        self._check_ready("load_state_dict")
        self._averaging.enter_collective("load")
        keeper = self._keeper
        problem = keeper.misfit(state, self._members.current.generation)
        if self._island is not None:
            problem = next((why for why in self._island.agree(problem) if why), None)
        next_round = keeper.check_together(self.group, state, problem)
        if self._island is not None:
            next_round = self._island.from_first(next_round)
        try:
            with self._averaging.together():
                keeper.load_state_dict(state, next_round)
                self._load_family_state(state["session"]["family"])
                self._averaging.restart()
                self.group.barrier()  # no rank sends until all have loaded
            self._run.begin()
        except BaseException:
            self._close(wait_seconds=0.0)
            raise

    @property
    def mode(self) -> Mode:
        """The mode: when snapshots are sent and mixed."""
        return self.settings.mode

    @property
    def round_number(self) -> int:
        """Number of past rounds: closed, void or jumped over; 0 without partners.

        States of the same round belong together, even of ranks with unequal step counts.
        """
        if self._rounds is None:
            return 0
        return self._rounds.next_round - self._run.sends_ahead

    def stats(self) -> Stats:
        """Return this rank's counters; no communication."""
        return collect(
            self._rounds,
            self.flows,
            self._averaging,
            self._members,
            world_size=self.world_size,
            steps=self._run.steps - self._run.steps_of_others,
            gradient_bytes=sum(local(p).nbytes for p in self.replica.trained.values()),
        )

    def close(self) -> None:
        """End the session: mix parts in flight, send LEAVE, remove all hooks; local.

        Waits at most ten seconds for parts in flight and ten for queued messages, and for no rank.
        May be called twice. The other ranks continue without this one. In a forked child it leaves
        the session to the parent.
        """
        self._close(wait_seconds=_CLOSE_SECONDS)

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close(wait_seconds=_CLOSE_SECONDS if kind is None else 0.0, error=error)

    # -- joining ----------------------------------------------------------------------------

    def join_address(self) -> str:
        """Return the address for `gg.join`; local except for the store.

        A short text: host and port of the rendezvous store, and the prefix of the run's keys; in a
        run of islands one for each rank of an island. It is the same on every member and valid
        until the run ends. Where the run's secret is in a file (`GOSSIPGRAD_SECRET_FILE`), a joiner
        needs that, too.

        Raises:
            ValueError: This run cannot be joined; the message says what to change.
            GossipError: The session is closed, or the store does not answer.
        """
        if self._is_closed:
            raise GossipError("the session is closed: only a running session can be joined")
        if self._invitation is None:
            raise ValueError(
                "none can join this run: it began with one rank, without links: begin with two"
            )
        return self._island_address or self._invitation.address()

    def _send_replica(self, joiners: Sequence[int]) -> None:
        """Send this rank's replica to joiners, between two steps."""
        if self._invitation is not None and self._rounds is not None and self._driver is not None:
            position = self._driver.position_to_join()
            is_first = self._island is None or self._island.index == 0
            self._invitation.send_replica(joiners, position, is_first=is_first)

    def _before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        if self._in_consensus:
            raise GossipError("optimizer.step() inside consensus(): the weights are shared ones")
        self._warn_of_load()
        if self.can_grow and not self._run.is_mid_step:
            self.replica.adopt(self.average_)
        rounds, island = self._rounds, self._island
        if rounds is not None and island is not None and rounds.repeats is None:
            rounds.repeats = RepeatedShards(island, self.flows)
        if self._gradients is not None and not self._run.is_mid_step:
            if torch._C._current_graph_task_id() != -1:
                raise GossipError(
                    "an optimizer steps inside the backward pass, before the gradients of the "
                    "island are averaged: step after backward(), or let "
                    "DistributedDataParallel over the island average them"
                )
            self._gradients.before_step()
        return self._run.before_step(closure)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._run.after_step(optimizer)

    def _renew(self) -> None:
        """Create the flows of the parameters as they are now; all ranks have met."""
        with self.replica.accepting():
            self._run.use(self._begin_flows())

    def _rebuilt(self, gradient_map: Callable[[str, Tensor], Tensor] | None) -> None:
        """Begin with the parameters of `rebuild()`; for families."""
        self.replica.accept()
        self.replica.version += 1
        if self._invitation is not None:
            self._invitation.publish()
        self._begin()

    def _adopt(self) -> None:
        """Continue with the parameters that are trained now; all ranks have met."""
        with self._averaging.together(), self.replica.accepting():
            self._run.use(self._begin_flows())
            self._averaging.average(self.flows)
        self.replica.accept()
        if self._invitation is not None:
            self._invitation.publish()

    @contextmanager
    @torch.inference_mode(False)
    @torch.no_grad()
    def _show_consensus(self, shows: Callable[[], bool]) -> Iterator[None]:
        """See `consensus()`; asks, when all have met, whether this rank `shows` the average."""
        self._check_ready("consensus")
        self._averaging.enter_collective("consensus", self._run.pending_change())
        kept: list[tuple[Tensor, Tensor]] = []
        is_shown = shows()
        with self._averaging.mean_statistics():
            try:
                buckets = [bucket for flow in self._weights for bucket in flow.buckets]
                memory = memory_of(buckets if is_shown else [])
                for number, (bucket, mean) in enumerate(self._averaging.means(self._weights)):
                    if is_shown:
                        bucket.show(mean, memory[number], kept)
                if self._rounds is not None and self._rounds.repeats is not None and is_shown:
                    self._rounds.repeats.level(is_shown=True)
                self._in_consensus, self._kept = True, kept
                yield
            finally:
                self._in_consensus, self._kept = False, []
                self.replica.reshard()
                with torch.no_grad():
                    for tensor, own in kept:
                        tensor.copy_(own)

    # -- its parts --------------------------------------------------------------------------

    @property
    def _run(self) -> StepDriver:
        assert self._driver is not None
        return self._driver

    @property
    def _weights(self) -> list[Flow]:
        return [flow for flow in self.flows if flow.in_consensus]

    @property
    def _keeper(self) -> StateKeeper:
        of = self.rank, self.world_size, self.settings, self.replica
        return StateKeeper(*of, self._rounds, self._averaging, self._run)

    def _describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        return {**self.settings.describe(), "heartbeats": self._heartbeats}

    def _begin_flows(self) -> list[Flow]:
        """Create the flows, and check that they are the same on all ranks; a collective."""
        replica = self.replica
        replica.reshard()
        flows = self._make_flows()
        if self._island is not None:
            self._island.use(flows)
            if self._rounds is not None:
                self._rounds.repeats = None
            if not self._island.is_whole and self._island.slices < self._island.size:
                raise ValueError(
                    "the replica is sharded, and each rank of an island exchanges its own shards: "
                    "islands then have equal sizes"
                )
            if self._island.is_whole:
                agree_on(self._island.group, replica.model, replica.optimizers, self._describe())
            self._average_gradients(self._island)
        if self.world_size > 1:
            parts = [part for flow in flows for part in flow.parts]
            wanted = {**self._describe(), "messages": digest([str(part) for part in parts])}
            agree_on(self.group, replica.model, replica.optimizers, wanted)
        return flows

    def _connect(
        self,
        flows: Sequence[Flow],
        transport: Callable[[Group], Transport],
        joiner: Joiner | None,
    ) -> None:
        """Create the links to the others and, unless this rank is a joiner, equal replicas."""
        replica, members, of = self.replica, self._members, self.settings
        run, generation, living = b"", 0, None
        if joiner is None:
            run = bytes.fromhex(self.group.broadcast_object(secrets.token_hex(16)))
        else:
            run, now = joiner.run, joiner.membership
            generation, living = now.generation, now.living
        if self._island is not None and not self._island.exchanges:
            living = self.group.members
            links: Transport = Hub(self.world_size).transport(self.rank)
        else:
            links = transport(self.group)
        channel = Channel(
            links,
            run=run,
            plan=[part for flow in flows for part in flow.parts],
            window=of.window,
            generation=generation,
            liveness=members.liveness,
            peers=living,
        )
        recorder, island = self._recorder, self._island
        self._rounds = rounds = Rounds(
            channel, of.schedule, of.mode, recorder=recorder, island=island
        )
        # At interpreter exit a session that was not closed still sends LEAVE.
        self._at_exit = members.close_at_exit(self, rounds)
        members.attach(rounds)
        self._invitation = Invitation(
            self.group,
            members.name,
            rounds,
            replica,
            lambda: fingerprint(replica.model, replica.optimizers, self._describe()),
            refusal=why_not_join(replica, self.schedule, flows, self._heartbeats),
        )
        members.replica_sender = WeakMethod(self._send_replica)
        if self._island is not None:
            can_join = self._invitation.refusal is None
            found = self._island.agree(self._invitation.address() if can_join else "")
            self._island_address = ",".join(filter(None, found))
        if joiner is None:
            # Heartbeats first:
            #  1. a large model takes longer than a lease on a slow network;
            #  2. without heartbeats all leases are then old when round 0 is sent;
            #  3. so each rank voids it.
            members.start()
            self._broadcast()
            members.confirm()
            self._invitation.publish()
        else:
            state = joiner.receive(rounds, members)
            if self._island is not None:  # its first rank alone received a replica
                state = broadcast_values(self._island.group, state)
                joiner.position = self._island.agree(joiner.position)[0]
            if (why := misfit(replica.model, replica.optimizers, state)) is not None:
                raise ValueError(f"the replica that was sent does not fit: {why}")
            load_replica(replica.model, replica.optimizers, state)

    def _broadcast(self) -> None:
        """Make all replicas that of rank 0; a collective."""
        of = self.replica.model, self.replica.optimizers
        island = self._island if self._island is not None and self._island.is_whole else None
        if self._rounds is not None and (island is None or island.index == 0):
            broadcast_replica(self.group, *of)
        if island is not None:
            broadcast_replica(island.group, *of)

    def _average_gradients(self, island: Island) -> None:
        """Let backward passes average the gradients of an island, unless torch does."""
        if self._gradients is not None:
            self._gradients.remove()
        self._gradients = None
        if not is_averaged(self.replica.model, island.process_group):
            self._gradients = IslandGradients(
                [*self.replica.trained.values()], island.process_group
            )

    def _before_state_dict(self) -> bool:
        """Mix parts in flight; return whether to warn that replicas differ."""
        rounds, run = self._rounds, self._driver
        if rounds is None or run is None or self._in_consensus or self._is_closed:
            return False
        run.wait()
        return self._members.has_partners() and run.steps > run.equal_at_step

    def _before_load(self) -> None:
        """Mix parts in flight, and note the weights as they were before a state is loaded."""
        if not self._is_closed and not self._in_consensus:
            self._run.wait()
            is_amid = self._rounds is not None and self._run.steps > 0
            if is_amid and self._before_loads is None:
                self._before_loads = self.replica.checksums()

    def _warn_of_load(self) -> None:
        """Warn of loaded weights; not of an average that was swapped in and out again."""
        before, self._before_loads = self._before_loads, None
        if before is not None:
            now = self.replica.checksums()
            if not all(torch.equal(*each) for each in zip(before, now, strict=True)):
                warn_of_load()
                for flow in self._weights:
                    flow.clear_residuals()

    def _check_ready(self, method: str) -> None:
        if self._is_closed:
            raise GossipError(f"the session is closed: call {self.call}() for a new one")
        check_not_in_handler(method)
        if self._in_consensus:
            raise GossipError(
                f"{method}() inside consensus(): the model is the average already, and goes back "
                "to this rank's replica on exit. Call it after the block"
            )
        if method in ("consensus", "average_"):
            self._warn_of_load()
        self.replica.reshard()
        self._run.wait()

    # -- its end ----------------------------------------------------------------------------

    def _close(self, wait_seconds: float, error: BaseException | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._hooks is not None:
            self._hooks.remove()
        if self._gradients is not None:
            self._gradients.remove()
        for watch in self._watches:
            watch.remove()
        self.replica.close()
        if self._driver is not None:
            self._driver.drop_hooks()
        if os.getpid() != self._process:
            # A forked child: links and group are its parent's, and another thread may have held
            # their locks as it was forked.
            if self._at_exit is not None:
                self._at_exit.detach()
            return
        if self._members.given_up:
            wait_seconds = 0.0  # the others have also cancelled exchanges in flight
        try:
            if self._at_exit is not None:
                self._at_exit.detach()
            if self._rounds is not None:
                self._rounds.stop(wait_seconds, wait_seconds or 2.0)
        finally:
            if self._island is not None:
                self._island.close()
            self._members.end(error)
            self.group.close()
