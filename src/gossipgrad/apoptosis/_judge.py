"""The choice of merges of one layer from its moments."""

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.conv import _ConvNd

from gossipgrad.apoptosis._merges import Consumer, choose
from gossipgrad.apoptosis._moments import Moments
from gossipgrad.apoptosis._neurons import Neurons, taps_of
from gossipgrad.apoptosis._plan import Merging, removed_of

__all__ = ["consumer_of", "judge"]


def consumer_of(model: nn.Module, neurons: Neurons, path: str, moments: Moments) -> Consumer:
    """Return a consumer with its measured inputs and current weights."""
    module = model.get_submodule(path)
    dim, held = neurons.input_of(model, path)
    weights = taps_of(module, dim, held)
    second = moments.covariance()
    mean = moments.mean
    variance = moments.output_variance
    if neurons.dropout is not None and not moments.pools and held.indices.numel() == held.size:
        # Its outputs have the noise of dropout, which its inputs are measured without.
        flat = weights.to(second).flatten(1)
        variance = float(((flat @ second.flatten(2).flatten(0, 1)) * flat).sum())
    absorbs = neurons.absorber(model, path) is not None
    absorbs = absorbs and not (moments.pools and _pads_with_zeros(module))
    if not absorbs:
        flat = mean.flatten().to(second)
        second.view(len(flat), len(flat)).addr_(flat, flat)
    return Consumer(
        weights,
        second,
        mean if absorbs else None,
        max(variance, 1e-300),
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
    width = neurons.width
    consumers = {p: consumer_of(model, neurons, p, moments[p]) for p in neurons.consumers}
    kept, folds, error = choose(list(consumers.values()), rule=rule, budget=budget, at_most=at_most)
    removed = removed_of(width, kept)
    shifts = {}
    for (path, consumer), fold in zip(consumers.items(), folds, strict=True):
        if consumer.mean is not None:
            mean = consumer.mean.cpu()
            shifts[path] = mean[:, removed] - mean[:, kept] @ fold.to(mean)
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


def _pads_with_zeros(consumer: nn.Module) -> bool:
    """Whether a consumer pads its input with zeros, so that a constant differs at the border."""
    if not isinstance(consumer, _ConvNd) or consumer.padding_mode != "zeros":
        return False
    return any(consumer._reversed_padding_repeated_twice)
