"""Which family, mode and payload suit a model on a network: by time and known accuracy."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

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

_STEPS = 96  # predicted of each way: their mean is known to a percent
_EQUAL = 0.05  # steps that differ by less are of one length: the model of time is no better
_RANKS = (8, 32, 128)  # at which losses were measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A way to train, and what it costs in accuracy.

    Attributes:
        settings: What to write.
        strategy: Its model of time.
        losses: Points of accuracy below all-reduce after equal epochs with tuned rates, at 8, 32
            and 128 ranks; None where it was not measured.
        rate: How to set the learning rate.
    """

    settings: str
    strategy: Strategy
    losses: tuple[float | None, float | None, float | None]
    rate: str = "that of all-reduce, or half of it at 128 ranks: try both"

    def loss(self, world_size: int) -> float | None:
        """Points below all-reduce at so many ranks: those of the next larger number measured."""
        if world_size == 1:
            return 0.0
        return next(
            (loss for ranks, loss in zip(_RANKS, self.losses, strict=True) if world_size <= ranks),
            self.losses[-1],
        )


def candidates(optimizer: str) -> list[Candidate]:
    """The ways to train that are compared for `"sgd"` or `"adam"`.

    Losses are those of `docs/choosing.md`, of a perceptron on Fashion-MNIST, and of sparse
    gradients at density 0.01 those of `docs/sparsify.md`; a gain counts as none.

    Raises:
        ValueError: It is another optimizer.
    """
    exact = (0.0, 0.0, 0.0)
    shared = [
        Candidate(
            settings="DistributedDataParallel",
            strategy=AllReduce(name="ddp"),
            losses=exact,
            rate="yours",
        ),
        Candidate(
            settings="DistributedDataParallel with fp16_compress_hook",
            strategy=AllReduce(name="ddp, fp16 hook", element_bytes=2),
            losses=exact,
            rate="yours",
        ),
    ]
    if optimizer == "sgd":
        return [
            *shared,
            Candidate(
                settings="gg.gossip(model, optimizer)",
                strategy=Gossip(),
                losses=(0.1, 0.4, 1.5),
            ),
            Candidate(
                settings="gg.gossip(model, optimizer, wire_dtype=torch.bfloat16)",
                strategy=Gossip(name="gossip, bf16 wire", element_bytes=2),
                losses=(0.1, 0.4, 1.5),
            ),
            Candidate(
                settings='gg.gossip(model, optimizer, mode="sync")',
                strategy=Gossip(name="gossip, sync", mode="sync"),
                losses=(0.0, 0.4, 1.1),
            ),
            Candidate(
                settings='gg.gossip(model, optimizer, mode="sync", payload="weights+momentum")',
                strategy=Gossip(
                    name="gossip, sync, momentum", mode="sync", state_every=1, state_copies=1
                ),
                losses=(0.0, 0.0, 0.4),
            ),
            Candidate(
                settings="gg.sparsify(model, optimizer, density=0.01)",
                strategy=Merged(),
                losses=(0.4, None, None),
                rate="that of all-reduce, with the default warm-up of the density",
            ),
        ]
    if optimizer == "adam":
        adamw = "gg.GossipAdamW, and gg.gossip(model, optimizer, "
        return [
            *shared,
            Candidate(
                settings="gg.gossip(model, optimizer)",
                strategy=Gossip(),
                losses=(1.7, 1.7, None),
                rate="up to sqrt(ranks) times that of all-reduce: --lr-rule sqrt",
            ),
            Candidate(
                settings=f'{adamw}mode="sync", payload="weights+momentum")',
                strategy=Gossip(
                    name="gossip, sync, momentum", mode="sync", state_every=1, state_copies=1
                ),
                losses=(0.6, 0.6, None),
                rate="that of all-reduce",
            ),
            Candidate(
                settings=f'{adamw}mode="sync", payload="weights+momentum", exchanges=2)',
                strategy=Gossip(
                    name="gossip, sync, momentum, two exchanges",
                    mode="sync",
                    state_every=1,
                    state_copies=1,
                    exchanges=2,
                ),
                losses=(0.2, 0.2, None),
                rate="that of all-reduce",
            ),
            Candidate(
                settings="gg.sparsify(model, optimizer, density=0.01)",
                strategy=Merged(),
                losses=(None, None, None),
                rate="that of all-reduce, with the default warm-up of the density",
            ),
        ]
    raise ValueError(f"optimizer is {optimizer!r}: accuracy is known of 'sgd' and of 'adam'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A candidate with what is predicted of it.

    Attributes:
        settings: What to write.
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
    """What to use, and why.

    Attributes:
        best: The recommended choice.
        second: The next best; None if nothing else loses as little.
        choices: All that were compared, the fastest first.
        reasons: Why, a sentence each.
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
        batch: With a model: what a step of one rank takes.
        loss: With a model: called as `loss(model, *batch)`; returns a scalar.
        network: What messages cost; None: measured.
        world_size: How many ranks there will be; None: as many as there are.
        most_loss: Points of accuracy below all-reduce, after equal epochs, that are accepted.
        workers: Jitter and stragglers; None: a jitter of 0.1.
        process_group: The ranks between which a network is measured; None: all.
        compared: What to choose among; None: `candidates` of the optimizer.

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
    return _choose(choices, most_loss)


def _choose(choices: list[Choice], most_loss: float) -> Advice:
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
        f"after equal epochs it ends about {best.loss:.1f} points below all-reduce, where that was "
        "measured",
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
            "called as loss(model, *batch), or give a Profile in its place"
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
