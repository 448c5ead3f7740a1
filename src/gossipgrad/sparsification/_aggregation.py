"""A round: aggregate the sparsified gradients of all ranks during backward."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from gossipgrad.comm import Clock, Group, Recorder
from gossipgrad.errors import GossipError
from gossipgrad.planning import Merge
from gossipgrad.sparsification._density import density_at
from gossipgrad.sparsification._gradient_hooks import GradientHooks
from gossipgrad.sparsification._merged import MergedGroup, Unsent
from gossipgrad.sparsification._queue import OrderedQueue, Ticket
from gossipgrad.sparsification._settings import Settings

__all__ = ["Aggregation", "Counters", "scale_of"]

_BREAK_SECONDS = 5.0  # for this rank's collectives to end after the group is closed
_BROKEN_OFF = "a backward pass was broken off by an exception after gradients were sent"
_CLOSED_INSIDE = (
    "the session was closed in the middle of a backward pass, so its gradients are not averaged, "
    "and .grad has this rank's own: take no step with them, call zero_grad()"
)


@dataclass(slots=True)
class Counters:
    """The counters of a session; see `SparseStats`."""

    rounds: int = 0
    nonfinite_rounds: int = 0
    bytes_sent: int = 0
    all_reduce_bytes: int = 0
    exposed_seconds: float = 0.0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    scale: float = 1.0
    """The loss scale of the residuals."""


class Aggregation:
    """All groups of a session, their queue, and their rounds."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: Group,
        settings: Settings,
        merges: Sequence[Merge],
        *,
        after_round: Callable[["Aggregation"], None],
        counters: Counters,
        scaler: torch.amp.GradScaler | None,
        recorder: Recorder | None,
    ) -> None:
        self.counters = counters
        self.broken: str | None = None
        self.steps = 0
        self.is_in_closure = False
        self._step = 0, 0
        self.groups: list[MergedGroup] = []
        self.merges: tuple[Merge, ...] = ()
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self._known = {id(parameter) for parameter in self.parameters}
        self._bytes = sum(parameter.nbytes for parameter in self.parameters)
        self._group = group
        self._settings = settings
        self._after_round = after_round
        self._scaler = scaler
        self._recorder = recorder
        self.density = 0.0
        self._tickets: list[Ticket] = []
        self._empty = False  # whether this rank has no gradients in this round
        self.queue = OrderedQueue(f"gossipgrad sparsify, rank {group.rank}")
        self._clock = Clock(self.device)
        self.passes = GradientHooks(
            self.parameters,
            begin=self._begin,
            launch=self._launch,
            end=self._end,
            on_abort=partial(self._give_up, _BROKEN_OFF),
            stamp=self._clock.now,
        )
        self.passes.waits = settings.clip_norm is not None
        try:
            self.regroup(merges)
        except BaseException:
            self.close()
            raise

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether its gradients are averaged here."""
        return id(parameter) in self._known

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        """The parameters by name, in the order of backward."""
        return dict(zip(self.names, self.parameters, strict=True))

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter, in the same order."""
        return [p.numel() for p in self.parameters]

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self.parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most gradient elements."""
        elements: Counter[torch.dtype] = Counter()
        for p in self.parameters:
            elements[p.dtype] += p.numel()
        return elements.most_common(1)[0][0]

    def stamps(self) -> dict[str, float]:
        """Seconds from the first gradient of the last pass to each, by name, in arrival order."""
        stamps = self.passes.stamps
        seconds = self._clock.seconds(list(stamps.values())) if stamps else []
        return {self.names[index]: t for index, t in zip(stamps, seconds, strict=True)}

    def regroup(
        self,
        merges: Sequence[Merge],
        *,
        names: Sequence[str] | None = None,
        unsent: Mapping[str, Unsent] | None = None,
    ) -> None:
        """Change the groups, and optionally the order of parameters; between rounds."""
        assert not self.passes.began
        unsent = self.unsent() if unsent is None else unsent
        try:
            self._regroup(merges, self.names if names is None else list(names), unsent)
        except BaseException as error:
            self.end(
                f"gradients are not aggregated any more: making new groups failed ({error!r}). "
                "Save session.state_dict(), close the session, and start another"
            )
            raise

    def _regroup(
        self, merges: Sequence[Merge], names: list[str], unsent: Mapping[str, Unsent]
    ) -> None:
        by_name = {name: self.by_name[name] for name in names}
        for made in self.groups:
            made.free_buffers()  # before the next ones are allocated; what is not sent yet stays
        groups = []
        for merge in merges:
            of = names[merge.start : merge.stop]
            made = MergedGroup(
                [by_name[name] for name in of],
                merge.method,
                world_size=self._group.world_size,
                value_dtype=self._settings.value_dtype,
                momentum=self._settings.momentum_correction,
            )
            made.load([unsent.get(name, Unsent()) for name in of])
            groups.append(made)
        self.names, self.parameters = names, list(by_name.values())
        self.groups, self.merges = groups, tuple(merges)
        if self.density:
            self._use(self.density)
        self.passes.regroup(self.parameters, [merge.stop - merge.start for merge in merges])

    def unsent(self) -> dict[str, Unsent]:
        """Return what is not sent yet by parameter name, in the order of backward."""
        of_groups = [each for made in self.groups for each in made.unsent()]
        return dict(zip(self.names, of_groups, strict=bool(self.groups)))

    def check_steps(self) -> None:
        """Check that an optimizer may step now."""
        if self.broken is not None:
            raise GossipError(self.broken)
        if self.passes.began:
            raise GossipError(
                "an optimizer steps in the middle of a backward pass, before its gradients are "
                "averaged: step after backward() has returned"
            )

    def has_gradients(self) -> bool:
        """Whether any gradient is not zero."""
        grads = (p.grad for p in self.parameters if p.grad is not None)
        return any(grad.layout is not torch.strided or bool(grad.any()) for grad in grads)

    @torch.no_grad()
    def run_now(self) -> None:
        """Run a round without a backward pass, on the current `.grad`."""
        self.passes.open()
        self._empty = not self.has_gradients()
        try:
            self._end()
        finally:
            if self.passes.began:
                self._give_up("a step was broken off by an exception in its round")

    def end(self, why: str) -> None:
        """End all rounds and steps; local."""
        self.broken = why
        self._group.close()

    def close(self) -> None:
        """Remove the hooks and end the thread; local. A running round fails."""
        if self.passes.began and self.broken is None:
            self.end(_CLOSED_INSIDE)
        self.passes.remove()
        self.queue.close()

    def _begin(self) -> None:
        if self.broken is not None:
            raise GossipError(self.broken)
        self._tickets, self._empty = [], False
        self._step = self.steps, self._checksum() if self.is_in_closure else 0
        self._rescale()
        density = density_at(self._settings.density, self.counters.rounds)
        if density != self.density:
            self._use(density)

    def _rescale(self) -> None:
        """Convert what is not sent yet to the current loss scale."""
        scale = scale_of(self._scaler)
        if scale != self.counters.scale:
            for made in self.groups:
                made.rescale(scale / self.counters.scale)
            self.counters.scale = scale

    def _clip(self) -> None:
        """Clip this rank's gradient, before it is added to the residual."""
        # The mean of p independent gradients has a norm smaller by sqrt(p). The paper clips what a
        # rank adds to that mean, a p-th of its gradient, to c / sqrt(p): the same.
        if self._settings.clip_norm is not None:
            limit = self._settings.clip_norm * math.sqrt(self._group.world_size)
            nn.utils.clip_grad_norm_(self.parameters, limit * self.counters.scale)

    @torch.no_grad()
    def _checksum(self) -> int:
        """Return a sum of the bits of the weights."""
        bits = [p.contiguous().flatten().view(torch.int16) for p in self.parameters]
        return int(torch.stack([each.sum(dtype=torch.int64) for each in bits]).sum())

    def _use(self, density: float) -> None:
        for made in self.groups:
            made.use_density(density)
        self.density = density

    def _launch(self, number: int) -> None:
        made = self.groups[number]
        start = perf_counter()
        made.step = self._step
        if self._empty:
            made.begin_with_zeros()
        else:
            made.begin(self._grads(number))
        ticket = Ticket(partial(made.exchange, self._group))
        self._tickets.append(ticket)
        if number < len(self.groups) - 1:
            self.queue.put(ticket)
        self.counters.select_seconds += made.select_seconds
        self.counters.bytes_sent += made.bytes_sent
        if self._recorder is not None:
            self._recorder.span("select", start, perf_counter(), bucket=number)

    def _grads(self, number: int) -> list[Tensor | None]:
        """Return each parameter's gradient for a round; None if it has none."""
        # The whole `.grad`, even if this pass skipped the parameter: on other ranks the mean of an
        # earlier pass is part of the gradient, and so it must be on all.
        grads: list[Tensor | None] = []
        merge = self.merges[number]
        for at in range(merge.start, merge.stop):
            grad = self.parameters[at].grad
            if grad is not None and grad.layout is not torch.strided:
                raise GossipError(
                    f"the gradient of {self.names[at]!r} is sparse ({grad.layout}): make its "
                    "module with sparse=False; what is sent of it is a choice of its elements"
                )
            grads.append(grad)
        return grads

    def _end(self) -> None:
        """Wait for all groups and write the mean into the gradients."""
        if self.broken is None:
            self._clip()
            self.passes.launch_rest()
        start = perf_counter()
        try:
            error = self._wait()
        except BaseException:
            self._give_up("this rank was interrupted in the middle of a round")
            raise
        end = perf_counter()
        if error is not None or self.broken is not None:
            self._give_up(
                f"{error}. If no rank has died, one has made fewer rounds than others (this one "
                f"{self.counters.rounds}): where a rank has no batch, call step() without gradients"
            )
            raise GossipError(self.broken) from error
        if self._empty and self.counters.scale != 1.0 and any(made.has_sum for made in self.groups):
            self._give_up("this rank stepped without a gradient while others had some, scaled")
            raise GossipError(self.broken)
        self.counters.exposed_seconds += end - start
        self._write()
        self._record(start, end)
        self.passes.finish()
        self.counters.rounds += 1
        ranks = self._group.world_size
        self.counters.all_reduce_bytes += 2 * (ranks - 1) * self._bytes // ranks
        if self.broken is not None:  # closed while the mean was written
            return
        try:
            self._after_round(self)
        except BaseException as error:
            self.end(
                f"gradients are not aggregated any more: making a plan failed ({error!r}). Save "
                "session.state_dict(), close the session, and start another"
            )
            raise

    def _wait(self) -> BaseException | None:
        """Wait for all groups; return the first error."""
        # This thread has nothing else to do: it runs the collective of the last group itself.
        *before, last = self._tickets or [Ticket(lambda: None)]
        for ticket in before:
            ticket.wait()
        error = next((t.error for t in before if t.error is not None), None)
        error = last.run(error if self.broken is None else GossipError(self.broken))
        if error is not None and not isinstance(error, Exception):
            raise error
        return error

    def _write(self) -> None:
        finite = all(made.finite for made in self.groups)
        self.counters.nonfinite_rounds += not finite
        if not finite:
            for number, made in enumerate(self.groups):
                made.roll_back(self._grads(number))
        for merge, made in zip(self.merges, self.groups, strict=True):
            targets = []
            for parameter in self.parameters[merge.start : merge.stop]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                targets.append(parameter.grad)
            made.write(targets)
            if finite:
                made.accept()
            else:  # no optimizer may step with a round that another one's scaler skips
                torch._foreach_mul_(targets, torch.nan)

    def _record(self, start: float, end: float) -> None:
        for number, (ticket, made) in enumerate(zip(self._tickets, self.groups, strict=True)):
            self.counters.communicate_seconds += ticket.ended_seconds - ticket.began_seconds
            if self._recorder is not None:
                times = ticket.began_seconds, ticket.ended_seconds
                self._recorder.span("exchange", *times, bucket=number, bytes=made.bytes_sent)
        if self._recorder is not None:
            self._recorder.span("wait", start, end)

    @torch.no_grad()
    def _give_up(self, why: str) -> None:
        """Discard this round and end all rounds, which notifies the others."""
        self.end(
            self.broken
            or f"gradients are not aggregated any more: {why}. Weights and residuals are as they "
            "were before this step, and .grad has this rank's own gradients: save "
            "session.state_dict(), close the session, and start another with the ranks that live"
        )
        deadline = perf_counter() + _BREAK_SECONDS
        for ticket in self._tickets[: len(self.groups) - 1]:
            ticket.wait(max(0.0, deadline - perf_counter()))
        for number in range(len(self._tickets)):
            self.groups[number].roll_back(self._grads(number))
        self.passes.finish()


def scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """Return the loss scale: 1 without an enabled scaler."""
    return 1.0 if scaler is None or not scaler.is_enabled() else scaler.get_scale()
