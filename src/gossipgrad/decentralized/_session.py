"""A gossip session: hangs on the user's model and optimizers, and comes off again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import Group, Heartbeats, Recorder, Transport, agree_on, broadcast_replica
from gossipgrad.decentralized._after_step import after_step
from gossipgrad.decentralized._arrival import Arrival
from gossipgrad.decentralized._averaging import Averaging
from gossipgrad.decentralized._belonging import Belonging
from gossipgrad.decentralized._gradients import GradientExchange
from gossipgrad.decentralized._hooks import StepHooks
from gossipgrad.decentralized._making import check_growth, make_rounds
from gossipgrad.decentralized._members import Members
from gossipgrad.decentralized._resumable import Resumable
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._saving import warn_of_lone_replicas
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._session_state import Carried
from gossipgrad.decentralized._settings import Settings
from gossipgrad.decentralized._sharding import reshard
from gossipgrad.decentralized._stats import Stats, collect
from gossipgrad.decentralized._watch import ReplicaWatch
from gossipgrad.errors import GossipError, ReplicaChangedError

__all__ = ["GossipSession"]

_CLOSE_SECONDS = 10.0  # how long a normal close waits for what is outstanding
_LINGER_SECONDS = 30.0  # and then for what it has sent to leave, on a slow network


class GossipSession(Belonging, Resumable):
    """What `gossip()` and `join()` return: mixes replicas behind the user's own training loop.

    Use it as a context manager or call `close()`. Leaving the context by an exception closes
    without waiting for anyone.

    Attributes:
        group: Private collectives among the living ranks of this session.
        schedule: Who meets whom in which round, while all ranks live.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        *,
        group: Group,
        transport: Callable[[Group, int], Transport],
        scaler: torch.amp.GradScaler | None,
        recorder: Recorder | None,
        heartbeats: Heartbeats | None = None,
        arrival: Arrival | None = None,
    ) -> None:
        self.group = group
        self.schedule = settings.schedule
        self._model = model
        self._optimizers = list(optimizers)
        self._settings = settings
        self._recorder = recorder
        self._heartbeats = heartbeats
        self._steps = 0
        self._equal_at_step = 0
        self._mid_step = False
        self._syncing = True
        self._in_consensus = False
        self._closed = False
        self._carried = Carried()
        self._rounds: Rounds | None = None
        self._gradients: GradientExchange | None = None
        self._sections = self._deal()
        self._watch = ReplicaWatch(model, self._optimizers)
        self._saving = warn_of_lone_replicas(model, self._replicas_differ)
        self._members = Members(group, settings.schedule, heartbeats, arrival)
        self._hooks = StepHooks(self._optimizers, scaler, self._before_step, self._after_step)
        self._hooks.closures = not self._sections.gradients
        try:
            if group.world_size > 1:
                self._meet(transport, arrival)
            joins = arrival is not None
            self._averaging = Averaging(group, self._members, self._rounds, joins=joins)
            self._begin() if arrival is None else self._enter(arrival)
        except BaseException:
            self._close(wait_seconds=0.0)
            raise

    @property
    def rank(self) -> int:
        """This rank; at least `world_size` if it has joined."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks took part at the start."""
        return self.group.world_size

    @property
    def position(self) -> int:
        """Steps that the run has come to; no communication.

        This rank's own, but in mode stale those of all rounds, jumped over or not: a slow rank is
        where the others are, in fewer steps. One that has joined goes on where the others are, and
        is there again after its first step. Let learning rates and ends of training go by it.
        """
        steps, every = self._steps, self._settings.every
        return steps if self._rounds is None else self._rounds.position(steps, every)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the exact average of the living replicas; outside, as it was.

        A collective to enter, local to leave. Floating buffers (BatchNorm's statistics) are
        averaged too; parameters that no optimizer trains stay as they are. Training is not
        disturbed: what is outstanding counts in the average and is mixed in when its time comes,
        so a run with evaluations equals one without, bit for bit. Ranks may come with unequal step
        counts; partners that are ahead do not wait.

        Raises:
            GossipError: If a member is lost meanwhile (call again), or has gone and the membership
                is frozen or has no heartbeats; or inside another. The model is unchanged then.
            ReplicaChangedError: On every rank, if one's weights were changed since its last step.
        """
        self._check_ready("consensus")
        self._averaging.meet("consensus", self._pending_change())
        means = self._averaging.consensus(self._sections.weights)
        kept: list[tuple[Tensor, Tensor]] = []
        with self._averaging.mean_buffers(self._model):
            try:
                for section, flats in zip(self._sections.weights, means, strict=True):
                    section.show(flats, kept)
                self._in_consensus = True
                yield
            finally:
                self._in_consensus = False
                reshard(self._model)
                with torch.no_grad():
                    for tensor, own in kept:
                        tensor.copy_(own)
                self._watch.note()

    def average_(self) -> None:
        """Makes the living replicas the exact average, optimizer state too if in the payload.

        A collective. What is outstanding is mixed first.

        Raises:
            GossipError: As `consensus()`; what was outstanding may be mixed then.
        """
        self._check_ready("average_")
        self._averaging.meet("average", self._pending_change())
        try:
            self._averaging.average(self._sections)
        finally:
            self._watch.note()
        self._equal_at_step = self._steps
        self._begin()

    def consensus_distance(self) -> float:
        """Root mean square over ranks of the distance between weights and their mean, now.

        A collective; changes nothing.

        Raises:
            GossipError: As `consensus()`.
        """
        self._check_ready("consensus_distance")
        self._averaging.meet("distance", self._pending_change())
        self._averaging.consensus(self._sections.weights)
        assert self._averaging.last_distance is not None
        return self._averaging.last_distance

    def broadcast_(self) -> None:
        """Makes every replica that of rank 0 again: parameters, buffers and optimizer state.

        A collective, for after `load_state_dict`, re-initialisation or `add_param_group` in the
        middle of a session: the set of trained parameters is taken anew, and checked to be the
        same on all ranks. What was outstanding is given up.

        Raises:
            AgreementError: If the ranks now differ in names, shapes or dtypes.
            GossipError: As `consensus()`; replicas may be half broadcast then, so call it again. Or
                a single row of a new parameter is larger than the links of this session foresee.
        """
        self._check_ready("broadcast_")
        self._averaging.meet("broadcast")
        with self._averaging.together():
            sections = self._deal()
            if self._gradients is not None:
                self._gradients.remove()
                self._gradients = None
            if self._rounds is not None:
                self._rounds.cancel()
            self._sections = sections
            if self._rounds is not None:
                self._rounds.channel.replan(self._sections.parts)
                broadcast_replica(self.group, self._model, self._optimizers)
                self.group.barrier()  # nobody sends by the new plan before all have it
        self._watch.accept()
        self._publish()
        self._equal_at_step = self._steps
        self._begin()

    def accept_changes(self) -> None:
        """Says that weights of this rank were written on purpose and goes on from there; local.

        The change is mixed into the others like any update.

        Raises:
            ReplicaChangedError: If the set of trained parameters has changed, or the optimizer was
                loaded: only `broadcast_()` can take that in.
        """
        self._watch.check_set()
        touched = set(self._watch.touched())
        for section in self._sections.weights:
            section.clear_residuals(touched)
        self._watch.note()

    def synchronize(self) -> None:
        """Mixes the gradients of this round with the partner's now, so that they can be clipped.

        For payloads with gradients: `optimizer.step()` does it otherwise. Nothing to do for others.

        Raises:
            GossipError: If a gradient was written after it was sent.
        """
        if self._gradients is not None and (self._steps + 1) % self._settings.every == 0:
            self._gradients.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside are not sent; for gradient accumulation.

        Only payloads with gradients need it: weights travel at `optimizer.step()`.
        """
        before, self._syncing = self._syncing, False
        self._arm()
        try:
            yield
        finally:
            self._syncing = before
            self._arm()

    def stats(self) -> Stats:
        """What this rank has done so far; no communication."""
        steps, carried = self._steps - self._steps_of_others, self._carried
        of = self._rounds, self._sections, self._averaging, carried, self._members
        return collect(*of, self.world_size, steps)

    def close(self) -> None:
        """Ends the session: mixes what is outstanding, says LEAVE, takes all hooks off; local.

        Waits for outstanding parts at most a few seconds; ranks that train on skip this one.
        """
        self._close(wait_seconds=_CLOSE_SECONDS)

    def __enter__(self) -> "GossipSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(wait_seconds=_CLOSE_SECONDS if kind is None else 0.0, error=error)

    def _meet(self, transport: Callable[[Group, int], Transport], arrival: Arrival | None) -> None:
        """Makes the links to the others and, unless this rank joins them, equal replicas."""
        of, news, recorder = self._settings, self._members.watch, self._recorder
        rounds = make_rounds(self.group, transport, self._sections, of, recorder, news, arrival)
        # At interpreter exit a session that nobody closed still says LEAVE.
        self._farewell = self._members.close_at_exit(self, rounds)
        self._rounds = rounds
        self._members.seat(rounds)
        self._begin_giving()
        if arrival is None:
            broadcast_replica(self.group, self._model, self._optimizers)
            self._members.start()

    def _deal(self) -> Sections:
        """Deals what travels into sections and checks that all ranks do the same; a collective."""
        reshard(self._model)
        sections = Sections(self._model, self._optimizers, self._settings)
        if self.world_size > 1:
            settings = {**self._settings.describe(), "heartbeats": self._heartbeats}
            agree_on(self.group, self._model, self._optimizers, settings)
        if self._rounds is not None:
            check_growth(self._rounds, sections)
        return sections

    def _begin(self, *, sends: bool = True) -> None:
        """Sends the first snapshot, or arms the gradients, at the beginning of a round."""
        rounds = self._rounds
        if rounds is None:
            return
        if self._sections.gradients and self._gradients is None:
            self._gradients = GradientExchange(self._sections.gradients, rounds, self)
        rounds.patience.renew()
        if sends and self._settings.sends_early:
            self._arrive_together(rounds)
            if self._steps % self._settings.every == 0:
                rounds.open(self._sections.of_round(rounds.next_round))
        self._arm()
        self._watch.note()

    def _arm(self) -> None:
        if self._gradients is not None:
            closes = (self._steps + 1) % self._settings.every == 0
            self._gradients.enabled = self._syncing and closes

    def _before_step(self) -> None:
        if self._in_consensus:
            raise GossipError("optimizer.step() inside consensus(): the weights are shared ones")
        if self._rounds is None:
            return
        if not self._mid_step:
            self._watch.check(self._is_as_sent)
            self._poll_donor()
        self.synchronize()
        self._mid_step = True

    def _is_as_sent(self) -> bool:
        """Whether the weights, though written, are still those of the open round's snapshot."""
        assert self._rounds is not None
        if self._steps % self._settings.every != 0 or not self._settings.sends_whole:
            return False
        sent = {transfer.section: transfer for transfer in self._rounds.under_way}
        return all(s in sent and sent[s].holds_live() for s in self._sections.weights)

    def _after_step(self) -> None:
        self._mid_step = False
        self._steps += 1
        if self._gradients is not None:
            self._gradients.step_is_over()
        if self._rounds is not None:
            try:
                self._gossip(self._rounds)
            finally:  # also when Ctrl-C ends it: what was mixed so far is ours
                self._arm()
                self._watch.note()

    def _gossip(self, rounds: Rounds) -> None:
        self._take_up(rounds)
        of, steps, recorder = self._settings, self._steps, self._recorder
        if after_step(rounds, self._sections, self._averaging, of, steps=steps, recorder=recorder):
            self._equal_at_step = steps

    def _replicas_differ(self) -> bool:
        """Whether this replica is known to be one of several, and there is another way to save."""
        if self._rounds is None or self._in_consensus or not self._members.meet(self._rounds):
            return False
        return self._steps > self._equal_at_step

    def _check_ready(self, method: str) -> None:
        if self._closed:
            raise GossipError("the session is closed: call gossip() for a new one")
        if self._in_consensus:
            raise GossipError(
                f"{method}() inside consensus(): the model is the average already, and goes back "
                "to this rank's replica on exit. Call it after the block"
            )
        reshard(self._model)

    def _pending_change(self) -> str | None:
        """What is wrong with the replica, if it was changed since the last step."""
        if self._rounds is None:
            return None
        try:
            self._watch.check(self._is_as_sent)
        except ReplicaChangedError as error:
            return str(error)
        return None

    def _close(self, wait_seconds: float, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._hooks.remove()
        self._saving.remove()
        self._watch.remove()
        if self._gradients is not None:
            self._gradients.remove()
        if self._members.given_up:
            wait_seconds = 0.0  # the others have given up what is outstanding, too
        try:
            if self._rounds is not None:
                self._farewell.detach()
                self._rounds.stop(wait_seconds, _LINGER_SECONDS if wait_seconds > 0 else 2.0)
        finally:
            self._members.end(error)
            self.group.close()
