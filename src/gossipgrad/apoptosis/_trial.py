"""Merges tried in full width: what the model computes then, and back again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossipgrad.apoptosis._plan import ShrinkPlan, removed_of

__all__ = ["Certificate", "certify", "evaluating", "merged", "samples_at_risk"]


@contextmanager
def merged(model: nn.Module, plan: ShrinkPlan) -> Iterator[None]:
    """Inside, the model computes what it will once the plan is applied; shapes stay.

    Removed neurons are computed and read by nobody. Weights are as before outside.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    surgery = plan.surgery(model)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        try:
            for name, shifts in surgery.shifts.items():
                target = buffers[name] if name in buffers else parameters[name]
                kept.append((target, target.clone()))
                for shift in shifts:
                    target.add_(shift.amount(parameters[shift.source]))
            for each in plan.mergings:
                removed = removed_of(each.width, each.kept)
                for path in each.neurons.consumers:
                    weight = parameters[f"{path}.weight"]
                    kept.append((weight, weight.clone()))
                    by_neuron = weight.unflatten(1, (each.width, -1))
                    gone = by_neuron[:, removed]
                    if path in each.folds:
                        fold = each.folds[path].to(gone)
                        by_neuron[:, each.kept] += torch.einsum("or...,kr->ok...", gone, fold)
                    by_neuron[:, removed] = 0
            yield
        finally:
            for tensor, value in reversed(kept):
                tensor.copy_(value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode, without gradients."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a plan can do to the classes of a batch.

    Attributes:
        shift: By how much a logit of the batch changes, at most.
        samples: How many there are.
        at_risk: Share whose class a change by that much could alter: an upper bound of the loss in
            accuracy, on this batch or one on which logits change as little.
        changed: Share whose class does change.
    """

    shift: float
    samples: int
    at_risk: float
    changed: float


def samples_at_risk(logits: Tensor, shift: float) -> Tensor:
    """Whether the class of each sample could change if each logit moves by at most `shift`.

    A class is safe iff it leads by more than twice that.

    Args:
        logits: Shape `(..., classes)`.
        shift: In the largest norm.
    """
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return first - second <= 2 * shift


def certify(model: nn.Module, plan: ShrinkPlan, logits_of: Callable[[], Tensor]) -> Certificate:
    """Computes logits before and after, and how many samples could change their class."""
    with evaluating(model):
        before = logits_of().detach().float().clone()
        with merged(model, plan):
            after = logits_of().detach().float()
    before, after = before.flatten(0, -2), after.flatten(0, -2)
    shift = float((after - before).abs().max())
    at_risk = samples_at_risk(before, shift).float().mean()
    changed = (before.argmax(-1) != after.argmax(-1)).float().mean()
    return Certificate(shift, len(before), float(at_risk), float(changed))
