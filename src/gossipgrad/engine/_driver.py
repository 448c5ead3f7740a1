"""The exchanges around each optimizer step: gradients before it, rounds after it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from gossipgrad.comm import Outcome, Recorder
from gossipgrad.engine._arrival import Arriving
from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._flow import Flow, Phase
from gossipgrad.engine._forward_hooks import ForwardHooks
from gossipgrad.engine._members import Members
from gossipgrad.engine._modes import Sync
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._rounds import Rounds
from gossipgrad.engine._settings import RoundSettings
from gossipgrad.engine._step_hooks import Closure
from gossipgrad.errors import GossipError, ReplicaChangedError

__all__ = ["StepDriver"]

_ENTER_SECONDS = 2.0  # how long a joiner waits for the others' rounds


class StepDriver:
    """Exchanges the flows of a session with the partners, step by step.

    A step that ends a round runs in this order: mix gradients, step the optimizers, the family's
    own part, mix flows `ACROSS` and send the next snapshot, or send flows `AFTER_UPDATE`, then the
    periodic average if it is due. Buckets sent after the update are mixed as the next forward pass
    reads them, and the rest before the next step, or in `wait()`. Then `Sync(overlap=True)` sends
    the weights as they were read:

    1. The forward pass reads its last bucket, w = w + D. The session sends w to the next partner.
    2. Backward computes the gradient of w. The partner's part arrives.
    3. The optimizers step, and this part is mixed. The next exchange sends the result.

    If `wait()` ends the exchange earlier, w is sent then: it is the same.
    """

    def __init__(
        self,
        replica: Replica,
        settings: RoundSettings,
        members: Members,
        rounds: Rounds | None,
        averaging: Averaging,
        recorder: Recorder | None,
        *,
        flows: Sequence[Flow],
        check: Callable[[], None],
        after_update: Callable[[], None],
    ) -> None:
        self.steps = 0  # of the run: this rank's own, and the others' before it joined
        self.steps_of_others = 0  # those that others made before it joined
        self.equal_at_step = 0  # when all replicas were last made equal
        self.is_mid_step = False  # some but not all optimizers have stepped
        self.flows = list(flows)
        self._replica = replica
        self._settings, self._members = settings, members
        self._rounds, self._averaging, self._recorder = rounds, averaging, recorder
        self._after_update = after_update
        self.check = check  # raises `ReplicaChangedError` for changes that a family does not allow
        self._has_mixed_gradients = False  # of this step
        self._forward: ForwardHooks | None = None
        self._read: list[tuple[Flow, int]] = []  # buckets of weights, by hook number
        self._awaits_forward = self._is_read_unmixed = False
        self._is_behind_backward = False  # the last exchange of a step, of mode sync
        self._is_ending = False  # a step that is counted, and has not opened its rounds
        self._arriving: Arriving | None = None
        self._ends_after = -1  # the backward pass at whose end a step ends

    @property
    def position(self) -> int:
        """The run's steps; see `Session.position`."""
        if self._rounds is None:
            return self.steps
        return self._rounds.position(self.steps, self._settings.every)

    @property
    def sends_ahead(self) -> bool:
        """Whether the open round is of the step to come, and not of the last one."""
        return bool(self.in_phase(Phase.ACROSS)) or self._is_behind_backward

    def position_to_join(self) -> dict[str, int]:
        """Return the first round that the end of a step opens, and the steps before that step.

        1. The donor's step 8 ends. It is counted, and its rounds are not open yet.
        2. The donor notices the joiner, and answers with the round that it opens next.
        3. If it said 8 steps, the joiner would end that round with its step 9, and be one step
           ahead of all others for the rest of the run.

        The round that backward hides is open before the end of a step, and not the first.
        """
        assert self._rounds is not None
        steps = self.steps - self._is_ending
        is_before_backward = self._overlaps and not self._is_behind_backward
        return {
            "round": self._rounds.next_round + is_before_backward,
            "steps": steps - steps % self._settings.every,
            "starts": self._rounds.starts,
        }

    @property
    def is_boundary(self) -> bool:
        """Whether the next step starts a round."""
        return self.steps % self._settings.every == 0

    @property
    def _ends_round(self) -> bool:
        """Whether the current step is the last of its round."""
        return (self.steps + 1) % self._settings.every == 0

    @property
    def _overlaps(self) -> bool:
        """Whether backward hides the last exchange of a step in mode sync."""
        mode = self._settings.mode
        return isinstance(mode, Sync) and mode.overlap

    def in_phase(self, phase: Phase) -> list[Flow]:
        """Return the flows of a phase."""
        return [flow for flow in self.flows if flow.phase is phase]

    def use(self, flows: Sequence[Flow]) -> None:
        """Continue with other flows; on all ranks, with nothing in flight."""
        self.drop_hooks()
        self.flows = list(flows)
        if self._rounds is not None:
            self._rounds.channel.replan([part for flow in flows for part in flow.parts])

    def drop_hooks(self) -> None:
        """Remove hooks on passes until `begin`."""
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        self._awaits_forward = self._is_behind_backward = False

    def begin(self, *, sends: bool = True) -> None:
        """Send the first snapshot, or arm the gradients, at the beginning of a round."""
        rounds = self._rounds
        if rounds is None:
            return
        # The ranks of an island gather in one order, and not as their modules read.
        after = self.in_phase(Phase.AFTER_UPDATE) if rounds.island is None else []
        if self._forward is None and (flows := after):
            self._hook_forward(flows)
        rounds.begin_step()
        if sends and self._overlaps and self._arriving is None:
            self._send_behind_backward(rounds)
        if sends and self.in_phase(Phase.ACROSS):
            if self._arriving is not None:
                steps = self._arriving.collective(rounds, self._members.current.living)
                self._go_to(self.steps if steps is None else steps)
            if self.is_boundary:
                rounds.start(self._across(rounds.next_round))

    def enter(self, position: Mapping[str, int], interval_seconds: float) -> None:
        """Move a joiner from the donor's position to that of the others."""
        assert self._rounds is not None
        self._arriving = Arriving(position, self._settings.every, self._settings.exchanges)
        wait_seconds = _ENTER_SECONDS * interval_seconds
        self.steps = self.steps_of_others = self._arriving.begin(self._rounds, wait_seconds)
        self.begin(sends=False)

    def before_step(self, closure: Closure | None) -> Closure | None:
        """Mix gradients before each optimizer's step; return the closure for it."""
        if closure is not None and self.in_phase(Phase.BEFORE_UPDATE):
            raise GossipError(
                "optimizer.step(closure) computes gradients after they should have been exchanged: "
                "with gradients in the payload call backward() and then step(), or "
                'send payload="weights"'
            )
        if self._rounds is None:
            return closure
        if not self.is_mid_step:
            self._begin_step(in_backward=torch._C._current_graph_task_id() != -1)
        self.mix_gradients()
        self.is_mid_step = True
        return closure

    def after_step(self, optimizer: Optimizer) -> None:
        """End the step if this optimizer is the last, and the round if the step is its last."""
        if optimizer is not self._replica.optimizers[-1]:
            return
        backward = torch._C._current_graph_task_id()
        if backward == -1 or len(self._replica.optimizers) == 1:
            self._end_step()
        elif backward != self._ends_after:
            # The step of an optimizer that is fused into backward: others may follow in this pass,
            # which still reads weights. So the step ends with the pass.
            self._ends_after = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

    def _end_step(self) -> None:
        self.is_mid_step = False
        self.steps += 1
        self._has_mixed_gradients = False
        self._after_update()
        if self._rounds is not None:
            self._is_ending = True
            try:
                self.wait()
                self._follow(self._rounds)
                self._end_round(self._rounds)
            finally:
                self._is_ending = False
                self._rounds.begin_step()

    def wait(self) -> None:
        """Mix buckets sent after the last update that no forward pass has read yet."""
        if self._awaits_forward and self._rounds is not None:
            self._awaits_forward = False
            if self._forward is not None:
                self._forward.awaited.clear()
            self._rounds.close()
            if self._overlaps:
                self._send_behind_backward(self._rounds)

    def mix_gradients(self) -> None:
        """Exchange the gradients of a round that ends with this step, and mix them; once."""
        rounds, flows = self._rounds, self.in_phase(Phase.BEFORE_UPDATE)
        if rounds is None or not flows or self._has_mixed_gradients or not self._ends_round:
            return
        self._has_mixed_gradients = True
        transfers = rounds.begin(flows)
        try:
            for transfer in transfers:
                transfer.post_all()
            for transfer in transfers:
                for bucket in sorted(transfer.exchanges):
                    if rounds.receive(transfer, bucket) is Outcome.LATE:
                        rounds.outcomes[Outcome.LATE] += 1
                    rounds.mix(transfer, bucket, transfer.delta(bucket))
        finally:  # a gradient that arrives after its step is useless
            for transfer in transfers:
                transfer.cancel()
        rounds.equalize()

    def pending_change(self, check: Callable[[], None] | None = None) -> str | None:
        """Return the error message if the replica was changed since the last step, by `check`."""
        if self._rounds is None:
            return None
        if self.is_mid_step:
            return (
                "not all optimizers have stepped, and the step ends when the last of the list has. "
                "Call this then, or pass as the last of the list the optimizer that steps last "
                "before it; for a GAN, one session for each model is simplest"
            )
        try:
            (check or self.check)()
        except ReplicaChangedError as error:
            return str(error)
        return None

    def _begin_step(self, *, in_backward: bool) -> None:
        """Check the replica, and mix buckets that the forward pass has not read.

        If weights were read before a late part of them arrived, `in_backward` mixes none: backward
        computes with the values that were read. The round is then sent after the optimizers step.
        """
        self.check()
        has_late = self._rounds is not None and self._rounds.has_late
        by_hand = self._forward is not None and self._forward.are_read_by_hand
        waits = not (in_backward and (self._is_read_unmixed or has_late or by_hand))
        if self._forward is not None:
            self._forward.end_step(has_gradients=not in_backward)
        if waits:
            self.wait()

    def _across(self, round: int) -> list[Flow]:
        return [flow for flow in self.in_phase(Phase.ACROSS) if flow.is_due(round)]

    def _end_round(self, rounds: Rounds) -> None:
        of, steps = self._settings, self.steps
        averages = of.average_every is not None and steps % of.average_every == 0
        across, after = self.in_phase(Phase.ACROSS), self.in_phase(Phase.AFTER_UPDATE)
        closes = self.is_boundary
        if isinstance(of.mode, Sync) and of.mode.momentum:
            rounds.correct(after, of.mode.momentum)
        if self._is_behind_backward:
            self._is_behind_backward = False
            rounds.close()
        if closes and across and not averages:
            rounds.advance(self._across)
            return
        if closes:
            if after:
                for _ in range(of.exchanges - 1 - self._overlaps):
                    rounds.open([flow for flow in after if flow.is_due(rounds.next_round)])
                    rounds.close()
                rounds.open([flow for flow in after if flow.is_due(rounds.next_round)])
                if self._can_hide(rounds) and not averages:
                    self._await_forward()
                    return
            elif not across and self.in_phase(Phase.BEFORE_UPDATE):
                rounds.next_round += 1  # gradients had separate transfers
            rounds.close()
        self._is_ending = bool(across)  # flows `ACROSS` are sent after the average
        if averages and self._averaging.periodically(self.flows, steps, self._recorder):
            self.equal_at_step = steps
        if closes and across:
            rounds.start(self._across(rounds.next_round))
        if closes and self._overlaps:
            self._send_behind_backward(rounds)

    def _send_behind_backward(self, rounds: Rounds) -> None:
        """Send the weights with which the gradient is computed, to mix after the update."""
        after = self.in_phase(Phase.AFTER_UPDATE)
        rounds.open([flow for flow in after if flow.is_due(rounds.next_round)])
        self._is_behind_backward = True

    def _hook_forward(self, flows: Sequence[Flow]) -> None:
        weights = [flow for flow in flows if flow.in_consensus]
        self._read = [(flow, bucket) for flow in weights for bucket in range(len(flow.buckets))]
        parameters = [[e.parameter for e in f.buckets[bucket].entries] for f, bucket in self._read]
        self._forward = ForwardHooks(self._replica.model, parameters, self._before_read)

    def _can_hide(self, rounds: Rounds) -> bool:
        return self._forward is not None and self._forward.is_ready and not rounds.has_late

    def _await_forward(self) -> None:
        """Leave the round open until the next forward pass reads its buckets."""
        assert self._forward is not None
        self._awaits_forward, self._is_read_unmixed = True, False
        self._forward.expect()

    def _before_read(self, number: int) -> None:
        rounds, (flow, bucket) = self._rounds, self._read[number]
        assert rounds is not None
        self._is_read_unmixed |= not rounds.mix_early(flow, bucket)
        assert self._forward is not None
        is_whole = not (self._is_read_unmixed or self._forward.are_read_by_hand)
        if self._overlaps and is_whole and not self._forward.awaited:
            self.wait()

    def _follow(self, rounds: Rounds) -> None:
        """Enter the newest generation, and the others' round if this rank is joining."""
        self._members.follow_latest(rounds)
        if self._arriving is None:
            return
        self._go_to(self._arriving.step(rounds, self.steps, self._members.current.living))
        if self._arriving.is_over(rounds):
            self._arriving = None

    def _go_to(self, steps: int) -> None:
        """Jump to the others' step count."""
        self.steps_of_others += steps - self.steps
        self.steps = steps
