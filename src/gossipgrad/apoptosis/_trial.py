"""Tests of merges at full width, which are undone afterwards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.apoptosis._neurons import bias_of, weight_of
from gossipgrad.apoptosis._plan import Merging, ShrinkPlan
from gossipgrad.apoptosis._surgery import amounts, removed_of

__all__ = ["Certificate", "certify", "evaluating", "merged", "narrow_norms", "samples_at_risk"]


@contextmanager
def merged(model: nn.Module, plan: ShrinkPlan) -> Iterator[None]:
    """Make the model compute inside as after applying the plan; shapes stay.

    Removed neurons are computed but not read. Weights are restored on exit.
    """
    surgery = plan.surgery(model)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), narrow_norms(model, plan.mergings):
        try:
            for target, amount in amounts(model, surgery):
                kept.append((target, target.clone()))
                target.add_(amount)
            for each in plan.mergings:
                for path in each.neurons.consumers:
                    dim, _ = each.neurons.input_of(model, path)
                    for resize in surgery.resizes[f"{path}.weight"]:
                        weight = weight_of(model.get_submodule(path))
                        if resize.entries is each.neurons.entries[f"{path}.weight {dim}"]:
                            kept.append((weight, weight.clone()))
                            resize.add(weight)
                            weight.movedim(dim, 0)[resize.gone] = 0
            yield
        finally:
            for tensor, value in reversed(kept):
                tensor.copy_(value)


@contextmanager
def narrow_norms(model: nn.Module, mergings: Sequence[Merging]) -> Iterator[None]:
    """Make norms over a stream leave out the channels that are removed; shapes stay."""
    handles = []
    for each in mergings:
        for path in each.neurons.row_norms(model):
            norm = model.get_submodule(path)
            indices = each.neurons.entries[f"{path}.weight 0"].indices[:, 0]
            kept, gone = indices[each.kept], indices[removed_of(each.width, each.kept)]
            factor = each.scales.get(path, 1.0) * (len(kept) / each.width) ** 0.5

            def mask(module: nn.Module, inputs: Any, kept: Any = kept, gone: Any = gone) -> Any:
                x = inputs[0].clone()
                is_centred = isinstance(module, nn.LayerNorm)
                x[..., gone] = x[..., kept].mean(-1, keepdim=True) if is_centred else 0
                return (x, *inputs[1:])

            def scale(module: nn.Module, inputs: Any, output: Any, factor: float = factor) -> Any:
                bias = bias_of(module)
                return output * factor if bias is None else (output - bias) * factor + bias

            handles += [norm.register_forward_pre_hook(mask), norm.register_forward_hook(scale)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the model in evaluation mode without gradients inside."""
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
    """The effect of a plan on the classes of a batch.

    Attributes:
        shift: The largest change of a logit of the batch.
        samples: Number of samples.
        at_risk: Share whose class such a change could alter: an upper bound of the loss of
            accuracy, on this batch or one on which logits change as little.
        changed: Share whose class changes.
    """

    shift: float
    samples: int
    at_risk: float
    changed: float


def samples_at_risk(logits: Tensor, shift: float) -> Tensor:
    """Whether the class of each sample could change if each logit changes by at most `shift`.

    A class is safe iff it leads by more than twice that.

    Args:
        logits: Shape `(..., classes)`.
        shift: In the maximum norm.
    """
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return first - second <= 2 * shift


def certify(model: nn.Module, plan: ShrinkPlan, logits_of: Callable[[], Tensor]) -> Certificate:
    """Compute logits before and after, and how many samples could change their class."""
    with evaluating(model):
        before = logits_of().detach().float().clone()
        with merged(model, plan):
            after = logits_of().detach().float()
    before, after = before.flatten(0, -2), after.flatten(0, -2)
    shift = float((after - before).abs().max())
    at_risk = samples_at_risk(before, shift).float().mean()
    changed = (before.argmax(-1) != after.argmax(-1)).float().mean()
    return Certificate(shift, len(before), float(at_risk), float(changed))
