"""Apoptosis in loops over samples: the results that `_merges` computes from moments.

A hidden layer makes `h = s(W x + b)`, its consumer `y = V h + c`. A neuron j is removed, and others
replace its part in y, `V_j h_j`.

Of the paper (Siegel, Daily, Vishnu, arXiv:1610.00790) the abstract and the beginning of the
introduction could be read, and no code was published. Of the paper are:

P1. Redundant neurons are removed during the training phase itself, at low overhead.
P2. Several neuron types are handled, and the loss of accuracy is bounded.
P3. How much is removed adapts.
P4. Replicas are trained in parallel, on the software of MaTEx: equal, with summed gradients.

How neurons are compared, merged and bounded there, how often, and by what threshold, is not known.
Ours, derived and tested here, are:

O1. Exact merges: `w_j = a w_i`, a > 0, for homogeneous s; mirror images of tanh and sigmoid; dead
    and constant neurons.
O2. A bound for the worst case: `L ||V_j|| ||w_j|| sin(angle) ||x||`, and interval arithmetic. It is
    6 to 100 times as large as the error on a sample, and only here.
O3. Merges by covariance: `h_j` becomes `a h_i + b` with `a = C_ij / C_ii`, at the cost
    `||V_j||^2 (C_jj - C_ij^2 / C_ii)`; with several others, least squares on all that stay, chosen
    by a pivoted Cholesky decomposition.
O4. The joint error of many merges, never a sum of errors; a greedy order, and bisection.
O5. The state of optimizers: momentum follows the map of gradients, second moments its Minkowski
    bound; where neurons become sums of many, none of it.
O6. A budget over the run, spent early; loss on held-out samples before and after; a rate.
O7. A certificate: samples whose class leads by more than twice the change of any logit are safe.
O8. Replicas that differ: one plan from mean moments. Surgery is linear in weights, so it commutes
    with averaging.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "bound_of_constant",
    "bound_of_pair",
    "change_of_outputs",
    "merge_in_pairs",
    "pair",
]


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of one number.

    Attributes:
        function: On tensors.
        lipschitz: The Lipschitz constant.
        is_homogeneous: `s(a z) = a s(z)` for all `a > 0`.
        mirror: `(sign, constant)` with `s(-z) = sign s(z) + constant`; None: there is none.
        is_monotone: Whether it never decreases.
    """

    function: Callable[[Tensor], Tensor]
    lipschitz: float = 1.0
    is_homogeneous: bool = False
    mirror: tuple[float, float] | None = None
    is_monotone: bool = True


ACTIVATIONS = {
    "identity": Activation(lambda z: z, is_homogeneous=True, mirror=(-1.0, 0.0)),
    "relu": Activation(F.relu, is_homogeneous=True),
    "leaky_relu": Activation(F.leaky_relu, is_homogeneous=True),
    "abs": Activation(torch.abs, is_homogeneous=True, mirror=(1.0, 0.0), is_monotone=False),
    "tanh": Activation(torch.tanh, mirror=(-1.0, 0.0)),
    "sigmoid": Activation(torch.sigmoid, lipschitz=0.25, mirror=(-1.0, 1.0)),
    "gelu": Activation(F.gelu, lipschitz=1.13, is_monotone=False),
    "silu": Activation(F.silu, lipschitz=1.1, is_monotone=False),
    "relu6": Activation(F.relu6),
    "hardtanh": Activation(F.hardtanh, mirror=(-1.0, 0.0)),
    "softsign": Activation(F.softsign, mirror=(-1.0, 0.0)),
    "elu": Activation(F.elu),
}


def bound_of_pair(
    w_j: Tensor, w_i: Tensor, activation: Activation, norm: float
) -> tuple[float, float, float]:
    """Bound `|h_j - a h_i - b|` for every input up to a norm, from weights alone (O1, O2).

    Args:
        w_j: Weights and bias of the neuron.
        w_i: Weights and bias of the one that replaces it.
        activation: The activation of both.
        norm: Upper bound of the norm of inputs, with 1 for the bias.

    Returns:
        The bound, a and b: `L ||w_j - c w_i|| ||x||`, and c is a, or its mirror image.
    """
    inner, square = float(w_i @ w_j), float(w_i @ w_i)
    sign, constant = activation.mirror if activation.mirror is not None else (1.0, 0.0)
    is_mirrored = inner < 0 and activation.mirror is not None
    size = abs(inner) / square if activation.is_homogeneous and square else 1.0
    if activation.is_homogeneous and inner < 0 and not is_mirrored:
        size = 0.0
    c = -size if is_mirrored else size
    bound = activation.lipschitz * float((w_j - c * w_i).norm()) * norm
    return bound, sign * size if is_mirrored else size, constant if is_mirrored else 0.0


def bound_of_constant(
    w: Tensor, activation: Activation, norm: float, low: Tensor, high: Tensor
) -> tuple[float, float]:
    """Bound `|h - b|` by interval arithmetic, for inputs from low to high up to a norm (O2).

    Returns:
        The bound and b: half the range, and its middle.
    """
    if not activation.is_monotone:
        return math.inf, 0.0
    weights, bias = w[:-1], w[-1]
    up, down, reach = weights.clamp(min=0), weights.clamp(max=0), weights.norm() * norm
    top = activation.function(torch.minimum(bias + reach, bias + up @ high + down @ low))
    bottom = activation.function(torch.maximum(bias - reach, bias + up @ low + down @ high))
    return float(top - bottom) / 2, float(top + bottom) / 2


def pair(h: Tensor, j: int, others: list[int]) -> tuple[float, int, float, float]:
    """Return the best replacement of neuron j by another: `h_j = a h_i + b` (O3).

    Returns:
        The mean square of the residual, i, a and b.
    """
    best = (math.inf, -1, 0.0, 0.0)
    mean_j = float(h[:, j].mean())
    for i in others:
        mean_i = float(h[:, i].mean())
        between = float(((h[:, i] - mean_i) * (h[:, j] - mean_j)).mean())
        own = float((h[:, i] - mean_i).square().mean())
        a = between / own if own > 0 else 0.0
        b = mean_j - a * mean_i
        left = float((h[:, j] - a * h[:, i] - b).square().mean())
        if left < best[0]:
            best = (left, i, a, b)
    return best


def change_of_outputs(h: Tensor, v: Tensor, merges: dict[int, tuple[int, float, float]]) -> float:
    """Return `E ||dy||^2` of all merges together, by running the samples (O4)."""
    changed = h.clone()
    for j, (i, a, b) in merges.items():
        changed[:, j] = a * h[:, i] + b
    return float(((h - changed) @ v.T).square().sum(1).mean())


def merge_in_pairs(
    h: Tensor, v: Tensor, budget: float, at_most: int
) -> tuple[dict[int, tuple[int, float, float]], float]:
    """Return about as many merges as the budget allows, greedily, and their joint error.

    Args:
        h: Samples of the neurons, `(samples, width)`.
        v: The consumer's weights, `(outputs, width)`.
        budget: Upper limit of the mean square error over the variance of y.
        at_most: The most neurons to remove.

    Returns:
        By neuron removed: the one it is merged into, a and b; and the error over the variance.
    """
    y = h @ v.T
    variance = float((y - y.mean(0)).square().sum(1).mean())
    alive = list(range(h.shape[1]))
    order: list[int] = []
    while len(alive) > 1:  # the cheapest one, after the removals before
        costs = {
            j: float(v[:, j].square().sum()) * pair(h, j, [i for i in alive if i != j])[0]
            for j in alive
        }
        j = min(costs, key=lambda each: costs[each])
        order.append(j)
        alive.remove(j)

    def attempt(count: int) -> tuple[dict[int, tuple[int, float, float]], float]:
        kept = [i for i in range(h.shape[1]) if i not in order[:count]]
        merges = {j: pair(h, j, kept)[1:] for j in order[:count]}
        return merges, change_of_outputs(h, v, merges) / variance

    low, high = 0, min(at_most, len(order))
    while low < high and attempt(low)[1] < 0.9 * budget:
        middle = (low + high + 1) // 2
        if attempt(middle)[1] <= budget:
            low = middle
        else:
            high = middle - 1
    return attempt(low)
