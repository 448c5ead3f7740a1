"""p ranks of one model in one process: the accuracy of a large run without its machines."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import DEFAULT_BUCKET_BYTES
from gossipgrad.decentralized import (
    CheckedOptions,
    GossipAdamW,
    GossipSettings,
    Payload,
    Weights,
    WeightsAndState,
    check_moments,
    resolve_payload,
    resolve_settings,
    travels,
)
from gossipgrad.engine import NON_NEGATIVE, Mode, Overlap, Stale, Sync
from gossipgrad.topology import Schedule

from ._exchange import Exchange
from ._replicas import Batches, Loss, Losses, Ranks, Replicas, mean_of

# Their update of an element reads that element alone, so stacked replicas do not see each other.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
    GossipAdamW,
)
_STRATEGIES = ("gossip", "allreduce", "local")


class VirtualRanks(Ranks):
    """Trains p replicas as p workers would, in this process: same schedules, same mixing.

    Replicas are stacked: every parameter is one tensor of shape `(p, ...)` whose row r is rank
    r's. Gradients are computed rank after rank, update and exchange are batched. Each rank computes
    what it would compute in the distributed run, to rounding; nothing is communicated. All ranks
    step together, and no exchange is late, but in mode stale each by `delay` rounds.

    BatchNorm's statistics are each rank's own, and every average takes them along, as the
    distributed run does.

    Args:
        model: The first state of every replica, parameters in float32 or float64, on the device on
            which to run. It is copied.
        world_size: How many ranks, p.
        optimizer: Makes the optimizer of all replicas from the stacked parameters, for example
            `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`. One of torch's that update
            each element by itself.
        strategy: `"gossip"`; `"allreduce"` (gradients averaged in every step); `"local"` (nothing
            exchanged, but for `average_every`).
        topology: Of gossip: a name or a schedule, as in `gossipgrad.gossip`; None: matching, or
            dissemination in mode lagged, as the authors have it.
        mode: Of gossip: `"overlap"`, `"sync"`, `"stale"`, or `"lagged"` (the authors'
            published rule, which sessions do not have); None: overlap.
        payload: `"weights"`, `"weights+state"` or a value such as `WeightsAndState(every=4)`:
            exchanged by gossip, averaged by periodic averages; None: weights.
        average_every: Steps between exact averages of all replicas, `"log_p"`, or None for never.
        exchanges: Of gossip in mode sync: partners of a step, one after the other.
        wire_dtype: Type of gossip on the wire; None: the tensors' own.
        loss: Takes the outputs and targets of one rank, returns a scalar.
        seed: Of the rotation of partners, when `topology` is a name.
        delay: Of mode stale: rounds by which every exchange is late; at most, and for None,
            `max_staleness`, from which the weight follows.

    Attributes:
        world_size: How many ranks, p.
        optimizer: The one optimizer of all replicas: give it to a scheduler.
        steps: How many steps were taken.
        clamps: Elements of state that mixing made negative and that were set to 0.

    Raises:
        ValueError: For settings that cannot be, a model that cannot be stacked, or an optimizer
            that would mix up the replicas.

    Example:
        >>> import torch
        >>> from gossipgrad.simulate import VirtualRanks
        >>> ranks = VirtualRanks(
        ...     torch.nn.Linear(8, 3), 4, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        ... )
        >>> x, y = torch.randn(4, 16, 8), torch.randint(3, (4, 16))
        >>> ranks.step(x, y).shape  # the loss of each rank
        torch.Size([4])
        >>> ranks.consensus_model()
        Linear(in_features=8, out_features=3, bias=True)

    References:
        Daily et al., GossipGraD, arXiv:1803.05880. The rules, and the deviations from the authors'
        code, are those of `gossipgrad.decentralized._reference`.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        *,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        strategy: str = "gossip",
        topology: str | Schedule | None = None,
        mode: str | Mode | None = None,
        payload: str | Payload | None = None,
        average_every: int | str | None = None,
        exchanges: int = 1,
        wire_dtype: torch.dtype | None = None,
        loss: Loss = F.cross_entropy,
        seed: int = 0,
        delay: int | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, but there is at least one rank")
        gossips = strategy == "gossip"
        ignored = {"topology": topology, "mode": mode, "wire_dtype": wire_dtype}
        if strategy == "allreduce":
            ignored = {"payload": payload, "average_every": average_every, **ignored}
        _check_strategy(strategy, ignored)
        self._lagged = gossips and mode == "lagged"
        usual = "dissemination" if self._lagged else "matching"
        settings = _settings_of_session(
            world_size,
            topology=topology if gossips and topology is not None else usual,
            mode="overlap" if mode is None or self._lagged or not gossips else mode,
            payload=Weights() if payload is None or strategy == "allreduce" else payload,
            average_every=average_every,
            exchanges=exchanges,
            wire_dtype=wire_dtype if gossips else None,
            seed=seed if gossips else 0,
        )
        self._settings = settings
        self._delay = _delay_of(settings.mode, delay)
        self._averages_gradients = strategy == "allreduce"
        super().__init__(Replicas(model, world_size, loss=loss))
        self._weights = [p.detach() for p in self._replicas.parameters.values()]
        self.optimizer = _make_optimizer(optimizer, self._replicas)
        mode = settings.mode
        self._exchange: Exchange | None = None
        if gossips:
            self._exchange = Exchange(
                settings.schedule,
                settings.wire_dtype,
                lagged=self._lagged,
                weight=mode.weight if isinstance(mode, Stale) else None,
            )
        corrects = gossips and isinstance(mode, Sync) and mode.momentum > 0
        self._corrections = [torch.zeros_like(w) for w in self._weights if corrects]
        self.clamps = 0

    def step(self, x: Batches, y: Batches) -> Losses:
        """One step of every rank: gradients, the optimizer, and the exchange of the strategy.

        Args:
            x: The batch of each rank, shape `(p, b, ...)`.
            y: The targets of each, shape `(p, b, ...)`.

        Returns:
            The loss of each rank before the update, shape `(p,)`.

        Raises:
            ValueError: There is not one batch a rank, or Adam's first moment would travel without
                its second.
        """
        losses, every = self._backward(x, y), self._settings.average_every
        with torch.no_grad():
            for parameter in self._replicas.parameters.values() if self._averages_gradients else ():
                assert parameter.grad is not None
                parameter.grad.copy_(mean_of(parameter.grad))
            self._update()
        self.steps += 1
        if every is not None and self.steps % every == 0:
            self.average_()
        return losses

    @torch.no_grad()
    def average_(self) -> None:
        """Makes every replica the exact average; optimizer state too, where the payload has it.

        Running statistics are averaged as well; other buffers stay each rank's own.

        Outstanding exchanges of mode stale are mixed first.
        """
        if self._exchange is not None:
            for round in self._exchange.outstanding:
                self._exchange.close(round, self._tensors_of(round))
        with_state = isinstance(self._settings.payload, WeightsAndState)
        state = self._state() if with_state else []
        for stacked in self._weights + state + self._replicas.statistics():
            stacked.copy_(mean_of(stacked))
        for correction in self._corrections:
            correction.zero_()

    def _update(self) -> None:
        """The optimizer's step, and around it the round."""
        exchange, rounds = self._exchange, self._settings.exchanges
        mode, first = self._settings.mode, self.steps * rounds
        overlaps = isinstance(mode, Sync) and mode.overlap
        if exchange is not None and (overlaps or not isinstance(mode, Sync)):
            exchange.open(first, self._tensors_of(first))
        self.optimizer.step()
        if exchange is None:
            return
        if self.steps == 0:
            for state in self.optimizer.state.values():
                check_moments(self._settings.payload, state)
        if isinstance(mode, Sync):
            for correction, weights in zip(self._corrections, self._weights, strict=False):
                weights.add_(correction.mul_(mode.momentum))
            if overlaps:
                self._close(exchange, first)
            for round in range(first + overlaps, first + rounds):
                exchange.open(round, self._tensors_of(round))
                self._close(exchange, round)
        elif self.steps >= self._delay:
            self._close(exchange, self.steps - self._delay)

    def _close(self, exchange: Exchange, round: int) -> None:
        """Mixes a round; second moments that become negative are set to 0."""
        tensors = self._tensors_of(round)
        mode = self._settings.mode
        gain = mode.gain if isinstance(mode, Sync) else 0.0
        exchange.close(round, tensors, self._corrections, gain)
        if len(tensors) == len(self._weights):
            return
        for key, value in self._named_state():
            if key in NON_NEGATIVE:
                self.clamps += int((value < 0).sum())
                value.clamp_(min=0)

    def _tensors_of(self, round: int) -> list[Tensor]:
        """The tensors that a round exchanges."""
        payload = self._settings.payload
        if isinstance(payload, WeightsAndState) and round % payload.every == 0:
            return self._weights + self._state()
        return self._weights

    def _state(self) -> list[Tensor]:
        return [v for _, v in self._named_state()]

    def _named_state(self) -> list[tuple[str, Tensor]]:
        """Optimizer state of the parameters' shapes, as far as it exists yet."""
        return [
            (key, value)
            for parameter in self._replicas.parameters.values()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if travels(self._settings.payload, key)
            and isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == parameter.shape
        ]


def _check_strategy(strategy: str, of_others: Mapping[str, object]) -> None:
    """Refuses unknown strategies; warns of settings that another strategy than gossip ignores."""
    if strategy not in _STRATEGIES:
        known = ", ".join(map(repr, _STRATEGIES))
        raise ValueError(f"strategy must be one of {known}, got {strategy!r}")
    ignored = [name for name, value in of_others.items() if value is not None]
    if ignored and strategy != "gossip":
        warn(
            f"strategy {strategy!r} ignores {', '.join(ignored)}: leave it out, or choose "
            "strategy='gossip'"
        )


def _settings_of_session(world_size: int, **options: Any) -> GossipSettings:
    """The settings that a session of gossip would have."""
    chosen = CheckedOptions(**options, bucket_bytes=DEFAULT_BUCKET_BYTES)
    payload = resolve_payload(chosen.payload, Overlap())
    if not isinstance(payload, Weights | WeightsAndState):
        raise ValueError(
            f"virtual ranks exchange weights, with or without state, and not {payload}: choose "
            "payload='weights' or 'weights+state'"
        )
    # Local steps, masks and buckets are not simulated.
    settings = resolve_settings(world_size, chosen)
    if not isinstance(settings.mode, Overlap | Sync | Stale):
        raise ValueError(
            f"mode {settings.mode} cannot be simulated: choose 'overlap', 'sync', 'stale' or "
            "'lagged'"
        )
    return settings


def _delay_of(mode: Mode, delay: int | None) -> int:
    if not isinstance(mode, Stale):
        if delay is not None:
            raise ValueError(
                f"delay={delay} with mode {mode}: exchanges are late in mode stale alone; leave it "
                "out, or use mode=Stale(max_staleness=...)"
            )
        return 0
    delay = mode.max_staleness if delay is None else delay
    if not 0 <= delay <= mode.max_staleness:
        raise ValueError(
            f"delay is {delay}, but a round of {mode} is 0 to {mode.max_staleness} rounds late"
        )
    return delay


def _make_optimizer(
    make: Callable[[list[nn.Parameter]], Optimizer], replicas: Replicas
) -> Optimizer:
    parameters = list(replicas.parameters.values())
    optimizer = make(parameters)
    if not isinstance(optimizer, _ELEMENTWISE):
        known = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise ValueError(
            f"{type(optimizer).__name__} may mix up replicas, whose parameters are stacked: use "
            f"one of torch's that update each element by itself, {known}"
        )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained != {id(p) for p in parameters}:
        raise ValueError(
            f"the optimizer has {len(trained)} parameters, but not exactly the "
            f"{len(parameters)} of the ranks: pass all of them on"
        )
    return optimizer
