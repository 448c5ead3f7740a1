"""The function `shrink`: creates a shrink session from its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossipgrad.apoptosis._find import Found, find
from gossipgrad.apoptosis._neurons import Neurons
from gossipgrad.apoptosis._session import ShrinkSession, ShrinkSettings, cosine
from gossipgrad.apoptosis._surgery import check_resizable
from gossipgrad.comm import DEFAULT_BUCKET_BYTES, Group, resolve_group, resolve_optimizers
from gossipgrad.engine import (
    Flow,
    Replica,
    RoundSettings,
    Session,
    Sync,
    check_model,
)
from gossipgrad.topology import by_name

__all__ = ["shrink"]


def shrink(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    example_input: Any = None,
    groups: Sequence[Neurons] | None = None,
    budget: float = 0.005,
    every: int = 200,
    events: int = 10,
    schedule: Callable[[float], float] = cosine,
    batches: int = 16,
    evaluate: Callable[[], Any] | None = None,
    tolerance: float = 0.01,
    round_to: int = 16,
    at_most: float = 0.5,
    start: int | None = None,
    session: Session | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    copies: Sequence[nn.Module] = (),
) -> ShrinkSession:
    """Shrink `model` during training: merge redundant neurons into others.

    Every `every` steps, hidden neurons that others can replace are removed, and the weights of the
    layers that read them are adjusted. Parameters stay the same objects and become smaller, with
    the optimizer's state, so steps get faster and messages smaller. It works by hooks; the training
    loop stays the user's. A collective with several ranks: all make the same plan, from means over
    ranks, at the same steps.

    Args:
        model: Not wrapped by DistributedDataParallel: pass its `.module`, and `wrap`.
        optimizer: The optimizer, or several.
        example_input: Input of the model, to find the layers that may shrink: a tensor of a few
            samples, a tuple of arguments, or a mapping. Not needed with `groups`.
        groups: The neurons that may be removed, if they cannot be found automatically.
        budget: Share of the variance of a layer's pre-activations that all merges in the layer
            before it may change, summed over events; the mean of the layers that may shrink. Those
            get more of it whose neurons save more time. 0 removes no neuron.
        every: Steps between two events.
        events: Number of events; afterwards widths stay.
        schedule: Share of the budget that may be spent after a share of the events, from
            `schedule(0) = 0` to `schedule(1) = 1`; by default a quarter of a sine, so most of it is
            spent early.
        batches: Training batches that are measured before each event.
        evaluate: Loss on held-out samples; called in evaluation mode, before and after merges are
            tested. If it rises by more than `tolerance`, nothing is removed in this event, and less
            is spent afterwards; if it hardly rises, more.
        tolerance: Allowed rise, as a share of that loss.
        round_to: Layers keep a multiple of so many outputs, at least one: what vectors and tensor
            cores compute at once. 16 suits accelerators and CPUs with AVX-512.
        at_most: Share of a layer's neurons that one event may remove.
        start: `session.position` that events are counted from, equal on all ranks; None: the
            current one. A joiner passes that of the others.
        session: A session of `gossip()`, `sparsify()` or `suda()` with this model and optimizer:
            its ranks shrink together, and its messages with the model.
        process_group: The ranks that shrink together without a session; by default all.
        wrap: Creates `session.model` again after each event: `wrap=DistributedDataParallel`.
        copies: Models of the same architecture to shrink too, such as an average of weights over
            time.

    Returns:
        The session; `describe()` lists layers that may shrink, and why others do not.

    Raises:
        ValueError: For invalid settings, or a group that the model does not have.
        AgreementError: The ranks differ in names, shapes or settings.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        ... )
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> x = torch.randn(256, 4)
        >>> session = gg.shrink(model, optimizer, example_input=x, every=2, events=1, batches=1)
        >>> with session:
        ...     for _ in range(3):
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> session.widths()["0"] < 64
        True

    References:
        Siegel, Daily, Vishnu, Adaptive neuron apoptosis for accelerating deep learning on large
        scale systems, arXiv:1610.00790; what is taken from it and what is ours is numbered in
        `gossipgrad.apoptosis._reference`.
    """
    optimizers = resolve_optimizers(optimizer)
    check_model(model)
    check_resizable(optimizers)
    settings = ShrinkSettings(
        budget=budget,
        every=every,
        events=events,
        batches=batches,
        schedule=schedule,
        tolerance=tolerance,
        round_to=round_to,
        at_most=at_most,
        start=start,
    )
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model is wrapped by DistributedDataParallel, which cannot change shapes: pass "
            "model.module and wrap=DistributedDataParallel, and call session.model in training"
        )
    if session is not None:
        replica = session.replica
        if replica.model is not model or [*map(id, replica.optimizers)] != [*map(id, optimizers)]:
            raise ValueError("session is of another model or optimizer: pass the same to both")
        if process_group is not None:
            raise ValueError("session has its own ranks: leave process_group out")
    found = _found(model, example_input, groups)
    found = _trained(found, model, optimizers)
    replicas = session
    if replicas is None:
        group = resolve_group(process_group, asks="shrink()")
        try:
            replicas = _Replicas(
                Replica(model, optimizers, call="shrink"), _lockstep(group.world_size), group=group
            )
        except BaseException:
            group.close()
            raise
    return ShrinkSession(
        replicas,
        found,
        settings,
        owns_replicas=session is None,
        evaluate=evaluate,
        wrap=wrap,
        copies=copies,
    )


class _Replicas(Session):
    """Replicas that are kept equal by other means, or a single one; it sends no tensors."""

    call = "shrink"
    counts_skipped_steps = False

    def _make_flows(self) -> list[Flow]:
        return []


def _lockstep(world_size: int) -> RoundSettings:
    return RoundSettings(
        schedule=by_name("dissemination", world_size),
        mode=Sync(),
        every=1,
        average_every=None,
        wire_dtype=None,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
    )


def _found(model: nn.Module, example_input: Any, groups: Sequence[Neurons] | None) -> Found:
    if groups is None:
        if example_input is None:
            raise ValueError(
                "give example_input, with which shrink() runs the model to find which layers may "
                "shrink, or groups=[gg.Neurons(producer, consumer)]"
            )
        return find(model, example_input)
    seen: set[str] = set()
    for each in groups:
        if (why := each.why_not(model)) is not None:
            raise ValueError(f"groups: {why}")
        if seen & {*each.producers}:
            raise ValueError(f"groups: {each.name} is in two of them")
        seen |= {*each.producers}
    return Found(tuple(each.located(model) for each in groups), {})


def _trained(found: Found, model: nn.Module, optimizers: Sequence[Optimizer]) -> Found:
    """Refuse layers with a parameter that is frozen, in no optimizer, or in parts in `gg.Muon`."""
    held, in_parts = set(), set()
    for group in (group for o in optimizers for group in o.param_groups):
        held |= {*map(id, group["params"])}
        layouts = zip(group["params"], group.get("layouts", ()), strict=False)
        in_parts |= {id(p) for p, (_, parts) in layouts if parts != 1}
    reasons = {}
    for each in found.neurons:
        parameters = list(each.parameters(model))
        if any(id(p) not in held for p in parameters):
            reasons[each.name] = "no optimizer that is passed trains all of its parameters"
        elif not all(p.requires_grad for p in parameters):
            reasons[each.name] = "parameters of it are frozen"
        elif any(id(p) in in_parts for p in parameters):
            reasons[each.name] = "gg.Muon polarises parts of it (split=, groups of a convolution)"
    return found.without(reasons)
