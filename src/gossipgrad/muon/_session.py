"""A session of decentralized Muon: trackers before the update, a backbone around it."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import TensorSpec, local, widened
from gossipgrad.engine import (
    Entry,
    Flow,
    Overlap,
    Phase,
    Replica,
    RoundSettings,
    Session,
    Stats,
    weight_entries,
)
from gossipgrad.errors import GossipError
from gossipgrad.muon._backbones import Backbone, dual_dtype, make_backbone
from gossipgrad.muon._graph import Graph
from gossipgrad.muon._muon import Muon
from gossipgrad.optim import are_finite

__all__ = ["SudaSession", "SudaSettings", "SudaStats"]

_TRACKERS = "trackers"
_ROUNDING = 1e-4  # relative; that of float64 stays far below, and a lost message goes far above
_LATE_ROUNDS = 8  # open on one link: those of a step, and late ones


@dataclass(frozen=True, kw_only=True)
class SudaSettings(RoundSettings):
    """The resolved settings of `suda()`.

    Attributes:
        backbone: The rule of mixing weights.
        graph: The graph of partners; its schedule is that of the settings.
    """

    backbone: str
    graph: Graph

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks; the schedule implies the graph."""
        described = super().describe()
        del described["graph"]
        return {"backbone": described.pop("backbone"), **described}

    @property
    def snapshots(self) -> int:
        """Snapshots of one exchange, and of one still in flight."""
        return self.graph.rounds + 1

    @property
    def window(self) -> int:
        """Rounds that may be open on one link: weights behind backward, trackers, and late ones."""
        return _LATE_ROUNDS


@dataclass(frozen=True, kw_only=True, slots=True)
class SudaStats(Stats):
    """The counters of a session, and the two identities at the last consensus.

    Attributes:
        tracker_error: Distance of the mean of trackers to the mean of the tracked tensors, relative
            to the latter; None before a consensus. Only rounding, unless messages were lost.
        dual_error: Distance of the sum of duals to zero, relative to the size of the duals; None
            before a consensus, 0 for a backbone without duals. The mean of the weights moves by
            that sum in each step; only rounding, unless messages were lost.
    """

    tracker_error: float | None
    dual_error: float | None


class SudaSession(Session):
    """The session that `suda()` returns.

    In a step, with `S` the tensor that the optimizer would polarise and `W` an exchange: trackers
    `H <- W (H + S - S_before)`; the optimizer steps from `H`; the backbone applies its update.
    Exchanges that do not depend on the update run in parallel to forward and backward.
    """

    call = "suda"
    settings: SudaSettings  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(
        self,
        replica: Replica,
        settings: SudaSettings,
        *,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        (self._optimizer,) = replica.optimizers
        self._has_scaler = scaler is not None
        self._backbone: Backbone | None = None
        self._sources: dict[str, Tensor] = {}
        self._trackers: dict[str, Tensor] = {}
        self._x: list[Tensor] = []
        self._has_sent = self._has_tracked = False  # in this step
        self._has_warned = False
        self._generation = 0
        self._errors: tuple[float | None, float | None] = (None, None)
        super().__init__(replica, settings, scaler=scaler, **options)
        if isinstance(self._optimizer, Muon) and self._rounds is not None:
            self._optimizer.track = self._track  # type: ignore[misc]

    # -- what a user calls ------------------------------------------------------------------

    @property
    def round_number(self) -> int:
        """The run's steps; each has several rounds of the engine."""
        return self._run.steps

    def stats(self) -> SudaStats:
        """Return this rank's counters; rounds are steps; no communication."""
        values: dict[str, Any] = asdict(super().stats())
        trackers, duals = self._errors
        values |= {"rounds": self._run.steps, "tracker_error": trackers, "dual_error": duals}
        return SudaStats(**values)

    @contextmanager
    def _show_consensus(self, shows: Callable[[], bool]) -> Iterator[None]:
        """Check the identities of trackers and duals, which restart on exit if they do not hold."""
        is_broken = False
        try:
            with super()._show_consensus(shows):
                self._check_identities()
                of_trackers, of_duals = (error or 0.0 for error in self._errors)
                is_broken = max(of_trackers, of_duals) > _ROUNDING
                if is_broken:
                    warn(
                        "messages of suda() were lost: the mean of the trackers is off by "
                        f"{of_trackers:.1g} of its size, and the sum of the duals by "
                        f"{of_duals:.1g}. Both restart after this consensus"
                    )
                yield
        finally:
            if is_broken and not self._is_closed:
                self._restart()

    def average_(self) -> None:
        """Set replicas and trackers to their exact average, and restart the backbone."""
        trackers, sources = list(self._trackers.values()), list(self._sources.values())
        with torch.no_grad():
            torch._foreach_add_(trackers, sources)
            try:
                super().average_()
            finally:
                torch._foreach_sub_(trackers, sources)
        self._begin_backbone()

    def state_dict(self, *, drain: bool = False, copy: bool = True) -> dict[str, Any]:
        """See `Session.state_dict`; mixes weights in flight first."""
        if self._rounds is not None and not self._is_closed and not self._run.is_mid_step:
            self._rounds.close()
        return super().state_dict(drain=drain, copy=copy)

    # -- what the engine calls --------------------------------------------------------------

    @torch.no_grad()
    def _make_flows(self) -> list[Flow]:
        """Create flows: weights for averages only; trackers and the backbone's tensors."""
        replica, of = self.replica, self.settings
        if not replica.trained:
            raise ValueError(
                "the optimizer trains no parameter (all are frozen, or there are none): there is "
                "nothing to mix"
            )
        flows = Flow.per_device(
            "weights", Phase.NEVER, weight_entries(replica.trained), of, in_consensus=True
        )
        if self.world_size == 1:
            return flows
        self._sources = {name: _zeros(p) for name, p in replica.trained.items()}
        self._trackers = {
            name: torch.zeros_like(source, dtype=dual_dtype(source))
            for name, source in self._sources.items()
        }
        exchanged = [(name, self._trackers[name], p) for name, p in replica.trained.items()]
        flows += _flows_of(_TRACKERS, exchanged, of, flows)
        buckets = [bucket for flow in flows if flow.in_consensus for bucket in flow.buckets]
        backbone = self._backbone = make_backbone(of.backbone, [b.total() for b in buckets])
        for name in backbone.travels:
            exchanged = [
                (f"bucket {number}", flat, bucket.entries[0].parameter)
                for number, (flat, bucket) in enumerate(
                    zip(backbone.held[name], buckets, strict=True)
                )
            ]
            flows += _flows_of(name, exchanged, of, flows)
        return flows

    def _begin(self) -> None:
        """Restart from the current weights, with zero trackers and duals."""
        super()._begin()
        for tensors in (self._sources, self._trackers):
            for tensor in tensors.values():
                tensor.zero_()
        self._begin_backbone()

    def _before_step(self, optimizer: Optimizer, closure: Any) -> Any:
        """Record the weights; optimizers other than `Muon` get tracked gradients."""
        closure = super()._before_step(optimizer, closure)
        if self._rounds is None:
            return closure
        self._has_tracked = False
        self._x = self._weights_now()
        if isinstance(optimizer, Muon):
            return closure
        if closure is not None:
            raise GossipError(
                "optimizer.step(closure) computes gradients after they should have been exchanged: "
                "call backward() and then step(), or use gg.Muon"
            )
        names = {id(p): name for name, p in self.replica.trained.items()}
        held = [p for p in self.replica.trained.values() if p.grad is not None]
        finite = are_finite(held)
        if self._has_scaler and not all(finite):
            return closure  # the scaler skips this step
        sources = []
        for parameter, is_finite in zip(held, finite, strict=True):
            if is_finite and parameter.grad is not None:
                sources.append(local(parameter.grad).to(widened(parameter.dtype)))
            else:  # it would spoil the trackers of all ranks: the last one counts again
                sources.append(self._sources[names[id(parameter)]].clone())
        if not all(finite) and not self._has_warned:
            self._has_warned = True
            warn(
                "a gradient is not finite, or too large to be squared: in such steps the last one "
                "counts again. This is said once"
            )
        for parameter, tracked in zip(held, self._track(held, sources), strict=True):
            assert parameter.grad is not None
            local(parameter.grad).copy_(tracked)
        return closure

    @torch.no_grad()
    def _track(self, parameters: Sequence[nn.Parameter], sources: Sequence[Tensor]) -> list[Tensor]:
        """Compute `H <- W (H + S - S_before)`, with the exchanges before or next to it."""
        self._restart_if_changed()
        names = {id(p): name for name, p in self.replica.trained.items()}
        held = [names[id(p)] for p in parameters]
        if held:
            torch._foreach_copy_([self._sources[name] for name in held], list(sources))
        return self._exchange_trackers(held)

    def _exchange_trackers(self, held: Sequence[str]) -> list[Tensor]:
        """Exchange all trackers; return `H` of some. Only the sum of deltas, `H - S`, is kept."""
        self._has_tracked = True
        trackers, sources = list(self._trackers.values()), list(self._sources.values())
        torch._foreach_add_(trackers, sources)
        beside: tuple[str, ...] = ()
        if not self._has_sent:  # in sync
            beside = self._rule.before(self._x)
        self._exchange((_TRACKERS, *beside))
        self._has_sent = False
        tracked = [self._trackers[n].to(self._sources[n].dtype, copy=True) for n in held]
        torch._foreach_sub_(trackers, sources)
        return tracked

    @torch.no_grad()
    def _after_update(self) -> None:
        """Pass the optimizer's update through the backbone."""
        if self._rounds is None:
            return
        if not self._has_tracked:  # the step was skipped, but the partner waits
            self._restart_if_changed()
            self._exchange_trackers(())
        new = self._run_through(self._rule.after(self._x, self._weights_now()))
        for bucket, flat in zip(self._buckets, new, strict=True):
            bucket.load(flat)
        self._x = []

    def _after_step(self, optimizer: Optimizer) -> None:
        super()._after_step(optimizer)
        if self._rounds is not None:
            self._restart_if_changed()
            self._send_early()

    def _family_state(self) -> dict[str, Any]:
        """Return trackers by name, and the backbone's tensors by bucket."""
        if self._backbone is None:
            return {}
        state: dict[str, Any] = {
            "sources": {name: _copy(each) for name, each in self._sources.items()},
            "trackers": {name: _copy(each) for name, each in self._trackers.items()},
            "held": {
                name: [_copy(flat) for flat in flats] for name, flats in self._rule.held.items()
            },
            "has_sent": self._has_sent,
        }
        return state

    @torch.no_grad()
    def _load_family_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `_family_state`."""
        self._generation = self.membership.generation
        if self._backbone is None:
            return
        self._has_sent = state["has_sent"]
        for own, saved in (
            (self._sources, state["sources"]),
            (self._trackers, state["trackers"]),
        ):
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        for name, flats in self._rule.held.items():
            for flat, saved in zip(flats, state["held"][name], strict=True):
                flat.copy_(saved)

    # -- its parts --------------------------------------------------------------------------

    @property
    def _rule(self) -> Backbone:
        assert self._backbone is not None
        return self._backbone

    @property
    def _buckets(self) -> list[Any]:
        return [bucket for flow in self._weights for bucket in flow.buckets]

    def _weights_now(self) -> list[Tensor]:
        """Return new flat tensors of the buckets with residuals."""
        return [bucket.total() for bucket in self._buckets]

    def _run_through(self, rule: Generator[tuple[str, ...], None, list[Tensor]]) -> list[Tensor]:
        """Make the exchanges that a rule yields; return its result."""
        while True:
            try:
                names = next(rule)
            except StopIteration as end:
                return end.value
            self._exchange(names)

    def _exchange(self, names: tuple[str, ...]) -> None:
        """Apply `W` to named tensors: send one state to all neighbours, then mix."""
        self._send(names)
        assert self._rounds is not None
        self._rounds.close()

    def _send(self, names: tuple[str, ...]) -> None:
        assert self._rounds is not None
        flows = [flow for flow in self.flows if flow.name in names]
        for _ in range(self.settings.graph.rounds):
            self._rounds.open(flows)

    @torch.no_grad()
    def _begin_backbone(self) -> None:
        """Restart the backbone from the current weights, with nothing in flight."""
        self._has_sent = False
        rounds, block = self._rounds, self.settings.graph.block
        if rounds is None:
            return
        rounds.next_round += -rounds.next_round % block
        self._rule.begin(self._weights_now())
        self._send_early()

    @torch.no_grad()
    def _send_early(self) -> None:
        """Send tensors that do not depend on the next update, during forward and backward."""
        if self._rule.starts_early and isinstance(self.mode, Overlap) and not self._has_sent:
            self._send(self._rule.before(self._weights_now()))
            self._has_sent = True

    @torch.no_grad()
    def _restart_if_changed(self) -> None:
        """Restart trackers in a new generation from each living rank's tracked tensors."""
        # Exchanges with a lost rank have changed the sum over living ranks; it is correct again at
        # once, since no earlier message is mixed any more.
        if self.membership.generation != self._generation:
            self._generation = self.membership.generation
            self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        if self._rounds is None:
            return
        self._rounds.cancel()
        for tracker in self._trackers.values():
            tracker.zero_()
        self._begin_backbone()

    @torch.no_grad()
    def _check_identities(self) -> None:
        """Return sums over each tensor of trackers and duals; one small collective."""
        if self._backbone is None:
            return
        trackers, rule = [*self._trackers.values()], self._rule
        duals = rule.duals_behind() if self._has_sent else rule.duals
        # Duals can be nothing but rounding: where all ranks have the same trackers.
        floor = [torch.finfo(torch.float32).eps * x for x in self._weights_now()]
        sizes = [self._sources.values(), [*duals, *floor]]
        sums = [_sum(each) for each in (*trackers, *duals)]
        mean = self.group.mean_(torch.stack(sums + [_size(each) for each in sizes])).abs()
        of_trackers, of_duals, (sources, rest) = mean.split([len(trackers), len(duals), 2])
        self._errors = (
            (of_trackers.sum() / (sources + 1e-300)).item(),
            (of_duals.sum() / (rest + 1e-300)).item(),
        )

    def _close(self, wait_seconds: float, error: BaseException | None = None) -> None:
        if isinstance(self._optimizer, Muon):
            self._optimizer.__dict__.pop("track", None)
        super()._close(wait_seconds, error)


def _zeros(parameter: nn.Parameter) -> Tensor:
    held = local(parameter.detach())
    return torch.zeros(held.shape, dtype=widened(held.dtype), device=held.device)


def _flows_of(
    name: str,
    tensors: Iterable[tuple[str, Tensor, nn.Parameter]],
    settings: SudaSettings,
    behind: Sequence[Flow],
) -> list[Flow]:
    """Create flows of tensors that may be wider than what is sent of them.

    A delta is then computed in their type from what both ends sent, so no sum over ranks is lost.
    """
    by_wire: dict[torch.dtype, list[Entry]] = {}
    for label, tensor, parameter in tensors:  # not of the session, which no flow may reference
        wire = settings.wire_dtype or widened(parameter.dtype)
        spec = TensorSpec(f"{label}: {name}", tuple(tensor.shape), tensor.dtype)
        entry = Entry(spec, parameter, lambda tensor=tensor: tensor)
        by_wire.setdefault(wire, []).append(entry)
    flows: list[Flow] = []
    for wire, entries in by_wire.items():
        of_wire, before = replace(settings, wire_dtype=wire), (*behind, *flows)
        flows += Flow.per_device(name, Phase.NEVER, entries, of_wire, behind=before)
    return flows


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float64).cpu()


def _size(tensors: Iterable[Tensor]) -> Tensor:
    return sum((_sum(each.abs()) for each in tensors), torch.zeros((), dtype=torch.float64))
