"""p ranks of one model in one process: the accuracy of a large run without its machines."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from gossipgrad.decentralized import (
    GossipAdamW,
    Payload,
    WeightsAndState,
    check_moments,
    travels,
)
from gossipgrad.engine import NON_NEGATIVE, Mode, Stale, Sync
from gossipgrad.topology import Schedule

from ._exchange import Exchange
from ._plan import Lagged, make_plan
from ._replicas import Batching, Loss, Replicas, mean_of
from ._resuming import check_state, kind_of

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


class VirtualRanks:
    """Trains p replicas as p workers would, in this process: same schedules, same mixing.

    Replicas are stacked: every parameter is one tensor of shape `(p, ...)` whose row r is rank
    r's, and a step is a few batched operations. What each rank computes is what it would compute
    in the distributed run, to rounding; nothing is communicated. All ranks step together, and no
    exchange is ever late, but in mode stale each by `delay` rounds.

    `allreduce` keeps one set of weights for all ranks. BatchNorm's statistics are each rank's own
    throughout, and the consensus averages them, as the distributed run does.

    Args:
        model: What every replica starts as, parameters in float32 or float64. It is copied, and
            runs on the device that it is on.
        world_size: How many ranks, p.
        optimizer: Makes the optimizer of all replicas from the stacked parameters, for example
            `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`. One of torch's that update
            each element by itself.
        strategy: `"gossip"`; `"allreduce"` (gradients averaged in every step); `"every-log-p"`
            (weights and state averaged every `ceil(log2 p)` steps, none exchanged between);
            `"local"` (nothing exchanged, but for `average_every`); `"post-local-sgd"` (all-reduce
            for `post_local_after` steps, then local steps with averages).
        topology: Of gossip: a name or a schedule, as in `gossipgrad.gossip`; None: dissemination,
            or matching in mode stale.
        mode: Of gossip: `"overlap"`, `"sync"`, `"stale"`, or `"lagged"` (the authors'
            published rule, which sessions do not have); None: overlap.
        payload: `"weights"`, `"weights+state"` or a value such as `WeightsAndState(every=4)`: what
            gossip exchanges and what periodic averages average; None: weights.
        average_every: Steps between exact averages of all replicas, `"log_p"`, or None for never.
            With `"post-local-sgd"` counted from its second part on.
        exchanges: Of gossip in mode sync: how many partners a step meets, one after the other.
        wire_dtype: What gossip sends everything as; None: as it is.
        post_local_after: Steps of the first part of `"post-local-sgd"`.
        loss: Takes the outputs and targets of one rank, gives a scalar.
        seed: Of the rotation of partners, when `topology` is a name.
        delay: Of mode stale: rounds by which every exchange is late, up to `max_staleness`, which
            is taken for None. The weight is that of `max_staleness`, whatever the delay.
        batching: `"vmap"` runs replicas as one batched operation, `"loop"` one after another;
            `"auto"` loops on a CPU where the model has convolutions, since grouped convolutions
            are slow there.

    Attributes:
        world_size: How many ranks, p.
        optimizer: The one optimizer of all replicas: give it to a scheduler.
        steps: How many were taken.
        clamps: Elements of state that mixing made negative, and were set to 0.

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
        code, are those of `gossipgrad.decentralized._reference`. Lin et al., Don't use large
        mini-batches, use local SGD, arXiv:1808.07217, for `post-local-sgd`.
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
        post_local_after: int | None = None,
        loss: Loss = F.cross_entropy,
        seed: int = 0,
        delay: int | None = None,
        batching: str = "auto",
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, but there is at least one rank")
        _check_model(model)
        self._plan = make_plan(
            world_size,
            strategy=strategy,
            topology=topology,
            mode=mode,
            payload=payload,
            average_every=average_every,
            exchanges=exchanges,
            wire_dtype=wire_dtype,
            post_local_after=post_local_after,
            seed=seed,
            delay=delay,
        )
        self.world_size = world_size
        self._replicas = Replicas(
            model,
            world_size,
            loss=loss,
            batching=_resolve_batching(batching, model, shared=strategy == "allreduce"),
            shared=strategy == "allreduce",
        )
        self._weights = [p.detach() for p in self._replicas.parameters.values()]
        self.optimizer = _checked_optimizer(optimizer, self._replicas)
        self._kind = kind_of(strategy, self._plan, self.optimizer, world_size)
        self._exchange = self._new_exchange()
        self.steps = 0
        self.clamps = 0

    def step(
        self, x: Shaped[Tensor, "rank batch ..."], y: Shaped[Tensor, "rank batch ..."]
    ) -> Float[Tensor, " rank"]:
        """One step of every rank: gradients, the optimizer, and what the strategy exchanges.

        Args:
            x: The batch of each rank, shape `(p, b, ...)`.
            y: The targets of each, shape `(p, b, ...)`.

        Returns:
            The loss of each rank before the update, shape `(p,)`.

        Raises:
            ValueError: When there is not one batch a rank, or Adam's first moment would travel
                without its second.
        """
        for name, batches in (("x", x), ("y", y)):
            if batches.ndim < 1 or len(batches) != self.world_size:
                raise ValueError(
                    f"{name} has shape {tuple(batches.shape)}, but its first size must be the "
                    f"{self.world_size} ranks: stack their batches"
                )
        losses = self._replicas.backward(x, y)
        reduced = self._plan.reduced_steps
        if reduced is not None and self.steps < reduced:
            self._replicas.mean_gradients()
        with torch.no_grad():
            self._update()
        self.steps += 1
        if self._average_is_due():
            self.average_()
        return losses

    @torch.no_grad()
    def average_(self) -> None:
        """Makes every replica the exact average; optimizer state too, where the payload has it.

        What is outstanding in mode stale is mixed first.
        """
        if self._exchange is not None:
            for round in self._exchange.outstanding:
                self._exchange.close(round, self._payload(round))
        with_state = isinstance(self._plan.payload, WeightsAndState)
        for stacked in self._weights + (self._state() if with_state else []):
            stacked.copy_(mean_of(stacked))

    def consensus_distance(self) -> float:
        """Root mean square over ranks of the L2 distance to the mean weights, summed in float64."""
        return self._replicas.distance()

    @torch.no_grad()
    def consensus_model(self) -> nn.Module:
        """A new model with the mean weights and the mean of floating buffers; changes nothing."""
        model = self._replicas.template()
        self._replicas.copy_to(model, None)
        return model

    @torch.no_grad()
    def replica(self, rank: int) -> nn.Module:
        """A new model with the weights and buffers of one rank.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is none of 0 to {self.world_size - 1}")
        model = self._replicas.template()
        self._replicas.copy_to(model, rank)
        return model

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on bit for bit: live tensors, to be saved at once.

        Schedulers and torch's random state are not in it.
        """
        return {
            "kind": dict(self._kind),
            "world_size": self.world_size,
            "steps": self.steps,
            "clamps": self.clamps,
            "weights": {n: p.detach() for n, p in self._replicas.parameters.items()},
            "buffers": dict(self._replicas.buffers),
            "optimizer": self.optimizer.state_dict(),
            "outstanding": self._outstanding(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken.

        Raises:
            ValueError: It is of another model, world size, strategy, topology or seed of it, mode,
                delay, payload, average_every, exchanges, wire_dtype, post_local_after or optimizer;
                nothing is changed.
        """
        own = {"weights": self._replicas.parameters, "buffers": self._replicas.buffers}
        check_state(state, self._kind, own)
        self.optimizer.load_state_dict(state["optimizer"])
        for part, tensors in own.items():
            for name, value in tensors.items():
                value.copy_(state[part][name])
        self.steps = state["steps"]
        self.clamps = state["clamps"]
        self._exchange = self._new_exchange()
        if self._exchange is not None:
            for round, held in state.get("outstanding", {}).items():
                self._exchange.hold(round, self._weights + self._state(), held)

    def _outstanding(self) -> dict[int, list[Tensor | None]]:
        """Deltas that are still to be mixed, by round."""
        exchange = self._exchange
        if exchange is None:
            return {}
        travel = self._weights + self._state()
        return {round: exchange.held(round, travel) for round in exchange.outstanding}

    def _average_is_due(self) -> bool:
        every, reduced = self._plan.average_every, self._plan.reduced_steps
        if every is None or reduced is None or self.steps <= reduced:
            return False
        return (self.steps - reduced) % every == 0

    def _update(self) -> None:
        """The optimizer's step, and around it the round."""
        exchange = self._exchange
        early = exchange is not None and not isinstance(self._plan.mode, Sync)
        if exchange is not None and early:
            exchange.open(self.steps, self._payload(self.steps))
        self.optimizer.step()
        if exchange is None:
            return
        if self.steps == 0:
            for state in self.optimizer.state.values():
                check_moments(self._plan.payload, state)
        if not early:
            for extra in range(self._plan.exchanges):
                self._exchange_now(self.steps * self._plan.exchanges + extra)
            return
        due = self.steps - exchange.delay
        if due >= 0:
            travel = self._payload(due)
            exchange.close(due, travel)
            self._clamp(travel)

    def _exchange_now(self, round: int) -> None:
        assert self._exchange is not None
        travel = self._payload(round)
        self._exchange.open(round, travel)
        self._exchange.close(round, travel)
        self._clamp(travel)

    def _payload(self, round: int) -> list[Tensor]:
        """What is exchanged in a round."""
        payload = self._plan.payload
        if isinstance(payload, WeightsAndState) and round % payload.every == 0:
            return self._weights + self._state()
        return self._weights

    def _state(self) -> list[Tensor]:
        return [v for _, v in self._named_state()]

    def _named_state(self) -> list[tuple[str, Tensor]]:
        """Optimizer state of the parameters' shapes, as far as there is any yet."""
        return [
            (key, value)
            for parameter in self._replicas.parameters.values()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if travels(self._plan.payload, key)
            and isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == parameter.shape
        ]

    def _clamp(self, travelled: list[Tensor]) -> None:
        """What cannot be negative is not, after it was mixed."""
        if len(travelled) == len(self._weights):
            return
        for key, value in self._named_state():
            if key in NON_NEGATIVE:
                self.clamps += int((value < 0).sum())
                value.clamp_(min=0)

    def _new_exchange(self) -> Exchange | None:
        plan = self._plan
        if plan.schedule is None:
            return None
        return Exchange(
            plan.schedule,
            plan.wire_dtype,
            lagged=isinstance(plan.mode, Lagged),
            weight=plan.mode.weight if isinstance(plan.mode, Stale) else None,
            delay=plan.delay,
        )


def _check_model(model: nn.Module) -> None:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameters that are trained: nothing to simulate")
    for name, parameter in trained.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, but virtual ranks keep weights in "
                "float32 or float64: use model.float(); wire_dtype narrows what travels"
            )


def _resolve_batching(batching: str, model: nn.Module, *, shared: bool) -> Batching:
    if batching == "vmap" or batching == "loop":
        return batching
    if batching != "auto":
        raise ValueError(f"batching must be 'auto', 'vmap' or 'loop', got {batching!r}")
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    return "loop" if on_cpu and convolves and not shared else "vmap"


def _checked_optimizer(
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
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for p in parameters}:
        raise ValueError(
            f"the optimizer holds {len(held)} parameters that are not exactly the "
            f"{len(parameters)} it was given: pass all of them on"
        )
    return optimizer
