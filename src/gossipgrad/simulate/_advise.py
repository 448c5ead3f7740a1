"""Which family, mode and payload suit a model on a network: by time and known accuracy."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from gossipgrad.comm import Group, resolve_group
from gossipgrad.planning import Profile

from ._collective_steps import AllReduce, Merged
from ._gossip_steps import Gossip
from ._model import Strategy, Workers
from ._network import Network
from ._predict import Prediction, predict
from ._probe import probe
from ._record import record_profile

__all__ = ["Advice", "Candidate", "Choice", "advise", "candidates"]

_STEPS = 96  # stepped through for each way: their mean is known to a percent
_EQUAL = 0.05  # steps that differ by less are equal: the model of time is no better
_RANKS = (8, 32, 128)  # at which losses were measured
Losses = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A way to train, and its cost in accuracy.

    Attributes:
        settings: The code.
        strategy: Its model of time.
        losses: Points of accuracy below all-reduce after equal epochs with tuned rates, at 8, 32
            and 128 ranks; None where it was not measured.
        rate: How to set the learning rate.
    """

    settings: str
    strategy: Strategy
    losses: Losses
    rate: str = "that of all-reduce, or half of it at 128 ranks: try both"

    def loss(self, world_size: int) -> float | None:
        """Points below all-reduce at the next larger number of ranks measured, at most 128."""
        if world_size == 1:
            return 0.0
        return self.losses[min(sum(world_size > ranks for ranks in _RANKS), len(_RANKS) - 1)]


def candidates(optimizer: str) -> list[Candidate]:
    """The ways to train that are compared for `"sgd"` or `"adam"`.

    Losses are those of `docs/choosing.md`, of a perceptron on Fashion-MNIST, and of sparse
    gradients at density 0.01 those of `docs/sparsify.md`; a gain counts as none.

    Raises:
        ValueError: It is another optimizer.
    """
    if optimizer not in ("sgd", "adam"):
        raise ValueError(f"optimizer is {optimizer!r}: accuracy is known of 'sgd' and of 'adam'")

    def way(settings: str, strategy: Strategy, losses: Losses, **rate: str) -> Candidate:
        return Candidate(settings=settings, strategy=strategy, losses=losses, **rate)

    exact, unknown = (0.0, 0.0, 0.0), (None, None, None)
    momentum = Gossip(name="gossip, sync, momentum", mode="sync", state_every=1, state_copies=1)
    narrow, ddp = AllReduce(name="ddp, fp16 hook", element_bytes=2), "DistributedDataParallel"
    shared = [
        way(ddp, AllReduce(name="ddp"), exact, rate="yours"),
        way(f"{ddp} with fp16_compress_hook", narrow, exact, rate="yours"),
    ]
    sparse = "gg.sparsify(model, optimizer, density=0.01)"
    warm_up = "that of all-reduce, with the default warm-up of the density"
    if optimizer == "sgd":
        bf16 = Gossip(name="gossip, bf16 wire", element_bytes=2)
        sync = Gossip(name="gossip, sync", mode="sync")
        with_momentum = 'gg.gossip(model, optimizer, mode="sync", payload="weights+momentum")'
        return [
            *shared,
            way("gg.gossip(model, optimizer)", Gossip(), (0.1, 0.4, 1.5)),
            way("gg.gossip(model, optimizer, wire_dtype=torch.bfloat16)", bf16, (0.1, 0.4, 1.5)),
            way('gg.gossip(model, optimizer, mode="sync")', sync, (0.0, 0.4, 1.1)),
            way(with_momentum, momentum, (0.0, 0.0, 0.4)),
            way(sparse, Merged(), (0.4, None, None), rate=warm_up),
        ]
    adamw = (
        'gg.GossipAdamW, and gg.gossip(model, optimizer, mode="sync", payload="weights+momentum"'
    )
    up_to = "up to sqrt(ranks) times that of all-reduce: --lr-rule sqrt"
    equal = "that of all-reduce"
    twice = replace(momentum, name="gossip, sync, momentum, two exchanges", exchanges=2)
    return [
        *shared,
        way("gg.gossip(model, optimizer)", Gossip(), (1.7, 1.7, None), rate=up_to),
        way(f"{adamw})", momentum, (0.6, 0.6, None), rate=equal),
        way(f"{adamw}, exchanges=2)", twice, (0.2, 0.2, None), rate=equal),
        way(sparse, Merged(), unknown, rate=warm_up),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A candidate with its prediction.

    Attributes:
        settings: The code.
        loss: Points of accuracy below all-reduce after equal epochs; None: not measured.
        rate: How to set the learning rate.
        prediction: Of its steps.
    """

    settings: str
    loss: float | None
    rate: str
    prediction: Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A recommendation, with the reasons.

    Attributes:
        best: The recommended choice.
        second: The next best; None if nothing else loses as little.
        choices: All that were compared, the fastest first.
        reasons: A sentence each.
    """

    best: Choice
    second: Choice | None
    choices: tuple[Choice, ...]
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"use {self.best.settings}", f"learning rate: {self.best.rate}", *self.reasons]
        if self.second is not None:
            lines.append(f"second best: {self.second.settings}")
        return "\n".join(lines)


def advise(
    model: nn.Module | Profile,
    optimizer: Optimizer | str = "sgd",
    batch: Sequence[Tensor] = (),
    loss: Callable[..., Tensor] | None = None,
    *,
    network: Network | None = None,
    world_size: int | None = None,
    most_loss: float = 0.5,
    workers: Workers | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    compared: Sequence[Candidate] | None = None,
) -> Advice:
    """Recommends family, mode and payload by the time model and by measured accuracy.

    Of the ways that lose at most `most_loss` points of accuracy the fastest is recommended; among
    those within 5 % of it the one that loses least, and of these the simplest. That a perceptron's
    losses hold for your model is an assumption: try the two best.

    A model is recorded by 25 real steps, and gets its weights and its optimizer's state back. Where
    no network is given, it is measured between the ranks of the process group, which takes 20
    seconds; then this is a collective, and all ranks get the same advice.

    Args:
        model: The model, or a profile of it.
        optimizer: The optimizer, or `"sgd"` or `"adam"` with a profile.
        batch: With a model: the tensors of one rank's step.
        loss: With a model: called as `loss(model, *batch)`; returns a scalar.
        network: Cost of messages; None: measured.
        world_size: How many ranks there will be; None: as many as there are.
        most_loss: Points of accuracy below all-reduce, after equal epochs, that are accepted.
        workers: Jitter and stragglers; None: a jitter of 0.1.
        process_group: The ranks between which a network is measured; None: all.
        compared: The candidates; None: `candidates` of the optimizer.

    Returns:
        The advice.

    Raises:
        ValueError: There is no network and no process group, or a value is out of range.
        GossipError: A rank is late or dies while the network is measured.

    Example:
        >>> from gossipgrad.planning import AffineCost, Profile
        >>> link = AffineCost.from_rate(rate_bits_per_second=1e10, latency_seconds=5e-5)
        >>> found = advise(Profile.load("resnet50"), network=Network(exchange=link), world_size=8)
        >>> found.best.settings
        'gg.gossip(model, optimizer)'
    """
    if not (math.isfinite(most_loss) and most_loss >= 0):
        raise ValueError(f"most_loss is {most_loss}: it counts points of accuracy, 0 or more")
    profile = model if isinstance(model, Profile) else _record(model, optimizer, batch, loss)
    if network is None:
        profile, network, world_size = _measure(profile, process_group, world_size)
    if world_size is None:
        raise ValueError("world_size is missing: how many ranks there will be, such as 16")
    choices = []
    for candidate in candidates(_kind(optimizer)) if compared is None else compared:
        prediction = predict(
            profile,
            network,
            candidate.strategy,
            world_size=world_size,
            workers=workers or Workers(jitter=0.1),
            steps=_STEPS,
        )
        choices.append(
            Choice(
                settings=candidate.settings,
                loss=candidate.loss(world_size),
                rate=candidate.rate,
                prediction=prediction,
            )
        )
    basis = "by the losses given"
    if compared is None:
        basis = _basis(optimizer, world_size)
    return _choose(choices, most_loss, basis)


def _basis(optimizer: Optimizer | str, world_size: int) -> str:
    """What losses were measured with, and what of the user's choice was not."""
    ranks = next((one for one in _RANKS if one >= world_size), _RANKS[-1])
    kind = {"sgd": "SGD", "adam": "Adam"}[_kind(optimizer)]
    basis = f"as measured with {kind} on {ranks} ranks, of a perceptron on Fashion-MNIST"
    unknown = [f"{world_size:,} ranks"] if world_size > _RANKS[-1] else []
    if not isinstance(optimizer, str | SGD | Adam):
        unknown.append(type(optimizer).__name__)
    return basis + (f"; not measured: {' and '.join(unknown)}" if unknown else "")


def _choose(choices: list[Choice], most_loss: float, basis: str) -> Advice:
    simplest_first = list(choices)
    ordered = sorted(choices, key=lambda choice: choice.prediction.step_seconds)
    allowed = [c for c in ordered if c.loss is not None and c.loss <= most_loss]
    if not allowed:
        raise ValueError(f"nothing that is compared is known to lose at most {most_loss:g} points")

    def among_equals(of: list[Choice]) -> Choice:
        longest = (1 + _EQUAL) * of[0].prediction.step_seconds
        equal = [choice for choice in of if choice.prediction.step_seconds <= longest]
        return min(equal, key=lambda c: (c.loss, simplest_first.index(c)))

    best = among_equals(allowed)
    others = [choice for choice in allowed if choice is not best]
    step = best.prediction
    reasons = [
        f"a step takes {step.step_seconds:.3g} s, of which {step.efficiency:.0%} is compute; it "
        f"sends {step.bytes_sent_per_step / 1e6:.3g} MB",
        f"after equal epochs it ends about {best.loss:.1f} points below all-reduce, {basis}",
    ]
    reasons += [
        f"{choice.settings} takes {choice.prediction.step_seconds / step.step_seconds:.3g} times "
        "as long"
        for choice in others[:3]
    ]
    for choice in ordered:
        if choice in allowed or choice.prediction.step_seconds >= step.step_seconds:
            continue
        lost = "was not measured" if choice.loss is None else f"is {choice.loss:.1f} points"
        reasons.append(f"{choice.settings} is faster, and what it loses {lost}")
    return Advice(
        best=best,
        second=among_equals(others) if others else None,
        choices=tuple(ordered),
        reasons=tuple(reasons),
    )


def _kind(optimizer: Optimizer | str) -> str:
    if isinstance(optimizer, str):
        return optimizer
    return "sgd" if isinstance(optimizer, SGD) else "adam"


def _record(
    model: nn.Module,
    optimizer: Optimizer | str,
    batch: Sequence[Tensor],
    loss: Callable[..., Tensor] | None,
) -> Profile:
    """Records a model by real steps, and undoes them."""
    if isinstance(optimizer, str) or loss is None:
        raise ValueError(
            "a model is recorded by real steps: give its optimizer, a batch and a loss that is "
            "called as loss(model, *batch), or give a Profile instead of the model"
        )
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    try:
        return record_profile(model, optimizer, batch, loss)
    finally:
        with torch.no_grad():
            model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()


def _measure(
    profile: Profile, process_group: dist.ProcessGroup | Group | None, world_size: int | None
) -> tuple[Profile, Network, int]:
    """Costs between the ranks there are, and the profile of rank 0."""
    group = resolve_group(process_group, asks="advise()")
    try:
        if group.world_size == 1:
            raise ValueError(
                "there is one rank, so nothing can be measured between ranks: run this under "
                "torchrun on the machines where you will train, or give network= and world_size="
            )
        profile = Profile.from_json(group.broadcast_object(profile.to_json()))
        network = probe(group).network
        return profile, network, world_size or group.world_size
    finally:
        group.close()
