"""Which neurons are merged into which, and what it costs: pure arithmetic on moments.

In the words of `_reference`: `C` are second moments of neurons, `V` a consumer's weights, and the
error is the joint mean square of all that a consumer's outputs change by. It is never a sum over
neurons: errors of several are correlated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gossipgrad.apoptosis._plan import removed_of

__all__ = [
    "Consumer",
    "choose",
    "greedy_order",
    "joint_error",
    "largest_within",
    "pair_order",
    "pivot_order",
]

T = TypeVar("T")
_ENOUGH = 0.9
_TINY = 1e-12
_ROUNDING = 1e-7


@dataclass(frozen=True, eq=False)
class Consumer:
    """What a consumer reads, and how it weighs it.

    Attributes:
        weights: By output, tap and neuron, `(outputs, taps, width)`.
        second: Second moments of what it reads, `(taps, width, taps, width)`: covariances where it
            can take a constant in, else about 0. With taps together, of one tap.
        mean: Means of what it reads where it can take a constant in, `(taps, width)`, else None.
        scale: What errors are measured in: the variance of its outputs.
        samples: How many rows the moments are of.
    """

    weights: Tensor
    second: Tensor
    mean: Tensor | None
    scale: float
    samples: float

    @property
    def moments(self) -> Tensor:
        """Second moments of neurons, over all taps, `(width, width)`."""
        return torch.einsum("tntm->nm", self.second)

    def importance(self) -> Tensor:
        """How much outputs change with a neuron, `(width,)`, in shares of their variance."""
        taps = self.second.shape[0]
        return self.weights.double().square().sum((0, 1)) / (self.scale * taps)


def joint_error(consumer: Consumer, kept: Tensor, removed: Tensor, fold: Tensor) -> float:
    """`E ||dy||^2` over the variance of the outputs, when `h_removed` becomes `fold^T h_kept`.

    Exact on the sample; with taps together a bound, by Cauchy and Schwarz.

    Args:
        consumer: Whose outputs change.
        kept: Indices, `(k,)`.
        removed: The others, `(r,)`.
        fold: Shape `(k, r)`.

    References:
        Own derivation: `tr(V_R S V_R^T)` with S the second moments of what is left of neurons, or
        `tr(D C D^T)` with D the change of the weights of all taps.
    """
    weights, second = consumer.weights.double(), consumer.second
    taps, fold = weights.shape[1], fold.to(second)
    if second.shape[0] < taps or taps == 1:
        own = second[0, :, 0]
        both = own[removed][:, kept] @ fold
        left = own[removed][:, removed] - both - both.T + fold.T @ (own[kept][:, kept] @ fold)
        gone = weights[..., removed].flatten(0, 1)
        error = taps * ((gone @ left) * gone).sum()
    else:
        change = torch.zeros_like(weights)
        change[..., removed] = weights[..., removed]
        change[..., kept] = -(weights[..., removed] @ fold.T)
        flat = change.flatten(1)
        error = ((flat @ second.flatten(2).flatten(0, 1)) * flat).sum()
    return max(0.0, float(error)) / consumer.scale


def pair_order(consumers: Sequence[Consumer]) -> list[int]:
    """In which order neurons go, when each is merged into the one that stands for it best.

    Greedy by what each costs alone, `||V_j||^2 (C_jj - C_ij^2 / C_ii)`, as it is when those
    before have gone.
    """
    costs = sum(c.importance()[:, None] * _residuals(c.moments) for c in consumers)
    assert isinstance(costs, Tensor)
    return greedy_order(costs.cpu().fill_diagonal_(torch.inf))


def greedy_order(costs: Tensor) -> list[int]:
    """In which order neurons go, the cheapest first, each to one of those that stay.

    Args:
        costs: Of row j when it goes to column i, `(width, width or more)`, infinite where it must
            not; columns behind those of the neurons are always there.
    """
    width = len(costs)
    costs = costs.clone()
    best, partner = costs.min(1)
    order: list[int] = []
    for _ in range(width - 1):
        gone = int(best.argmin())
        order.append(gone)
        costs[:, gone] = torch.inf
        costs[gone, :] = torch.inf
        best[gone] = torch.inf
        partner[gone] = -1
        lost = (partner == gone).nonzero().flatten()
        if len(lost):
            best[lost], partner[lost] = costs[lost].min(1)
    return order


def pivot_order(consumers: Sequence[Consumer]) -> list[int]:
    """In which order neurons go, when each is the best sum of all that stay.

    The reverse of the pivots of a Cholesky decomposition: those chosen first leave least to the
    others.
    """
    importance = torch.stack([c.importance() for c in consumers]).sum(0)
    second = torch.stack([c.moments / c.moments.diagonal().sum() for c in consumers]).sum(0)
    root = importance.sqrt()
    second = (root[:, None] * second * root).float().cpu()  # an order needs no more
    left = second.diagonal().clone()
    width = len(second)
    factor = second.new_zeros(width, width)
    pivots: list[int] = []
    floor = float(left.sum()) * _ROUNDING
    is_open = torch.ones(width, dtype=torch.bool)
    for step in range(width):
        at = int(torch.where(is_open, left, left.new_tensor(-1.0)).argmax())
        if left[at] <= floor:
            break
        column = second[at] - factor[:, :step] @ factor[at, :step]
        factor[:, step] = column / column[at].sqrt()
        left -= factor[:, step].square()
        is_open[at] = False
        pivots.append(at)
    return is_open.nonzero().flatten().tolist() + pivots[::-1]


def choose(
    consumers: Sequence[Consumer],
    *,
    rule: str,
    budget: float,
    at_most: int,
) -> tuple[Tensor, list[Tensor], float]:
    """The most neurons that may go with a joint error within the budget.

    They go in a greedy order; how many is found by bisection, with the joint error.

    Args:
        consumers: All that read the neurons.
        rule: `"pairs"`: each is merged into one other; `"least-squares"`: into all that stay.
        budget: Mean square error over the variance of outputs, of each consumer.
        at_most: How many may go.

    Returns:
        Indices kept, the folds by consumer, and the largest error of a consumer.
    """
    width = consumers[0].weights.shape[-1]
    order = pair_order(consumers) if rule == "pairs" else pivot_order(consumers)
    fold_of: Callable[[Consumer, Tensor, Tensor], Tensor]
    fold_of = _pair_fold if rule == "pairs" else _least_squares_fold

    def attempt(count: int) -> tuple[Tensor, list[Tensor], float]:
        removed = torch.tensor(sorted(order[:count]), dtype=torch.long)
        kept = removed_of(width, removed)
        folds = [fold_of(c, kept, removed) for c in consumers]
        used = 1 if rule == "pairs" else len(kept)
        errors = [
            joint_error(c, kept, removed, fold) * _correction(used, c.samples)
            for c, fold in zip(consumers, folds, strict=True)
        ]
        return kept, folds, max(errors)

    most = min(at_most, len(order), width - 1)
    return largest_within(budget, most, attempt, lambda tried: tried[2])


def largest_within(
    budget: float, most: int, attempt: Callable[[int], T], error_of: Callable[[T], float]
) -> T:
    """By bisection, about the largest count whose error is within the budget.

    It ends early where nine tenths of the budget are used.
    """
    low, high, found = 0, most, attempt(0)
    while low < high and not 0 < _ENOUGH * budget <= error_of(found):
        middle = (low + high + 1) // 2
        tried = attempt(middle)
        if error_of(tried) <= budget:
            low, found = middle, tried
        else:
            high = middle - 1
    return found


def _residuals(second: Tensor) -> Tensor:
    """What is left of each neuron when it is a multiple of another: `C_jj - C_ij^2 / C_ii`."""
    own = second.diagonal()
    inverse = torch.where(own > own.max() * _TINY, 1 / own.clamp(min=1e-300), 0.0)
    return (own[:, None] - second.square() * inverse).clamp(min=0)


def _pair_fold(consumer: Consumer, kept: Tensor, removed: Tensor) -> Tensor:
    second = consumer.moments.cpu()
    fold = second.new_zeros(len(kept), len(removed))
    if not len(removed):
        return fold
    own = second.diagonal()[kept]
    partner = _residuals(second)[removed][:, kept].argmin(1)
    scale = own[partner]
    between = second[removed, kept[partner]]
    is_alive = scale > second.diagonal().max() * _TINY
    fold[partner, torch.arange(len(removed))] = torch.where(is_alive, between / scale, 0.0)
    return fold


def _least_squares_fold(consumer: Consumer, kept: Tensor, removed: Tensor) -> Tensor:
    second = consumer.moments.cpu()
    own = second[kept][:, kept]
    jitter = 1e-10 * float(own.diagonal().mean()) + 1e-300
    between = second[kept][:, removed]
    for _ in range(8):
        factor, failed = torch.linalg.cholesky_ex(own + jitter * torch.eye(len(kept)).to(own))
        if not int(failed):
            return torch.cholesky_solve(between, factor)
        jitter *= 10
    return torch.linalg.lstsq(own, between).solution


def _correction(coefficients: int, samples: float) -> float:
    """What a fit of so many coefficients to so few samples hides: Akaike's final prediction error.

    On the very sample errors look smaller than on the next.
    """
    if coefficients >= samples:
        return torch.inf
    return (samples + coefficients) / (samples - coefficients)
