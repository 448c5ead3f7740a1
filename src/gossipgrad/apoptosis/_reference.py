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
O3. Merges by covariance: `h_j` becomes a sum of all that stay and a constant, by least squares.
    Those stay that leave the smallest residuals `||V_j||^2 S_jj`: a pivoted Cholesky decomposition.
O4. The joint error of many merges, never a sum of errors; a greedy order, and bisection.
O5. The state of optimizers: that of what stays.
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
    "merge",
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


def merge(h: Tensor, v: Tensor, count: int) -> tuple[list[int], Tensor, float]:
    """Return what is left without some neurons (O3, O4).

    Args:
        h: Samples of the neurons, `(samples, width)`.
        v: The consumer's weights, `(outputs, width)`.
        count: How many neurons are removed.

    Returns:
        The neurons kept, the share of each removed one that goes to each of them, `(k, r)`, and
        `E ||dy||^2` over the variance of y, by running the samples.
    """
    h = h - h.mean(0)
    kept: list[int] = []
    while len(kept) < h.shape[1] - count:
        others = [j for j in range(h.shape[1]) if j not in kept]
        fold = torch.linalg.lstsq(h[:, kept], h[:, others]).solution
        left = (h[:, others] - h[:, kept] @ fold).square().sum(0) * v[:, others].square().sum(0)
        kept.append(others[int(left.argmax())])
    kept.sort()
    removed = [j for j in range(h.shape[1]) if j not in kept]
    fold = torch.linalg.lstsq(h[:, kept], h[:, removed]).solution
    change = (h[:, removed] - h[:, kept] @ fold) @ v[:, removed].T
    return kept, fold, float(change.square().sum() / (h @ v.T).square().sum())
