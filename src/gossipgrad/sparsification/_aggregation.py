"""A round: gradients of all ranks become their sparsified mean while backward goes on."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from gossipgrad.comm import Group, Recorder
from gossipgrad.errors import GossipError
from gossipgrad.planning import Group as Merge
from gossipgrad.sparsification._agreed_density import AgreedDensity
from gossipgrad.sparsification._density import counts_of
from gossipgrad.sparsification._groups import gradients_of, held_by, made_anew
from gossipgrad.sparsification._held import Held
from gossipgrad.sparsification._merged import MergedGroup
from gossipgrad.sparsification._passes import Passes
from gossipgrad.sparsification._queue import OrderedQueue, Ticket
from gossipgrad.sparsification._settings import Settings
from gossipgrad.sparsification._values import prevailing_dtype, scale_of

__all__ = ["Aggregation"]

_REMEMBERED = 50  # rounds whose times count for the median
_BREAK_SECONDS = 5.0  # for collectives of this rank to end once the group is closed
_CLOSED_INSIDE = (
    "the session was closed in the middle of a backward pass, so its gradients have not met: "
    "weights are as they were before this step, and .grad has this rank's own gradients. Take no "
    "step with them; call close() again, and then train on without a session, or start another"
)


class Aggregation:
    """All groups of a session, their queue, and the rounds they go through together.

    Args:
        parameters: By name, in the order in which backward finishes them.
        group: For collectives; nothing else talks on it while a round is under way.
        settings: Of the session.
        merges: The groups to begin with.
        after_round: Called after each round, when nothing is under way; it may `regroup`.
        scaler: Whose scale the gradients have in them.
        recorder: Gets spans of time.

    Attributes:
        rounds: How many have been.
        all_reduce_bytes: What rings would have sent in them of gradients as they are.
        groups: The groups.
        passes: The backward passes.
        scale: The factor of loss scaling that residuals have in them.
        finite: Whether all was in the last round.
        broken: Why there are no more rounds, None while there are.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: Group,
        settings: Settings,
        merges: Sequence[Merge],
        *,
        after_round: Callable[["Aggregation"], None],
        scaler: torch.amp.GradScaler | None,
        recorder: Recorder | None,
    ) -> None:
        self.rounds = 0
        self.nonfinite_rounds = 0
        self.exposed_seconds = self.select_seconds = self.communicate_seconds = 0.0
        self.bytes_sent = self.all_reduce_bytes = 0
        self.scale = 1.0
        self.finite = True
        self.broken: str | None = None
        self._last_counts = False  # whether the last round may be stepped with though it is broken
        self.groups: list[MergedGroup] = []
        self.merges: tuple[Merge, ...] = ()
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._known = {id(parameter) for parameter in self._parameters}
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
        self._zero: float | None = None  # what this rank brings to the round, if nothing else
        self.queue = OrderedQueue(f"gossipgrad sparsify, rank {group.rank}")
        self.passes = Passes(
            self._parameters,
            begin=self._begin,
            launch=self._launch,
            end=self._end,
            broken_off=self._broken_off,
        )
        try:
            self.regroup(merges)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Of the parameters, in the order of backward."""
        return self._names

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether gradients of it meet."""
        return id(parameter) in self._known

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter, in the same order."""
        return [p.numel() for p in self._parameters]

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        """That of most elements of the gradients."""
        return prevailing_dtype(self._parameters)

    @property
    def density(self) -> float:
        """Asked for in this round, on average over all coordinates, whatever their method."""
        return self._average(self._densities)

    def density_after(self, rounds: int) -> float | None:
        """That of the last of so many rounds to come; None if it is not known yet."""
        densities = self._density.told(self._names, self.rounds + rounds - 1)
        return None if densities is None else self._average(densities)

    @property
    def carries(self) -> bool:
        """Whether something of a gradient may be carried over to the next round."""
        return self._settings.momentum_correction is not None or any(
            made.sparse or made.residual is not None for made in self.groups
        )

    @property
    def median_seconds(self) -> float | None:
        """From the first gradient until all groups have come, of the last rounds."""
        return statistics.median(self._finished) if self._finished else None

    @property
    def last_seconds(self) -> float:
        """From the first gradient until all groups had come, of the last round."""
        return self._finished[-1]

    def stamps(self) -> dict[str, float]:
        """Seconds from the first gradient of the last pass to each, by name."""
        return {self._names[at]: t for at, t in self.passes.ready_seconds().items()}

    def regroup(
        self,
        merges: Sequence[Merge],
        *,
        names: Sequence[str] | None = None,
        held: Mapping[str, Held] | None = None,
    ) -> None:
        """Other groups of the same parameters, maybe in another order; between rounds.

        Args:
            merges: The groups.
            names: The order; None: it stays.
            held: What is carried over, by name; None: what is now, which goes with its tensors.
        """
        assert not self.passes.began
        held = self.held() if held is None else held
        try:
            self._regroup(merges, self._names if names is None else list(names), held)
        except BaseException as error:
            self.end(
                f"gradients are not aggregated any more: making new groups failed ({error!r}). "
                "Save session.state_dict(), close the session, and start another"
            )
            raise

    def _regroup(self, merges: Sequence[Merge], names: list[str], held: Mapping[str, Held]) -> None:
        by_name = dict(zip(self._names, self._parameters, strict=True))
        by_name = {name: by_name[name] for name in names}
        for made in self.groups:
            made.shed()  # before memory for the next is taken; what is carried over stays
        groups = made_anew(merges, by_name, held, self._settings, self._group.world_size)
        self._names, self._parameters = names, list(by_name.values())
        self.groups, self.merges = groups, tuple(merges)
        self._finished.clear()  # of other groups
        self.passes.reorder(self._parameters)
        if self._densities:
            self._use(self._density.at(names, self.rounds))
        self.passes.regroup([merge.stop - merge.start for merge in merges])

    def held(self) -> dict[str, Held]:
        """What is carried over, by name of the parameter, in the order of backward."""
        return held_by(self.merges, self.groups, self._names)

    def check_steps(self, *, met: bool) -> None:
        """Returns if an optimizer may step now, with gradients of the last round if they have met.

        Raises:
            GossipError: In the middle of a backward pass, or if there are no more rounds.
        """
        if self.broken is not None and not (met and self._last_counts):
            raise GossipError(self.broken)
        if self.passes.began:
            raise GossipError(
                "an optimizer steps in the middle of a backward pass, before its gradients have "
                "met: step after backward() has returned"
            )

    @torch.no_grad()
    def nothing(self) -> float | None:
        """-0.0 if there are no gradients, 0.0 if there are and all are zeros; None otherwise."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if any(grad.layout is not torch.strided or bool(grad.any()) for grad in grads):
            return None
        return 0.0 if grads else -0.0

    @torch.no_grad()
    def run_now(self, nothing: float | None) -> None:
        """A round without a backward pass: of what is in `.grad`, wherever it came from.

        Where that is nothing, as `nothing()` said, this rank sends nothing of what it carries over
        either. Where no rank has a gradient, none has one afterwards.
        """
        self.passes.open()
        self._zero = nothing
        try:
            self._end()
        except BaseException:
            if self.passes.began:
                self._give_up("a step was broken off by an exception in its round")
            raise

    def end(self, why: str, *, last_counts: bool = False) -> None:
        """From now on there are no rounds, nor steps but maybe that of the last one; local."""
        self.broken, self._last_counts = why, last_counts
        self._group.close()

    def close(self) -> None:
        """Takes the hooks off and ends the thread; local.

        In the middle of a round, from a signal handler, a hook or another thread, that round fails.
        """
        if self.passes.began and self.broken is None:
            self.end(_CLOSED_INSIDE)
        self.passes.remove()
        self.queue.close()

    def _begin(self) -> None:
        if self.broken is not None:
            raise GossipError(self.broken)
        self._tickets, self._zero = [], None
        self._opened_seconds = perf_counter()
        self._rescale()
        densities = self._density.at(self._names, self.rounds)
        if densities != self._densities:
            self._use(densities)

    def _rescale(self) -> None:
        """What is carried over is from now on in units of another loss scale."""
        scale = scale_of(self._scaler)
        if scale != self.scale:
            for made in self.groups:
                made.rescale(scale / self.scale)
            self.scale = scale

    def _average(self, densities: tuple[float, ...]) -> float:
        """Over all coordinates."""
        sizes = self.sizes
        asked = sum(n * rho for n, rho in zip(sizes, densities, strict=True))
        return asked / sum(sizes)

    def _use(self, densities: tuple[float, ...]) -> None:
        per_tensor = self._settings.select == "per_tensor"
        for merge, made in zip(self.merges, self.groups, strict=True):
            made.use_counts(
                counts_of(made.sizes, densities[merge.start : merge.stop], per_tensor=per_tensor)
            )
        self._densities = densities

    def _launch(self, number: int) -> None:
        made = self.groups[number]
        start = perf_counter()
        if self._zero is None:
            made.begin(self._grads(number))
        else:
            made.begin_absent(self._zero)
        self._tickets.append(self.queue.put(partial(made.exchange, self._group)))
        self.select_seconds += made.timing.select_seconds
        self.bytes_sent += made.bytes_sent
        if self._recorder is not None:
            self._recorder.span("select", start, perf_counter(), bucket=number)

    def _grads(self, number: int) -> list[Tensor | None]:
        return gradients_of(self.merges[number], self._names, self._parameters)

    def _end(self) -> None:
        """Waits for all groups and writes the mean into the gradients."""
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
            self._give_up(str(error))
            raise GossipError(self.broken) from error
        if self._zero is not None and self.scale != 1.0:
            self._check_units()
        self.exposed_seconds += end - start
        self._write()
        self._finished.append(end - self._opened_seconds)
        self._record(start, end)
        self.passes.over()
        self.rounds += 1
        ranks = self._group.world_size
        width = sum(made.numel * made.dtype.itemsize for made in self.groups)
        self.all_reduce_bytes += 2 * (ranks - 1) * width // ranks
        if self.broken is not None:  # closed while the mean was written
            self._last_counts = True
            return
        try:
            self._after_round(self)
        except BaseException as error:
            why = (
                "gradients are not aggregated any more: an exception came between two rounds "
                f"({error!r}). Those of the last have met, are in .grad, and count: take their "
                "step, then save session.state_dict(), close the session, and start another"
            )
            self.end(why, last_counts=True)
            error.add_note(why)
            raise

    def _check_units(self) -> None:
        """Raises where a step that brought nothing would be one with what others have scaled."""
        if any(bool(made.total.any()) for made in self.groups):
            self._give_up("this rank stepped without a gradient while others had some, scaled")
            raise GossipError(self.broken)

    def _write(self) -> None:
        local = [self._grads(number) for number in range(len(self.groups))]
        finite = self.finite = all(made.finite for made in self.groups)
        self.nonfinite_rounds += not finite
        if all(made.silent for made in self.groups):
            return  # optimizers pass over parameters whose .grad stays None
        for merge, made, grads in zip(self.merges, self.groups, local, strict=True):
            if not finite:
                made.roll_back(grads)
            targets = []
            for parameter in self._parameters[merge.start : merge.stop]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                targets.append(parameter.grad)
            made.write(targets)
            if finite:
                made.accept()
            else:  # no optimizer may step with a round that another one's scaler leaves out
                torch._foreach_mul_(targets, torch.nan)

    def _record(self, start: float, end: float) -> None:
        for number, (ticket, made) in enumerate(zip(self._tickets, self.groups, strict=True)):
            self.communicate_seconds += ticket.ended_seconds - ticket.began_seconds
            if self._recorder is not None:
                times = ticket.began_seconds, ticket.ended_seconds
                self._recorder.span("exchange", *times, bucket=number, bytes=made.bytes_sent)
        if self._recorder is not None:
            self._recorder.span("wait", start, end)

    def _broken_off(self) -> None:
        self._give_up("a backward pass was broken off by an exception after gradients were sent")

    @torch.no_grad()
    def _give_up(self, why: str) -> None:
        """Nothing of this round counts, and there is no next; the others are told by the end."""
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
        self.passes.over()
