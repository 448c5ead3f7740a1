"""The choice of merges of one layer from its moments."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gossipgrad.apoptosis._bounds import (
    activation_of,
    candidates_of,
    choose_bounded,
    pads_with_zeros,
    rows_of_layer,
)
from gossipgrad.apoptosis._merges import Consumer, choose
from gossipgrad.apoptosis._moments import Moments
from gossipgrad.apoptosis._neurons import Neurons, taps_of
from gossipgrad.apoptosis._plan import Merging, removed_of

__all__ = ["consumer_of", "judge", "judge_bounded", "why_not_bounded"]


def consumer_of(model: nn.Module, neurons: Neurons, path: str, moments: Moments) -> Consumer:
    """Return a consumer with its measured inputs and current weights."""
    module = model.get_submodule(path)
    second = moments.scatter / moments.count
    mean = moments.mean
    width = mean.shape[1]
    absorbs = neurons.absorber(model, path) is not None
    absorbs = absorbs and not (moments.pools and pads_with_zeros(module))
    if not absorbs:
        flat = mean.flatten()
        second = second + torch.outer(flat, flat).view_as(second)
    return Consumer(
        taps_of(module, width),
        second,
        mean if absorbs else None,
        max(moments.output_variance, 1e-300),
        moments.count * moments.ranks,
    )


def judge(
    model: nn.Module,
    neurons: Neurons,
    moments: Mapping[str, Moments],
    *,
    rule: str,
    budget: float,
    at_most: int,
) -> Merging:
    """Merge as many neurons as the budget allows, by the joint error on the sample."""
    width = neurons.width(model)
    consumers = {p: consumer_of(model, neurons, p, moments[p]) for p in neurons.consumers}
    kept, folds, error = choose(list(consumers.values()), rule=rule, budget=budget, at_most=at_most)
    removed = removed_of(width, kept)
    shifts = {}
    for (path, consumer), fold in zip(consumers.items(), folds, strict=True):
        if consumer.mean is not None:
            mean = consumer.mean.cpu()
            shifts[path] = mean[:, removed] - mean[:, kept] @ fold
    return Merging(
        neurons,
        width,
        kept,
        dict(zip(consumers, folds, strict=True)),
        shifts,
        # The map of gradients is defined for pairs directly after one layer, not for sums of many.
        state_fold=folds[0] if rule == "pairs" and neurons.is_plain else None,
        error=error,
    )


def judge_bounded(
    model: nn.Module,
    neurons: Neurons,
    moments: Mapping[str, Moments],
    *,
    budget: float,
    at_most: int,
) -> Merging:
    """Merge as many neurons as the budget allows, for any input up to the largest norm seen."""
    width = neurons.width(model)
    first = moments[neurons.consumers[0]]
    modules = {path: model.get_submodule(path) for path in neurons.consumers}
    absorbs = all(
        neurons.absorber(model, path) is not None and not pads_with_zeros(module)
        for path, module in modules.items()
    )
    candidates = candidates_of(
        rows_of_layer(model, neurons).cpu(),
        activation_of(neurons),
        norm=first.norm,
        low=first.low.cpu(),
        high=first.high.cpu(),
        absorbs=absorbs,
    )
    influences = [
        _influence(module, width) / max(moments[path].output_variance, 1e-300) ** 0.5
        for path, module in modules.items()
    ]
    kept, fold, constants, error = choose_bounded(
        candidates, influences, budget=budget, at_most=at_most
    )
    shifts = dict.fromkeys(modules, constants[None]) if absorbs else {}
    state_fold = fold if neurons.is_plain else None
    return Merging(
        neurons,
        width,
        kept,
        dict.fromkeys(modules, fold),
        shifts,
        state_fold=state_fold,
        error=error,
    )


def _influence(consumer: nn.Module, width: int) -> Tensor:
    """Bound the norm of the outputs' change when a neuron changes by 1 at all taps."""
    return taps_of(consumer, width).double().cpu().norm(dim=0).sum(0)


def why_not_bounded(model: nn.Module, neurons: Neurons) -> str | None:
    """Return why there is no worst-case bound; None if there is one."""
    try:
        activation_of(neurons)
        rows_of_layer(model, neurons)
    except ValueError as error:
        return str(error)
    return None
