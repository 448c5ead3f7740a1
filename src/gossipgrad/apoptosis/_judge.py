"""The errors and merges of one layer from its moments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gossipgrad.apoptosis._merges import Consumer, errors_of, folds_of, removal_order, split
from gossipgrad.apoptosis._moments import Moments
from gossipgrad.apoptosis._neurons import Neurons, taps_of
from gossipgrad.apoptosis._plan import Merging

__all__ = ["Options", "consumer_of", "merging_of", "options_of"]


_ENOUGH = 4  # rows for each coefficient


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
    samples = moments.count * moments.ranks
    sums_taps = 1 < len(second) <= samples / _ENOUGH / neurons.width
    mean = mean if absorbs else None
    return Consumer(weights, second, mean, max(variance, 1e-300), samples, sums_taps)


@dataclass(frozen=True)
class Options:
    """How many of some neurons may go, and at which error."""

    neurons: Neurons
    order: Sequence[int]  # of their removal
    counts: Sequence[int]  # that may be removed, ascending; the first is 0
    errors: Sequence[float]  # joint, of each count


def options_of(
    model: nn.Module,
    neurons: Neurons,
    moments: Mapping[str, Moments],
    counts: Sequence[int],
) -> Options:
    """Return the errors of some numbers of removed neurons, ascending, on the sample."""
    merges = _may_merge(model, neurons)
    consumers = _consumers(model, neurons, moments)
    order = removal_order(consumers, counts[-1], merges=merges)
    errors = errors_of(consumers, order, counts, merges=merges)
    for number, count in enumerate(counts):
        of_norms = _of_norms(model, neurons, moments, split(order, count)[1])
        errors[number] += max((error for error, _ in of_norms.values()), default=0.0)
    return Options(neurons, order, (0, *counts), (0.0, *errors))


def merging_of(
    model: nn.Module,
    options: Options,
    chosen: int,
    moments: Mapping[str, Moments],
) -> Merging:
    """Return the merges of the chosen option."""
    neurons, count = options.neurons, options.counts[chosen]
    merges = _may_merge(model, neurons)
    consumers = _consumers(model, neurons, moments)
    kept, removed = split(options.order, count)
    folds = folds_of(consumers, options.order, count, merges=merges)
    shifts = {}
    for path, consumer, fold in zip(neurons.consumers, consumers, folds, strict=True):
        if consumer.mean is not None:
            mean = consumer.mean.cpu()
            of_kept = (
                mean[:, kept] @ fold.to(mean)
                if fold.ndim == 2
                else torch.tensordot(mean[:, kept], fold.to(mean), dims=2)
            )
            shifts[path] = mean[:, removed] - of_kept
    return Merging(
        neurons,
        kept,
        dict(zip(neurons.consumers, folds, strict=True)),
        shifts,
        scales={path: s for path, (_, s) in _of_norms(model, neurons, moments, removed).items()},
        error=options.errors[chosen],
    )


def _consumers(
    model: nn.Module, neurons: Neurons, moments: Mapping[str, Moments]
) -> list[Consumer]:
    return [consumer_of(model, neurons, path, moments[path]) for path in neurons.consumers]


def _may_merge(model: nn.Module, neurons: Neurons) -> bool:
    """Whether sums of others may replace them: LayerNorm's mean would change with the sums."""
    norms = map(model.get_submodule, neurons.row_norms(model))
    return not any(isinstance(norm, nn.LayerNorm) for norm in norms)


def _of_norms(
    model: nn.Module, neurons: Neurons, moments: Mapping[str, Moments], removed: Tensor
) -> dict[str, tuple[float, float]]:
    """Return by norm over the neurons the error that is left without some, and its gains' factor.

    A norm divides by the root of the mean square, which loses the share r of those removed. Gains
    make up for its mean; what is left is its variance. LayerNorm subtracts another mean, too.
    """
    found = {}
    for path in neurons.row_norms(model):
        squares, values = moments[f"{path} squares"], moments.get(f"{path} values")
        width, kept = neurons.width, neurons.width - len(removed)
        lost = min(float(squares.mean[0, removed].sum()) / width, 1 - 1e-6)
        variance = squares.second_of_sum(removed, about_mean=True) / width**2
        error = variance / (2 * (1 - lost)) ** 2
        if values is not None:
            error += values.second_of_sum(removed, about_mean=False) / kept**2
        found[path] = error, ((1 - lost) * width / kept) ** 0.5
    return found


def _pads_with_zeros(consumer: nn.Module) -> bool:
    """Whether a consumer pads its input with zeros, so that a constant differs at the border."""
    if not isinstance(consumer, _ConvNd) or consumer.padding_mode != "zeros":
        return False
    return any(consumer._reversed_padding_repeated_twice)
