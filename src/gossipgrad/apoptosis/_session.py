"""A shrink session: measures training batches, plans, tests and applies merges."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad._messages import warn
from gossipgrad.apoptosis._find import Found
from gossipgrad.apoptosis._judge import merging_of, options_of
from gossipgrad.apoptosis._moments import Moments, Watch
from gossipgrad.apoptosis._neurons import Neurons
from gossipgrad.apoptosis._plan import ShrinkPlan
from gossipgrad.apoptosis._planner import Work, counts_of, plan_counts, unit_of
from gossipgrad.apoptosis._surgery import check_surgery, operate
from gossipgrad.apoptosis._trial import Certificate, certify, evaluating, merged
from gossipgrad.engine import Session
from gossipgrad.errors import AgreementError, EvictedError, GossipError

__all__ = ["ShrinkEvent", "ShrinkSession", "ShrinkSettings", "ShrinkStats"]

logger = logging.getLogger(__name__)

_FASTER, _SLOWER, _FASTEST = 1.25, 0.5, 2.0


def cosine(share: float) -> float:
    """Return the share of the budget to spend after a share of the time, most of it early."""
    return math.sin(math.pi / 2 * share)


@dataclass(frozen=True, kw_only=True)
class ShrinkSettings:
    """How fast a model shrinks; see `shrink()`."""

    budget: float = 0.005
    every: int = 200
    events: int = 10
    batches: int = 16
    schedule: Callable[[float], float] = cosine
    tolerance: float = 0.01
    round_to: int = 16
    at_most: float = 0.5
    start: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "events", "batches", "round_to"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
        if self.batches > self.every:
            raise ValueError(
                f"batches={self.batches} are looked at before each event, but events are "
                f"every={self.every} steps: take fewer batches"
            )
        _check_budget(self.budget)
        if not 0 < self.at_most < 1:
            raise ValueError(f"at_most is a share of neurons, in (0, 1), got {self.at_most!r}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is a share of the loss from 0, got {self.tolerance!r}")
        if not callable(self.schedule):
            raise ValueError(f"schedule must be a function of a share, got {self.schedule!r}")


@dataclass(frozen=True)
class ShrinkEvent:
    """One event at which neurons were planned to be removed.

    Attributes:
        position: The run's steps.
        widths: By layer, before and after; only layers that changed.
        errors: By layer, the joint error over the variance of its consumers' outputs.
        loss_before: Result of `evaluate` before the merges, the mean over ranks; None without it.
        loss_after: The same after them.
        applied: Whether it was applied; otherwise the loss rose by more than the tolerance, or the
            ranks did not agree.
        seconds: Duration, including waits for other ranks.
    """

    position: int
    widths: Mapping[str, tuple[int, int]]
    errors: Mapping[str, float]
    loss_before: float | None
    loss_after: float | None
    applied: bool
    seconds: float


@dataclass(frozen=True)
class ShrinkStats:
    """The counters of a session.

    Attributes:
        events: Number of applied events.
        undone: Number of tested events that were not applied.
        parameters: The model's current number of parameters.
        parameters_before: The number when the session started.
        removed: Number of removed neurons.
        seconds: Duration of all events.
        recompilations: How often shapes changed, so that `torch.compile` recompiles.
    """

    events: int
    undone: int
    parameters: int
    parameters_before: int
    removed: int
    seconds: float
    recompilations: int


@dataclass
class _Course:
    """The state left by events; equal on all ranks."""

    rate: float = 1.0
    spent: dict[str, float] = field(default_factory=dict)


class ShrinkSession:
    """The session that `shrink()` returns. Close it, or use it in a `with` statement.

    Attributes:
        replicas: The session whose ranks shrink together: that of `gossip()`, `sparsify()` or
            `suda()` if passed, otherwise its own.
        neurons: The neurons that may be removed.
        refused: By layer, why it does not shrink.
        settings: See `shrink()`.
        history: Events so far.
        model: The module to call in training: the model, or the last result of `wrap`.
    """

    def __init__(
        self,
        replicas: Session,
        found: Found,
        settings: ShrinkSettings,
        *,
        owns_replicas: bool,
        evaluate: Callable[[], Any] | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        copies: Sequence[nn.Module] = (),
    ) -> None:
        self.replicas = replicas
        self.neurons: Sequence[Neurons] = found.neurons
        self.refused = found.refused
        self.settings = settings
        self.history: list[ShrinkEvent] = []
        self._owns_replicas = owns_replicas
        self._evaluate, self._wrap, self._copies = evaluate, wrap, tuple(copies)
        self._inner = replicas.replica.model
        self._start = replicas.position if settings.start is None else settings.start
        self._done = max(0, (replicas.position - self._start) // settings.every)
        self._course = _Course()
        self._has_warned = False
        self._watch: Watch | None = None
        self._parameters_before = _count(self._inner)
        self._widths_before = self.widths()
        self._handle: RemovableHandle | None = None
        self.model: nn.Module = self._inner if wrap is None else wrap(self._inner)
        optimizer = replicas.replica.optimizers[-1]
        self._handle = optimizer.register_step_post_hook(self._after_step)

    # -- what a user asks -------------------------------------------------------------------

    def describe(self) -> str:
        """Describe every layer with weights and whether it may shrink; local."""
        rows = [("layer", "neurons", "")]
        by_producer: dict[str, list[Neurons]] = {}
        for each in self.neurons:
            for path in each.producers:
                by_producer.setdefault(path, []).append(each)
        for name, module in self._inner.named_modules():
            for each in by_producer.get(name, ()):
                least = unit_of(each, self.settings.round_to)
                what = f"may shrink to {least}; read by {', '.join(each.consumers)}"
                if others := [path for path in each.producers if path != name]:
                    what += f"; with {', '.join(others)}"
                rows.append((name or "(the model)", str(each.width), what))
            if name in self.refused:
                width = len(cast(Tensor, module.weight))
                rows.append((name or "(the model)", str(width), f"stays: {self.refused[name]}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def widths(self) -> dict[str, int]:
        """Return the current number of neurons of each layer that may shrink; local."""
        return {each.name: each.width for each in self.neurons}

    def stats(self) -> ShrinkStats:
        """Return the counters; local."""
        applied = [event for event in self.history if event.applied]
        now = self.widths()
        return ShrinkStats(
            events=len(applied),
            undone=len(self.history) - len(applied),
            parameters=_count(self._inner),
            parameters_before=self._parameters_before,
            removed=sum(self._widths_before[name] - now[name] for name in now),
            seconds=sum(event.seconds for event in self.history),
            recompilations=sum(bool(event.widths) for event in applied),
        )

    @property
    def spent(self) -> dict[str, float]:
        """Budget that events have used, by layer: the sum of their errors."""
        return dict(self._course.spent)

    def plan(self, budget: float | None = None) -> ShrinkPlan:
        """Plan merges from the measurements since the last event; applies nothing.

        A collective where there are several ranks: all make the same plan, of mean moments and
        mean weights. It needs training batches since `look()`, or those before an event.

        Args:
            budget: Share of the variance of each consumer's outputs; None: the amount due now.

        Raises:
            ValueError: The budget is not in [0, 1).
            GossipError: As `consensus()` of the session of replicas; or no batch was seen.
        """
        if budget is not None:
            _check_budget(budget)
        watch = self._watch
        if watch is None:
            raise GossipError("no batch was seen: call look(), and train for a few steps")
        moments = watch.moments
        if not moments:
            return ShrinkPlan(())  # nothing is left that may go
        for each in moments.values():
            each.flush()
        if left_out := max(each.left_out for each in moments.values()):
            logger.warning("%d rows were not finite and are not measured", left_out)
        if self.replicas.world_size > 1:
            try:
                sums = [t for each in moments.values() for t in each.tensors()]
                self.replicas.mean_([*sums, watch.positions])
            except BaseException:
                self._forget()  # some are sums of all ranks, some of this one
                raise
            for each in moments.values():
                each.use(self.replicas.world_size)
        if all(each.count < 2 for each in moments.values()):
            raise GossipError("no batch was seen: train for a few steps after look()")
        if not all(each.is_finite for each in moments.values()):
            raise GossipError(
                "second moments of neurons are not finite: activations are too large. Look at the "
                "loss"
            )
        self._warn_of_few_samples()
        due = self._due() if budget is None else budget * len(self.neurons)
        if self.replicas.world_size == 1:
            return self._plan(due)
        with self.replicas.consensus():  # one model on all ranks, as well as one sample
            return self._plan(due)

    def apply(self, plan: ShrinkPlan) -> None:
        """Apply a plan on all ranks; a collective.

        Raises:
            ValueError: It does not fit the model; nothing is changed then.
            AgreementError: The ranks pass different plans; nothing is changed then.
            GossipError: As `rebuild()` of the session of replicas.
        """
        self._forget()
        model, optimizers = self._inner, self.replicas.replica.optimizers
        surgery = plan.surgery(model)
        check_surgery(model, surgery, optimizers)
        self.replicas.rebuild(
            partial(operate, model, optimizers, surgery),
            digest=plan.digest(),
            gradient_map=surgery.of_gradient,
        )
        kept = {each.neurons.name: each.kept for each in plan.mergings}
        stays = surgery.stays()
        self.neurons = [
            each.after(kept.get(each.name, torch.arange(each.width)), stays)
            for each in self.neurons
        ]
        for each in plan.mergings:
            spent = self._course.spent
            spent[each.neurons.name] = spent.get(each.neurons.name, 0.0) + each.error
        for copy in self._copies:
            plan.apply(copy)
        if self._wrap is not None and plan.mergings:
            self.model = self._wrap(self._inner)

    def certify(self, plan: ShrinkPlan, *inputs: Any) -> Certificate:
        """Bound how many samples of a batch change their class by a plan; local, applies nothing.

        Args:
            plan: A plan for the current model.
            inputs: Arguments of the model, which returns logits, `(..., classes)`.
        """
        return certify(self._inner, plan, lambda: self._inner(*inputs))

    def look(self) -> None:
        """Measure training batches from now on, for `plan()`; local.

        Events do so automatically, `batches` steps ahead.
        """
        if self._watch is None and self.neurons:
            self._watch = Watch(self._inner, [n for n in self.neurons if self._counts(n)])

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state as plain values, to save with the weights; local."""
        return {
            **asdict(self._course),
            "steps": self.replicas.position - self._start,
            "before": {"parameters": self._parameters_before, "widths": dict(self._widths_before)},
            "history": [asdict(event) for event in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, in a model narrowed by `rebuild`; local.

        A session passed to `shrink()` loads its own state before. Batches that were measured for
        the next event are not in the state: it plans with those after the resume.
        """
        self._forget()
        self._start = self.replicas.position - state["steps"]
        self._done = max(0, state["steps"] // self.settings.every)
        self._course = _Course(state["rate"], dict(state["spent"]))
        self._parameters_before = state["before"]["parameters"]
        self._widths_before = dict(state["before"]["widths"])
        self.history = [ShrinkEvent(**event) for event in state["history"]]
        self._look_if_near()

    def close(self) -> None:
        """Remove all hooks; the model keeps its widths. A session that was passed stays open."""
        self._forget()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._owns_replicas:
            self.replicas.close()

    def __enter__(self) -> "ShrinkSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- events -----------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        settings = self.settings
        if self._done >= settings.events or not self.neurons:
            return
        steps = self.replicas.position - self._start
        while self._done < min(steps // settings.every, settings.events):
            self._done += 1
            self._event()
        self._look_if_near()

    def _look_if_near(self) -> None:
        settings, steps = self.settings, self.replicas.position - self._start
        is_near = steps - self._done * settings.every >= settings.every - settings.batches
        if is_near and self._done < settings.events:
            self.look()

    def _event(self) -> None:
        """Plan, test and apply; if a rank cannot plan, no rank applies."""
        start, position = time.perf_counter(), self.replicas.position
        before = self.widths()
        plan, losses = ShrinkPlan(()), None
        is_kept = True
        self.look()
        try:
            # A joiner continues with the others' used budget.
            self._course = _Course(**self.replicas.agree(asdict(self._course))[0])
            plan = self.plan()
            losses = self._try(plan)
            is_kept = losses is None or losses[1] <= losses[0] * (1 + self.settings.tolerance)
        except EvictedError:
            raise
        except GossipError as error:
            is_kept = False
            logger.warning("no neuron goes at step %d: %s", position, error)
        if not is_kept:
            self._course.rate *= _SLOWER
        elif losses is not None and losses[1] <= losses[0] * (1 + self.settings.tolerance / 4):
            self._course.rate = min(_FASTEST, self._course.rate * _FASTER)
        try:
            self.apply(plan if is_kept else ShrinkPlan(()))
        except AgreementError as error:
            is_kept = False
            logger.warning("no neuron goes at step %d: %s", position, error)
        after = self.widths()
        self.history.append(
            ShrinkEvent(
                position,
                {
                    name: (before[name], after[name])
                    for name in after
                    if after[name] != before[name]
                },
                {each.neurons.name: each.error for each in plan.mergings},
                None if losses is None else losses[0],
                None if losses is None else losses[1],
                is_kept,
                time.perf_counter() - start,
            )
        )

    def _try(self, plan: ShrinkPlan) -> tuple[float, float] | None:
        """Return the loss on held-out samples before and after; a collective with `evaluate`."""
        if self._evaluate is None:
            return None
        with evaluating(self._inner):
            before = float(self._evaluate())
            with merged(self._inner, plan):
                after = float(self._evaluate())
        losses = torch.tensor([before, after], dtype=torch.float64)
        if self.replicas.world_size > 1:
            self.replicas.mean_([losses])
        before, after = losses.tolist()
        return before, after

    def _plan(self, due: float) -> ShrinkPlan:
        assert self._watch is not None
        watch, options = self._watch, []
        for each in self.neurons:
            counts = self._counts(each)
            moments = self._moments_of(each) if counts else {}
            has_seen = all(held.count * held.ranks >= 2 for held in moments.values())
            if counts and has_seen and due > 0:  # a layer that saw no batch only sits out
                options.append(options_of(self._inner, each, moments, counts))
        positions = watch.positions_by_layer()
        work = Work(self._inner, self.neurons, positions, self.settings.round_to)
        chosen = plan_counts(options, work, due)
        return ShrinkPlan(
            tuple(
                merging_of(
                    self._inner,
                    each,
                    chosen[each.neurons.name],
                    self._moments_of(each.neurons),
                )
                for each in options
                if each.neurons.name in chosen
            )
        )

    def _moments_of(self, each: Neurons) -> dict[str, Moments]:
        assert self._watch is not None
        held = self._watch.moments.items()
        return {path: moments for (name, path), moments in held if name == each.name}

    def _counts(self, each: Neurons) -> list[int]:
        return counts_of(each, self.settings.round_to, self.settings.at_most)

    def _warn_of_few_samples(self) -> None:
        assert self._watch is not None
        for (name, _), each in self._watch.moments.items():
            samples = int(each.count * each.ranks)
            if 0 < samples < 2 * each.width and not self._has_warned:
                self._has_warned = True
                warn(
                    f"{samples} samples were seen of the {each.width} neurons of {name}, too few "
                    "to find sums of others: give more batches= (and every= as many)"
                )

    def _due(self) -> float:
        """Return the unspent budget of the schedule, of all layers together."""
        course, settings = self._course, self.settings
        spent, whole = sum(course.spent.values()), settings.budget * len(self.neurons)
        so_far = whole * settings.schedule(min(1.0, self._done / settings.events))
        return min(course.rate * (so_far - spent), whole - spent)

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _check_budget(budget: float) -> None:
    if not 0 <= budget < 1:
        raise ValueError(
            "budget is a share of the variance of pre-activations, in [0, 1), such as 0.005; got "
            f"{budget!r}"
        )


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
