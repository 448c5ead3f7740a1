"""Merges from weights only, with a bound for every input up to a norm."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from gossipgrad.apoptosis._activations import ACTIVATIONS, Activation
from gossipgrad.apoptosis._merges import greedy_order, largest_within
from gossipgrad.apoptosis._neurons import Neurons, bias_of, weight_of
from gossipgrad.apoptosis._plan import removed_of

__all__ = ["Candidates", "candidates_of", "choose_bounded", "rows_of_layer"]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Upper bounds of each neuron's distance to a multiple of another one, or to a constant.

    Attributes:
        distance: Upper bounds of `|h_j - scale_ji h_i - constant_ji|`, `(width, width + 1)`; the
            last column is for a constant only.
        scale: Shape `(width, width)`.
        constant: Shape `(width, width + 1)`.
    """

    distance: Tensor
    scale: Tensor
    constant: Tensor


def rows_of_layer(model: nn.Module, neurons: Neurons) -> Tensor:
    """Return weights and biases of each neuron, including BatchNorm, `(width, d + 1)`."""
    producer = model.get_submodule(neurons.name)
    weight = weight_of(producer).detach().double().flatten(1)
    bias = bias_of(producer)
    bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
    for path in neurons.companions:
        norm = model.get_submodule(path)
        if (
            not isinstance(norm, _BatchNorm)
            or norm.running_mean is None
            or norm.running_var is None
        ):
            raise ValueError(
                f"{path} lies between {neurons.name} and its activation: bound='worst-case' knows "
                "BatchNorm with running statistics alone; use bound='sample'"
            )
        mean, variance = norm.running_mean.double(), norm.running_var.double()
        scale = (variance + norm.eps).rsqrt()
        if norm.affine:
            scale = scale * norm.weight.detach().double()
        weight, bias = weight * scale[:, None], (bias - mean) * scale
        if norm.affine:
            bias = bias + norm.bias.detach().double()
    return torch.cat([weight, bias[:, None]], 1)


def candidates_of(
    rows: Tensor,
    activation: Activation,
    *,
    norm: float,
    low: Tensor | None = None,
    high: Tensor | None = None,
    absorbs: bool = True,
) -> Candidates:
    """Return all replacements of neurons with bounds of their errors.

    Args:
        rows: Weights and biases, `(width, d + 1)`.
        activation: Their activation.
        norm: Upper bound of the norm of inputs, with 1 for the bias.
        low: The minimum of each input, `(d,)` or, for convolutions, `(d / taps,)`.
        high: The maximum, of the same shape.
        absorbs: Whether consumers can absorb a constant.

    References:
        Own derivation. Parallel: `L ||w_j - a w_i|| ||x||` with `a = <w_i, w_j> / ||w_i||^2`, at
        least 0, for homogeneous activations; a is 1 for others, and mirror images take the other
        sign. Constant: half the range of `s(z)`, by interval arithmetic.
    """
    width, reach = len(rows), activation.lipschitz * norm
    squares = rows.square().sum(1)
    products = rows @ rows.T  # [j, i]
    if activation.is_homogeneous:
        scale = products / squares.clamp(min=1e-300)
        signed = scale.clone()
        if activation.mirror is None:
            signed = scale = scale.clamp(min=0)
        else:
            scale = torch.where(signed < 0, activation.mirror[0] * signed.abs(), signed)
        constant = torch.zeros_like(scale)
    else:
        signed = scale = torch.ones_like(products)
        constant = torch.zeros_like(scale)
        if activation.mirror is not None and (absorbs or not activation.mirror[1]):
            is_mirrored = products < 0
            signed = torch.where(is_mirrored, -1.0, 1.0).to(products)
            scale = torch.where(is_mirrored, activation.mirror[0], 1.0).to(products)
            constant = torch.where(is_mirrored, activation.mirror[1], 0.0).to(products)
    apart = squares[:, None] - 2 * signed * products + signed.square() * squares
    distance = reach * apart.clamp(min=1e-14 * float(squares.max())).sqrt()
    distance.fill_diagonal_(torch.inf)
    middle, radius = _range_of(rows, activation, norm, low, high)
    if not absorbs:
        middle, radius = torch.zeros_like(middle), radius + middle.abs()
    return Candidates(
        torch.cat([distance, radius[:, None]], 1),
        scale,
        torch.cat([constant, middle[:, None]], 1).view(width, width + 1),
    )


def choose_bounded(
    candidates: Candidates, influences: Sequence[Tensor], *, budget: float, at_most: int
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Remove as many neurons as a bound by the triangle inequality allows within the budget.

    Args:
        candidates: Bounds of the replacements' errors.
        influences: By consumer, the largest change of its outputs when a neuron changes by 1,
            divided by the outputs' standard deviation, `(width,)`.
        budget: Upper limit of the square of the bound.
        at_most: The most neurons to remove.

    Returns:
        Indices kept, the fold `(k, r)`, constants `(r,)`, and the square of the largest bound.
    """
    width = len(candidates.scale)
    largest = torch.stack(list(influences)).amax(0)
    order = greedy_order(largest[:, None] * candidates.distance)

    def attempt(count: int) -> tuple[Tensor, Tensor, Tensor, float]:
        removed = torch.tensor(sorted(order[:count]), dtype=torch.long)
        kept = removed_of(width, removed)
        fold = candidates.scale.new_zeros(len(kept), len(removed))
        open_to = torch.cat([kept, torch.tensor([width])])
        distance = candidates.distance[removed][:, open_to]
        if not len(removed):
            return kept, fold, fold.new_zeros(0), 0.0
        least, partner = distance.min(1)
        constants = candidates.constant[removed, open_to[partner]]
        is_pair = partner < len(kept)
        columns = is_pair.nonzero().flatten()
        fold[partner[columns], columns] = candidates.scale[removed, open_to[partner] % width][
            columns
        ]
        bound = max(float((influence[removed] * least).sum()) for influence in influences)
        return kept, fold, constants, bound**2

    most = min(at_most, len(order), width - 1)
    return largest_within(budget, most, attempt, lambda tried: tried[3])


def activation_of(neurons: Neurons) -> Activation:
    """Return the neurons' single known activation."""
    if neurons.activation is None or len(neurons.producers) > 1:
        raise ValueError(
            f"bound='worst-case' needs one producer and one known activation, and {neurons.name} "
            "has others: use bound='sample', or give groups that have"
        )
    return ACTIVATIONS[neurons.activation]


def pads_with_zeros(consumer: nn.Module) -> bool:
    """Whether a consumer pads its input with zeros, so that a constant differs at the border."""
    if not isinstance(consumer, _ConvNd) or consumer.padding_mode != "zeros":
        return False
    return any(consumer._reversed_padding_repeated_twice)


def _range_of(
    rows: Tensor, activation: Activation, norm: float, low: Tensor | None, high: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return middle and radius of each neuron's range."""
    if not activation.is_monotone:
        return rows.new_zeros(len(rows)), rows.new_full((len(rows),), torch.inf)
    weights, bias = rows[:, :-1], rows[:, -1]
    reach = weights.norm(dim=1) * norm
    top, bottom = bias + reach, bias - reach
    if low is not None and high is not None:
        taps = weights.shape[1] // len(low)
        low, high = low.to(rows).repeat_interleave(taps), high.to(rows).repeat_interleave(taps)
        up, down = weights.clamp(min=0), weights.clamp(max=0)
        top = torch.minimum(top, bias + up @ high + down @ low)
        bottom = torch.maximum(bottom, bias + up @ low + down @ high)
    upper, lower = activation.function(top), activation.function(bottom)
    return (upper + lower) / 2, (upper - lower) / 2
