"""A session of decentralized Muon: trackers before the update, a backbone around it."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    Surgery,
    weight_entries,
)
from gossipgrad.errors import GossipError
from gossipgrad.muon._backbones import Backbone, Polynomial, make_backbone
from gossipgrad.muon._graph import Graph
from gossipgrad.muon._muon import Muon

__all__ = ["SudaSession", "SudaSettings", "SudaStats"]

_TRACKERS = "trackers"
_MOST_ERROR = 0.01  # of trackers, relative: rounding stays far below
_LATE_ROUNDS = 8  # open on one link at once: those of a step, and what is late


@dataclass(frozen=True, kw_only=True)
class SudaSettings(RoundSettings):
    """Everything that `suda()` was asked for, resolved.

    Attributes:
        backbone: How weights are mixed.
        graph: Whom with; its schedule is that of the settings.
    """

    backbone: str | Polynomial
    graph: Graph

    def describe(self) -> dict[str, Any]:
        """What must be equal on all ranks; the schedule tells the graph."""
        described = super().describe()
        del described["graph"]
        return {"backbone": described.pop("backbone"), **described}

    @property
    def snapshots(self) -> int:
        """All of an exchange, and one that still travels."""
        return self.graph.rounds + 1

    @property
    def credits(self) -> int:
        """Rounds that may be open on one link: weights behind backward, trackers, and late ones."""
        return _LATE_ROUNDS


@dataclass(frozen=True, kw_only=True, slots=True)
class SudaStats(Stats):
    """Those of any session, and the two identities, as of the last consensus.

    Attributes:
        tracker_error: How far the mean of trackers is from the mean of what they track, relative to
            the size of that; None before a consensus. Rounding, unless messages were lost.
        dual_error: How far the sum of duals is from zero, relative to their size and that of the
            updates; None before a consensus, 0 for a backbone without duals.
    """

    tracker_error: float | None
    dual_error: float | None


class SudaSession(Session):
    """What `suda()` returns: see there.

    In a step, with `S` what the optimizer would polarise and `W` an exchange: trackers
    `H <- W (H + S - S_before)`; the optimizer steps from `H`; what it has subtracted goes through
    the backbone. Exchanges that need not wait for the update travel behind forward and backward.
    """

    door = "suda"
    can_resize = False
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
        self._before: Iterator[tuple[str, ...]] | None = None
        self._has_tracked = False
        self._generation = 0
        self._errors: tuple[float | None, float | None] = (None, None)
        super().__init__(replica, settings, scaler=scaler, **options)
        if isinstance(self._optimizer, Muon) and self._rounds is not None:
            self._optimizer.track = self._track  # type: ignore[misc]

    # -- what a user calls ------------------------------------------------------------------

    @property
    def round_number(self) -> int:
        """Steps that the run has made: each has several rounds of the engine."""
        return self._run.steps

    def stats(self) -> SudaStats:
        """What this rank has done so far; rounds are steps; no communication."""
        values: dict[str, Any] = asdict(super().stats())
        trackers, duals = self._errors
        values |= {"rounds": self._run.steps, "tracker_error": trackers, "dual_error": duals}
        return SudaStats(**values)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """See `Session.consensus`; checks the identities of trackers and duals, too.

        Where messages were given up since they came too late, and the mean of trackers is more than
        a hundredth from what it must be, trackers and duals begin anew on all ranks when it ends.
        """
        is_broken = False
        try:
            with super().consensus():
                self._check_identities()
                is_broken = (self._errors[0] or 0.0) > _MOST_ERROR
                yield
        finally:
            if is_broken and not self._is_closed:
                self._restart()

    def average_(self) -> None:
        """Makes the living replicas the exact average, trackers too; the backbone begins anew."""
        super().average_()
        self._begin_backbone()

    def accept_changes(self) -> None:
        """Not for this family: raises `GossipError`.

        Duals know of every update; one that they do not know would be repeated in each step.
        """
        raise GossipError(
            "weights that were written on one rank would be taken for an update that never ends: "
            "call session.broadcast_() on every rank, which makes all replicas rank 0's"
        )

    def apply_(self, surgery: Surgery) -> None:
        """Not for this family: raises `GossipError`."""
        raise GossipError(
            "suda() keeps trackers and duals of the shapes that it began with: close the session, "
            "apply the surgery on every rank, and begin another"
        )

    def state_dict(self, *, drain: bool = False, copy: bool = True) -> dict[str, Any]:
        """See `Session.state_dict`; weights that travel behind backward are mixed first."""
        if self._rounds is not None and not self._is_closed and not self._run.is_mid_step:
            self._rounds.close()
        return super().state_dict(drain=drain, copy=copy)

    # -- what the engine calls --------------------------------------------------------------

    @torch.no_grad()
    def _make_flows(self) -> list[Flow]:
        """Weights for averages alone; trackers, and what the backbone exchanges, by hand."""
        replica, of = self.replica, self.settings
        if not replica.trained:
            raise ValueError(
                "the optimizer trains no parameter (all are frozen, or there are none): there is "
                "nothing to mix"
            )
        flows = Flow.deal(
            "weights", Phase.NEVER, weight_entries(replica.trained), of, in_consensus=True
        )
        if self.world_size == 1:
            return flows
        zeros = {name: _zeros(p) for name, p in replica.trained.items()}
        self._trackers, self._sources = zeros, {n: z.clone() for n, z in zeros.items()}
        trackers = self._trackers  # a flow must not hold the session
        entries = [
            Entry(_spec(f"{name}: tracker", zeros[name]), p, lambda name=name: trackers[name])
            for name, p in replica.trained.items()
        ]
        flows += Flow.deal(_TRACKERS, Phase.NEVER, entries, of, behind=flows)
        buckets = [bucket for flow in flows if flow.in_consensus for bucket in flow.buckets]
        backbone = self._backbone = make_backbone(of.backbone, [b.total() for b in buckets])
        for name in backbone.travels:
            held = backbone.held[name]
            entries = [
                Entry(
                    _spec(f"bucket {place}: {name}", flat),
                    buckets[place].entries[0].parameter,
                    lambda held=held, place=place: held[place],
                )
                for place, flat in enumerate(held)
            ]
            flows += Flow.deal(name, Phase.NEVER, entries, of, behind=flows)
        return flows

    def _begin(self) -> None:
        """Begins anew: equal weights, trackers and duals of zero."""
        super()._begin()
        for tensors in (self._sources, self._trackers):
            for tensor in tensors.values():
                tensor.zero_()
        self._begin_backbone()

    def _before_step(self, optimizer: Optimizer, closure: Any) -> Any:
        """Takes down the weights; a foreign optimizer gets tracked gradients."""
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
        held = [p for p in self.replica.trained.values() if p.grad is not None]
        gradients = [local(p.grad).to(widened(p.dtype)) for p in held if p.grad is not None]
        if self._has_scaler and gradients:
            norms = torch.stack(torch._foreach_norm(gradients))
            if not bool(torch.isfinite(norms).all()):
                return closure  # the scaler has left this step out
        for parameter, tracked in zip(held, self._track(held, gradients), strict=True):
            assert parameter.grad is not None
            local(parameter.grad).copy_(tracked)
        return closure

    @torch.no_grad()
    def _track(self, parameters: Sequence[nn.Parameter], sources: Sequence[Tensor]) -> list[Tensor]:
        """`H <- W (H + S - S_before)`, and the exchanges that travel beside it or before."""
        self._restart_if_changed()
        names = {id(p): name for name, p in self.replica.trained.items()}
        held = [names[id(p)] for p in parameters]
        trackers = [self._trackers[name] for name in held]
        before = [self._sources[name] for name in held]
        if held:
            torch._foreach_add_(trackers, torch._foreach_sub(list(sources), before))
            torch._foreach_copy_(before, list(sources))
        self._exchange_trackers()
        return trackers

    def _exchange_trackers(self) -> None:
        self._has_tracked = True
        beside: tuple[str, ...] = ()
        if self._before is None and self._rule.starts_early:  # in sync
            self._before = iter(self._rule.before(self._x))
            beside = next(self._before, ())
        self._exchange((_TRACKERS, *beside))
        for sent in self._before or ():
            self._exchange(sent)
        self._before = None

    @torch.no_grad()
    def _after_update(self) -> None:
        """What the optimizer has subtracted goes through the backbone."""
        if self._rounds is None:
            return
        if not self._has_tracked:  # the step was left out: the partner waits all the same
            self._restart_if_changed()
            self._exchange_trackers()
        update = torch._foreach_sub(self._x, self._weights_now())
        new = self._run_through(self._rule.after(self._weights_mixed(), list(update)))
        for bucket, flat in zip(self._buckets, new, strict=True):
            bucket.load(flat)
        self._x = []

    def _after_step(self, optimizer: Optimizer) -> None:
        super()._after_step(optimizer)
        if self._rounds is not None:
            self._restart_if_changed()
            self._send_early()

    def _family_state(self) -> dict[str, Any]:
        """Trackers by name, and what the backbone keeps by bucket."""
        if self._backbone is None:
            return {}
        state: dict[str, Any] = {
            "sources": {name: _copy(each) for name, each in self._sources.items()},
            "trackers": {name: _copy(each) for name, each in self._trackers.items()},
            "held": {
                name: [_copy(flat) for flat in flats] for name, flats in self._rule.held.items()
            },
            "has_sent": self._before is not None,
        }
        return state

    @torch.no_grad()
    def _load_family_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `_family_state` was taken, with what travelled mixed."""
        self._generation = self.membership.generation
        if self._backbone is None:
            return
        self._before = None
        if state["has_sent"]:
            self._before = iter(self._rule.before(self._weights_now()))
            next(self._before)
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
        """What buckets hold, with what rounding took away: new flat tensors."""
        return [bucket.total() for bucket in self._buckets]

    def _weights_mixed(self) -> list[Tensor]:
        """The weights before an update, with late parts that were mixed since they were done."""
        if self._rule.starts_early:  # such parts come to what is mixed next
            return self._x or self._weights_now()
        return [flat.clone() for flat in self._rule.held["mixed"]]

    def _run_through(self, rule: Generator[tuple[str, ...], None, list[Tensor]]) -> list[Tensor]:
        """Exchanges what a rule yields; what it returns."""
        while True:
            try:
                names = next(rule)
            except StopIteration as end:
                return end.value
            self._exchange(names)

    def _exchange(self, names: tuple[str, ...]) -> None:
        """`W` of what is named: sent to all neighbours from one state, then mixed."""
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
        """The backbone begins from the weights as they are, with nothing in flight."""
        self._before = None
        rounds, block = self._rounds, self.settings.graph.block
        if rounds is None:
            return
        rounds.next_round += -rounds.next_round % block
        self._rule.begin(self._weights_now())
        self._send_early()

    @torch.no_grad()
    def _send_early(self) -> None:
        """Sends what need not wait for the next update, behind forward and backward."""
        if self._rule.starts_early and isinstance(self.mode, Overlap) and self._before is None:
            self._before = iter(self._rule.before(self._weights_now()))
            self._send(next(iter(self._before)))

    @torch.no_grad()
    def _restart_if_changed(self) -> None:
        """In a new generation trackers begin from what each of the living tracks.

        What a lost rank had taken of the sum, or given, is gone with it: the sums over those that
        live are right again at once, since nothing of before is mixed any more.
        """
        if self.membership.generation != self._generation:
            self._generation = self.membership.generation
            self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        if self._rounds is None:
            return
        self._rounds.cancel()
        for name, tracker in self._trackers.items():
            tracker.copy_(self._sources[name])
        self._begin_backbone()

    @torch.no_grad()
    def _check_identities(self) -> None:
        """Sums over each tensor of trackers and duals; one small collective."""
        if self._backbone is None:
            return
        errors = [self._trackers[name] - source for name, source in self._sources.items()]
        duals = self._rule.duals(self._weights_mixed())
        steps = self._rule.held.get("last_update", [])
        sizes = [self._sources.values(), [*duals, *steps]]
        mean = self.group.mean_(
            torch.stack(
                [_sum(each) for each in (*errors, *duals)] + [_size(each) for each in sizes]
            )
        )
        of_trackers, of_duals, (sources, rest) = mean.abs().split([len(errors), len(duals), 2])
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


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float64).cpu()


def _size(tensors: Iterable[Tensor]) -> Tensor:
    return sum((_sum(each.abs()) for each in tensors), torch.zeros((), dtype=torch.float64))
