"""A round: aggregate the sparsified gradients of all ranks during backward."""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.comm import Group, Recorder
from gossipgrad.errors import GossipError
from gossipgrad.planning import Merge
from gossipgrad.sparsification._density import AgreedDensity
from gossipgrad.sparsification._gradient_hooks import GradientHooks
from gossipgrad.sparsification._merged import CarriedOver, MergedGroup
from gossipgrad.sparsification._queue import OrderedQueue, Ticket
from gossipgrad.sparsification._settings import Settings
from gossipgrad.sparsification._streams import make_clock

__all__ = ["Aggregation", "Counters", "scale_of"]

_REMEMBERED = 50  # number of rounds for the median time
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

    def load(self, counted: Mapping[str, Any]) -> None:
        """Load the result of `dataclasses.asdict`."""
        for name, value in counted.items():
            setattr(self, name, value)


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
        self._last_counts = False  # whether a step may still use a broken last round
        self.groups: list[MergedGroup] = []
        self.merges: tuple[Merge, ...] = ()
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self._known = {id(parameter) for parameter in self.parameters}
        self._group = group
        self._settings = settings
        self._after_round = after_round
        self._scaler = scaler
        self._recorder = recorder
        self._densities: tuple[float, ...] = ()
        self._density = AgreedDensity(settings.density, group)
        self._tickets: list[Ticket] = []
        self._opened_seconds = 0.0
        self._finished: deque[float] = deque(maxlen=_REMEMBERED)
        self._empty = False  # whether this rank has no gradients in this round
        self.queue = OrderedQueue(f"gossipgrad sparsify, rank {group.rank}")
        self._clock = make_clock(self.device)
        self.passes = GradientHooks(
            self.parameters,
            begin=self._begin,
            launch=self._launch,
            end=self._end,
            on_abort=partial(self._give_up, _BROKEN_OFF),
            stamp=self._clock.now,
        )
        try:
            self.regroup(merges)
        except BaseException:
            self.close()
            raise

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether its gradients are averaged here."""
        return id(parameter) in self._known

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

    @property
    def density(self) -> float:
        """The requested density of the last round, averaged over all coordinates."""
        return self.average(self._densities)

    def average(self, densities: tuple[float, ...]) -> float:
        """Average the densities of all parameters over their coordinates."""
        asked = sum(n * rho for n, rho in zip(self.sizes, densities, strict=True))
        return asked / sum(self.sizes)

    @property
    def median_seconds(self) -> float | None:
        """Median time from the first gradient to the last group's end, of the last rounds."""
        return statistics.median(self._finished) if self._finished else None

    def stamps(self) -> dict[str, float]:
        """Seconds from the first gradient of the last pass to each, by name, in arrival order."""
        places = sorted(self.passes.turns, key=self.passes.turns.__getitem__)
        moments = [self.passes.stamps[place] for place in places]
        seconds = self._clock.seconds(moments) if moments else []
        return {self.names[at]: t for at, t in zip(places, seconds, strict=True)}

    def regroup(
        self,
        merges: Sequence[Merge],
        *,
        names: Sequence[str] | None = None,
        carried: Mapping[str, CarriedOver] | None = None,
    ) -> None:
        """Change the groups, and optionally the order of parameters; between rounds."""
        assert not self.passes.began
        carried = self.carried_over() if carried is None else carried
        try:
            self._regroup(merges, self.names if names is None else list(names), carried)
        except BaseException as error:
            self.end(
                f"gradients are not aggregated any more: making new groups failed ({error!r}). "
                "Save session.state_dict(), close the session, and start another"
            )
            raise

    def _regroup(
        self, merges: Sequence[Merge], names: list[str], carried: Mapping[str, CarriedOver]
    ) -> None:
        by_name = dict(zip(self.names, self.parameters, strict=True))
        by_name = {name: by_name[name] for name in names}
        for made in self.groups:
            made.free_buffers()  # before the next ones are allocated; carried-over state stays
        groups = []
        for merge in merges:
            of = names[merge.start : merge.stop]
            made = MergedGroup(
                [by_name[name] for name in of],
                merge.method,
                world_size=self._group.world_size,
                per_tensor=self._settings.select == "per_tensor",
                value_dtype=self._settings.value_dtype,
                momentum=self._settings.momentum_correction,
            )
            made.load([carried.get(name, CarriedOver()) for name in of])
            groups.append(made)
        self.names, self.parameters = names, list(by_name.values())
        self.groups, self.merges = groups, tuple(merges)
        self._finished.clear()  # of other groups
        self.passes.reorder(self.parameters)
        if self._densities:
            self._use(self._density.at(names, self.counters.rounds))
        self.passes.regroup([range(merge.start, merge.stop) for merge in merges])

    def carried_over(self) -> dict[str, CarriedOver]:
        """Return the carried-over state by parameter name, in the order of backward."""
        of_groups = [each for made in self.groups for each in made.carried_over()]
        return dict(zip(self.names, of_groups, strict=bool(self.groups)))

    def check_steps(self, *, averaged: bool) -> None:
        """Check that an optimizer may step now; `averaged`: with gradients of the last round."""
        if self.broken is not None and not (averaged and self._last_counts):
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

    def end(self, why: str, *, last_counts: bool = False) -> None:
        """End all rounds, and steps except possibly that of the last round; local."""
        self.broken, self._last_counts = why, last_counts
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
        self._opened_seconds = perf_counter()
        self._step = self.steps, self._checksum() if self.is_in_closure else 0
        self._rescale()
        densities = self._density.at(self.names, self.counters.rounds)
        if densities != self._densities:
            self._use(densities)

    def _rescale(self) -> None:
        """Convert the carried-over state to the current loss scale."""
        scale = scale_of(self._scaler)
        if scale != self.counters.scale:
            for made in self.groups:
                made.rescale(scale / self.counters.scale)
            self.counters.scale = scale

    @torch.no_grad()
    def _checksum(self) -> int:
        """Return a sum of the bits of the weights."""
        bits = [p.contiguous().flatten().view(torch.int16) for p in self.parameters]
        return int(torch.stack([each.sum(dtype=torch.int64) for each in bits]).sum())

    def _use(self, densities: tuple[float, ...]) -> None:
        for merge, made in zip(self.merges, self.groups, strict=True):
            made.use_densities(densities[merge.start : merge.stop])
        self._densities = densities

    def _launch(self, number: int) -> None:
        made = self.groups[number]
        start = perf_counter()
        made.step = self._step
        if self._empty:
            made.begin_with_zeros()
        else:
            made.begin(self._grads(number))
        self._tickets.append(self.queue.put(partial(made.exchange, self._group)))
        self.counters.select_seconds += made.timing.select_seconds
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
            self.passes.launch_rest()
        start = perf_counter()
        try:
            for ticket in self._tickets:
                ticket.wait()
        except BaseException:
            self._give_up("this rank was interrupted in the middle of a round")
            raise
        end = perf_counter()
        error = next((t.error for t in self._tickets if t.error is not None), None)
        if error is not None or self.broken is not None:
            self._give_up(
                f"{error}. If no rank has died, one has made fewer rounds than others (this one "
                f"{self.counters.rounds}): where a rank has no batch, call step() without gradients"
            )
            raise GossipError(self.broken) from error
        if (
            self._empty
            and self.counters.scale != 1.0
            and any(bool(m.total.any()) for m in self.groups)
        ):
            self._give_up("this rank stepped without a gradient while others had some, scaled")
            raise GossipError(self.broken)
        self.counters.exposed_seconds += end - start
        self._write()
        self._finished.append(end - self._opened_seconds)
        self._record(start, end)
        self.passes.finish()
        self.counters.rounds += 1
        ranks = self._group.world_size
        width = sum(p.nbytes for p in self.parameters)
        self.counters.all_reduce_bytes += 2 * (ranks - 1) * width // ranks
        if self.broken is not None:  # closed while the mean was written
            self._last_counts = True
            return
        try:
            self._after_round(self)
        except BaseException as error:
            why = (
                "gradients are not aggregated any more: an exception came between two rounds "
                f"({error!r}). Those of the last are averaged, are in .grad, and count: take their "
                "step, then save session.state_dict(), close the session, and start another"
            )
            self.end(why, last_counts=True)
            error.add_note(why)
            raise

    def _write(self) -> None:
        local = [self._grads(number) for number in range(len(self.groups))]
        finite = all(made.finite for made in self.groups)
        self.counters.nonfinite_rounds += not finite
        for merge, made, grads in zip(self.merges, self.groups, local, strict=True):
            if not finite:
                made.roll_back(grads)
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
        for ticket in self._tickets:
            ticket.wait(max(0.0, deadline - perf_counter()))
        for number in range(len(self._tickets)):
            self.groups[number].roll_back(self._grads(number))
        self.passes.finish()


def scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """Return the loss scale: 1 without an enabled scaler."""
    return 1.0 if scaler is None or not scaler.is_enabled() else scaler.get_scale()
