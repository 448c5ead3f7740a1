"""Which family, mode and payload suit a model on a network: by time and known accuracy."""

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from gossipgrad.comm import Group, resolve_group
from gossipgrad.decentralized import GossipAdamW
from gossipgrad.planning import Profile

from ._collective_steps import AllReduce, Sparse
from ._gossip_steps import Gossip, Suda
from ._model import Strategy, Workers
from ._network import Network
from ._predict import Prediction, predict
from ._probe import probe
from ._record import record_profile

__all__ = ["Advice", "Choice", "Evidence", "advise"]

_STEPS = 96  # stepped through for each way: their mean is known to a percent
_EQUAL = 0.05  # steps that differ by less are equal: the model of time is no better


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a way to train was measured to lose, on a model that is not yours."""

    # `points`: by ranks, points of accuracy below all-reduce after equal epochs with tuned rates,
    # and the half width of their 95 % interval.

    of: str  # the model and data that it was measured with
    points: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    assumes: str = ""  # what is taken for granted, and was not measured; empty: nothing

    def measured_at(self, world_size: int) -> int | None:
        """The least number of ranks that was measured and is not below `world_size`, or None."""
        return min((ranks for ranks in self.points if ranks >= world_size), default=None)

    def loss(self, world_size: int) -> float | None:
        """Points lost at `measured_at`; None where nothing was measured with so many ranks."""
        at = self.measured_at(world_size)
        if world_size == 1:
            return 0.0
        return None if at is None else self.points[at][0]

    def sentence(self, world_size: int) -> str:
        """What is known of that many ranks, with the bound of what was measured."""
        at = self.measured_at(world_size)
        if not self.points:
            return "was not measured"
        if at == _ANY:
            said = "ends as all-reduce does"
        else:
            ranks = max(self.points) if at is None else at
            lost, interval = self.points[ranks]
            said = f"lost {lost:.1f} ± {interval:.1f} points on {ranks} ranks ({self.of})"
            if at is None:
                said += ", and nobody measured more ranks"
        return f"{said}, {self.assumes}" if self.assumes else said


_ANY = sys.maxsize
_EXACT = {_ANY: (0.0, 0.0)}
_ROUNDS = "if 16 bits on the wire cost nothing, which was not measured"
_SGD = "a perceptron on Fashion-MNIST, SGD"
_SMALL = "a small perceptron on Fashion-MNIST, SGD"
_ADAM = "a perceptron on Fashion-MNIST, AdamW"
_SMALL_ADAM = "a small perceptron on Fashion-MNIST, AdamW"
_GOSSIP_SGD = {8: (0.1, 0.8), 32: (0.4, 0.5), 128: (1.5, 0.7)}
_GOSSIP_ADAM = {32: (1.7, 0.3)}

# By optimizer and strategy. benchmarks/results holds the runs: equal_accuracy, local_steps,
# sparse_convergence, staleness.
_MEASURED: dict[str, dict[str, Evidence]] = {
    "sgd": {
        "gossip": Evidence(_SGD, _GOSSIP_SGD),
        "gossip, bf16 wire": Evidence(_SGD, _GOSSIP_SGD, _ROUNDS),
        "gossip-sync": Evidence(_SGD, {8: (0.0, 1.0), 32: (0.3, 0.9), 128: (1.1, 0.9)}),
        "gossip-sync, momentum": Evidence(_SGD, {8: (0.0, 0.3), 32: (0.0, 0.8), 128: (0.4, 1.0)}),
        "gossip-sync, corrected": Evidence(_SMALL, {32: (0.0, 0.1), 128: (0.7, 0.2)}),
        "gossip-sync, corrected, bf16 wire": Evidence(
            _SMALL, {8: (0.0, 0.2), 32: (0.0, 0.1), 128: (0.8, 0.2)}
        ),
        "gossip-sync, corrected, two exchanges in bf16": Evidence(
            _SMALL, {32: (0.0, 0.1), 128: (0.0, 0.2)}
        ),
        "gossip-sync, corrected, overlapped, in bf16": Evidence(
            _SMALL, {8: (0.0, 0.2), 32: (0.0, 0.2), 128: (0.3, 0.2)}
        ),
        "gossip-stale": Evidence(f"{_SGD}, every exchange two rounds late", {8: (0.8, 0.5)}),
        "sparse": Evidence("LeNet on Fashion-MNIST, SGD", {8: (0.4, 0.2)}),
    },
    "adam": {
        "gossip": Evidence(_ADAM, _GOSSIP_ADAM),
        "gossip, bf16 wire": Evidence(_ADAM, _GOSSIP_ADAM, _ROUNDS),
        "gossip-sync": Evidence(_ADAM, {32: (1.1, 0.7)}),
        "gossip-sync, momentum": Evidence(_ADAM, {32: (0.6, 0.3)}),
        "gossip-sync, corrected": Evidence(_SMALL_ADAM, {32: (0.9, 0.2)}),
        "gossip-sync, corrected, bf16 wire": Evidence(
            _SMALL_ADAM, {8: (0.2, 0.2), 32: (1.0, 0.2), 128: (2.4, 0.1)}
        ),
        "gossip-sync, corrected, two exchanges in bf16": Evidence(
            _SMALL_ADAM, {8: (0.0, 0.1), 32: (0.4, 0.1), 128: (1.2, 0.1)}
        ),
        "gossip-sync, corrected, overlapped, in bf16": Evidence(
            _SMALL_ADAM, {8: (0.0, 0.1), 32: (0.6, 0.1), 128: (1.6, 0.2)}
        ),
        "gossip-sync, momentum, two exchanges": Evidence(_ADAM, {32: (0.2, 0.2)}),
        "local-steps": Evidence(_ADAM, {8: (1.4, 0.7), 32: (3.9, 1.0)}),
        "sparse": Evidence("a short run of a character GPT, AdamW", {4: (6.7, 2.9)}),
    },
    "other": {},
}


def _evidence(optimizer: str, strategy: str) -> Evidence:
    if strategy == "allreduce":
        return Evidence("all-reduce itself", _EXACT)
    if strategy == "allreduce, fp16":
        return Evidence("all-reduce itself", _EXACT, _ROUNDS)
    return _MEASURED[optimizer].get(strategy, Evidence("nothing"))


def _candidates(optimizer: str, island: int) -> list[tuple[str, Strategy, str]]:
    """The ways that are compared, the simplest first: code, model of time, learning rate."""
    ddp, momentum = "DistributedDataParallel", {"mode": "sync", "state_copies": 1}
    yours = "yours"
    rate = "that of all-reduce, or half of it at 128 ranks: try both"
    sync = 'gg.gossip(model, optimizer, mode="sync", payload="weights+momentum"'
    if optimizer == "adam":
        rate = "up to sqrt(ranks) times that of all-reduce: --lr-rule sqrt"
        sync = sync.replace("optimizer", "gg.GossipAdamW(...)", 1)
    ways: list[tuple[str, Strategy, str]] = [
        (ddp, AllReduce(), yours),
        (
            f"{ddp} with fp16_compress_hook",
            AllReduce(name="allreduce, fp16", element_bytes=2),
            yours,
        ),
        ("gg.gossip(model, optimizer)", Gossip(), rate),
        (
            "gg.gossip(model, optimizer, wire_dtype=torch.bfloat16)",
            Gossip(name="gossip, bf16 wire", element_bytes=2),
            rate,
        ),
        (
            'gg.gossip(model, optimizer, mode="sync")',
            Gossip(name="gossip-sync", mode="sync"),
            rate,
        ),
        (
            "gg.gossip(model, optimizer, mode=gg.Sync(momentum=0.9))",
            Gossip(name="gossip-sync, corrected", mode="sync"),
            rate,
        ),
        (
            "gg.gossip(model, optimizer, mode=gg.Sync(momentum=0.9), wire_dtype=torch.bfloat16)",
            Gossip(name="gossip-sync, corrected, bf16 wire", mode="sync", element_bytes=2),
            rate,
        ),
        (
            "gg.gossip(model, optimizer, mode=gg.Sync(momentum=0.9), exchanges=2, "
            "wire_dtype=torch.bfloat16)",
            Gossip(
                name="gossip-sync, corrected, two exchanges in bf16",
                mode="sync",
                exchanges=2,
                element_bytes=2,
            ),
            rate,
        ),
        (
            "gg.gossip(model, optimizer, mode=gg.Sync(momentum=0.9, overlap=True), exchanges=2, "
            "wire_dtype=torch.bfloat16)",
            Gossip(
                name="gossip-sync, corrected, overlapped, in bf16",
                mode="sync",
                exchanges=2,
                overlap=True,
                element_bytes=2,
            ),
            rate,
        ),
        (f"{sync})", Gossip(name="gossip-sync, momentum", **momentum), yours),
        (
            'gg.gossip(model, optimizer, mode="stale")',
            Gossip(name="gossip-stale", mode="stale"),
            rate,
        ),
        (
            "gg.gossip(model, optimizer, compress=gg.SharedMask(0.1))",
            Gossip(name="gossip-mask", density=0.1),
            rate,
        ),
        (
            'gg.gossip(model, optimizer, mode="sync", local_steps=32)',
            Gossip(name="local-steps", mode="sync", every=32),
            "tune it, and the outer one: docs/settings.md",
        ),
        ("gg.sparsify(model, optimizer)", Sparse(), yours),
        ("gg.suda(model, gg.Muon(model))", Suda(), "that of gg.Muon"),
    ]
    if optimizer == "adam":
        twice = Gossip(name="gossip-sync, momentum, two exchanges", exchanges=2, **momentum)
        ways.insert(6, (f"{sync}, exchanges=2)", twice, yours))
    if island > 1:
        axes = ', mesh=mesh["gossip"], island=mesh["node"])'
        ways = [
            (code[:-1] + axes if isinstance(of, Gossip) else code, of, how)
            for code, of, how in ways
            if not (isinstance(of, Gossip) and of.overlap)  # islands refuse it
        ]
    return ways


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A way to train with its prediction.

    Attributes:
        settings: The code.
        loss: Points of accuracy below all-reduce after equal epochs, as `evidence` says; None:
            nothing was measured with so many ranks.
        is_assumed: Whether `loss` rests on something that was not measured.
        evidence: What was measured, with which model and ranks, and what is assumed, in words.
        rate: How to set the learning rate.
        prediction: Of its steps.
    """

    settings: str
    loss: float | None
    is_assumed: bool
    evidence: str
    rate: str
    prediction: Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A recommendation, with the reasons.

    Attributes:
        best: The recommended choice.
        second: The next best; None if nothing else is known to lose as little.
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
        return "\n".join([f"Use {self.best.settings}", *self.reasons])


def advise(
    model: nn.Module | Profile | str,
    optimizer: Optimizer | str = "sgd",
    batch: Sequence[Tensor] = (),
    loss: Callable[..., Tensor] | None = None,
    *,
    network: Network | None = None,
    world_size: int | None = None,
    most_loss: float = 0.5,
    workers: Workers | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    island: int = 1,
    inside: Network | None = None,
) -> Advice:
    """Recommends family, mode and payload by predicted step time and known accuracy.

    Of the ways that are known to lose at most `most_loss` points of accuracy the fastest is
    recommended; among those within 5 % of it the one that loses least, and of these the simplest.
    Accuracy was measured with small models, SGD and Adam, and up to 128 ranks. For your model it is
    an assumption, which the reasons repeat, and where nothing was measured a way is not
    recommended.

    A model is recorded by 25 real steps, and gets its weights and its optimizer's state back. Where
    no network is given, it is measured between the ranks of the process group, which takes 20
    seconds; then this is a collective, and all ranks get the same advice.

    Args:
        model: The model, a profile of it, or the name of a built-in profile.
        optimizer: The optimizer, or with a profile `"sgd"`, `"adam"` or `"other"`.
        batch: With a model: the tensors of one rank's step.
        loss: With a model: called as `loss(model, *batch)`; returns a scalar.
        network: Cost of messages; None: measured.
        world_size: How many ranks there will be; None: as many as there are.
        most_loss: Points of accuracy below all-reduce, after equal epochs, that are accepted.
        workers: Jitter and stragglers; None: a jitter of 0.1.
        process_group: The ranks between which a network is measured; None: all.
        island: Ranks of a node, which share its link: those that gossip are islands.
        inside: Cost of messages inside a node; None: 100 Gbit/s.

    Returns:
        The advice.

    Raises:
        ValueError: There is no network and no process group, or a value is out of range.
        GossipError: A rank is late or dies while the network is measured.

    Example:
        >>> found = advise("resnet50", network=Network.from_rate(1e10), world_size=8)
        >>> found.best.settings
        'gg.gossip(model, optimizer)'
    """
    if not (math.isfinite(most_loss) and most_loss >= 0):
        raise ValueError(f"most_loss is {most_loss}: it counts points of accuracy, 0 or more")
    kind = _kind(optimizer)
    if isinstance(model, nn.Module):
        profile = _record(model, optimizer, batch, loss)
    else:
        profile = Profile.load(model) if isinstance(model, str) else model
    if network is None:
        profile, network, world_size = _measure(profile, process_group, world_size)
    if world_size is None:
        raise ValueError("world_size is missing: how many ranks there will be, such as 16")
    workers = workers or Workers(jitter=0.1)
    choices = []
    for code, strategy, rate in _candidates(kind, island):
        evidence = _evidence(kind, strategy.name)
        found = predict(
            profile,
            network,
            strategy,
            world_size=world_size,
            workers=workers,
            steps=_STEPS,
            island=island,
            inside=inside,
        )
        replicas = world_size // island if isinstance(strategy, Gossip) else world_size
        lost, said = evidence.loss(replicas), evidence.sentence(replicas)
        if strategy.name == "gossip-stale" and _skips_rounds(found, profile, island):
            lost, said = None, "skips most rounds on these links, which was not measured"
        choices.append(
            Choice(
                settings=code,
                loss=lost,
                is_assumed=bool(evidence.assumes),
                evidence=said,
                rate=rate,
                prediction=found,
            )
        )
    return _choose(choices, most_loss, profile, network)


def _skips_rounds(found: Prediction, profile: Profile, island: int) -> bool:
    """Whether a rank of mode stale sends its weights in less than every other step."""
    sent_bytes = island * found.bytes_sent_per_step
    return found.world_size > island and sent_bytes < profile.size_bytes / 2


def _choose(
    simplest_first: list[Choice], most_loss: float, profile: Profile, network: Network
) -> Advice:
    ordered = sorted(simplest_first, key=lambda choice: choice.prediction.step_seconds)
    allowed = [c for c in ordered if c.loss is not None and c.loss <= most_loss]

    def among_equals(of: list[Choice]) -> Choice:
        longest = (1 + _EQUAL) * of[0].prediction.step_seconds
        equal = [choice for choice in of if choice.prediction.step_seconds <= longest]
        return min(equal, key=lambda c: (c.loss, simplest_first.index(c)))

    best = among_equals(allowed)
    others = [choice for choice in allowed if choice is not best]
    second = among_equals(others) if others else None
    return Advice(
        best=best,
        second=second,
        choices=tuple(ordered),
        reasons=tuple(_reasons(best, second, ordered, most_loss, profile, network)),
    )


def _reasons(
    best: Choice,
    second: Choice | None,
    ordered: list[Choice],
    most_loss: float,
    profile: Profile,
    network: Network,
) -> list[str]:
    step, compute = best.prediction.step_seconds, profile.compute_seconds
    exchange = network.exchange(profile.size_bytes)

    def faster(choice: Choice) -> str:
        times = step / choice.prediction.step_seconds
        return f"{choice.settings} is {times:.3g} times as fast"

    said = [
        f"A step takes {_seconds(step)}, of which {100 * best.prediction.efficiency:.0f} % is "
        "compute.",
        f"One exchange of all weights takes {_seconds(exchange)}, compute {_seconds(compute)}.",
    ]
    if exchange > compute > network.exchange.alpha_seconds:
        needed = 8e-9 * profile.size_bytes / (compute - network.exchange.alpha_seconds)
        said[1] += f" Gossip would hide it behind compute from {needed:.3g} Gbit/s on."
    said.append(f"Accuracy: it {best.evidence}.")
    if not best.prediction.strategy.startswith("allreduce"):
        said[-1] += " That was another model than yours: try the two best."
    said.append(f"Learning rate: {best.rate}.")
    if second is not None:
        times = second.prediction.step_seconds / step
        longer = f"{times:.3g} times as long" if times > 1 + _EQUAL else "about as long"
        said.append(f"Second best: {second.settings}, with a step {longer}.")
    others = [c for c in ordered if c.prediction.step_seconds < (1 - _EQUAL) * step]
    if known := [choice for choice in others if choice.loss is not None]:
        said.append(
            f"{faster(known[0])}, but it {known[0].evidence}; most_loss={most_loss:g} does not "
            "accept that."
        )
    unknown = [choice for choice in others if choice.loss is None]
    said += [f"{faster(choice)}, but it {choice.evidence}." for choice in unknown[:2]]
    return said


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _kind(optimizer: Optimizer | str) -> str:
    if isinstance(optimizer, str):
        if optimizer not in _MEASURED:
            raise ValueError(
                f"optimizer is {optimizer!r}: accuracy is known of 'sgd' and 'adam'; 'other' "
                "compares without it"
            )
        return optimizer
    if isinstance(optimizer, SGD):
        return "sgd"
    return "adam" if isinstance(optimizer, Adam | AdamW | GossipAdamW) else "other"


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
