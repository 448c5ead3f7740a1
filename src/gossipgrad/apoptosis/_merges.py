"""The choice of merges and their errors: pure arithmetic on moments.

With the letters of `_reference`: `C` are second moments of neurons, `V` a consumer's weights, and
the error is the joint mean square change of a consumer's outputs. It is never a sum over neurons,
since their errors are correlated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from gossipgrad.apoptosis._surgery import removed_of

__all__ = [
    "Consumer",
    "errors_of",
    "folds_of",
    "joint_error",
    "pivot_order",
    "removal_order",
    "split",
]

_ROUNDING = 1e-7
_ALL = 2048  # neurons that are all ordered by pivots


@dataclass(frozen=True, eq=False)
class Consumer:
    """The inputs of a consumer and their weights.

    Attributes:
        weights: Weights by output, tap and neuron, `(outputs, taps, width)`.
        second: Second moments of its inputs, `(taps, width, taps, width)`: covariances if it can
            absorb a constant, else about 0. One tap if taps are combined.
        mean: Means of its inputs if it can absorb a constant, `(taps, width)`, else None.
        scale: The unit of errors: the variance of its outputs.
        samples: Number of rows of the moments.
        sums_taps: Whether merges may be sums over all taps.
    """

    weights: Tensor
    second: Tensor
    mean: Tensor | None
    scale: float
    samples: float
    sums_taps: bool = False

    @property
    def moments(self) -> Tensor:
        """Second moments of neurons, over all taps, `(width, width)`."""
        if len(self.second) == 1:
            return self.second[0, :, 0]
        return self.second.diagonal(dim1=0, dim2=2).sum(-1)

    def importance(self) -> Tensor:
        """The change of outputs without a neuron, `(width,)`, as a share of their variance."""
        taps = self.second.shape[0]
        return self.weights.double().square().sum((0, 1)) / (self.scale * taps)


def joint_error(consumer: Consumer, kept: Tensor, removed: Tensor, fold: Tensor) -> float:
    """Return `E ||dy||^2` over the outputs' variance, if `h_removed` becomes `fold^T h_kept`.

    Exact on the sample; with combined taps a bound, by Cauchy and Schwarz.

    Args:
        consumer: The consumer whose outputs change.
        kept: Indices of kept neurons, `(k,)`.
        removed: Indices of the others, `(r,)`.
        fold: Shape `(k, r)`.

    References:
        Own derivation: `tr(V_R S V_R^T)` with S the second moments of the neurons' residuals, or
        `tr(D C D^T)` with D the change of the weights of all taps.
    """
    weights, second = consumer.weights.double(), consumer.second
    fold = fold.to(second)
    if len(second) == 1:
        own = second[0, :, 0]
        both = own[removed][:, kept] @ fold
        left = own[removed][:, removed] - both - both.T + fold.T @ (own[kept][:, kept] @ fold)
        return _error_of_one_tap(consumer, removed, left)
    change = torch.zeros_like(weights)
    change[..., removed] = weights[..., removed]
    change[..., kept] = -(weights[..., removed] @ fold.T)
    flat = change.flatten(1)
    error = ((flat @ second.flatten(2).flatten(0, 1)) * flat).sum()
    return max(0.0, float(error)) / consumer.scale


def _error_of_one_tap(consumer: Consumer, removed: Tensor, left: Tensor) -> float:
    gone = consumer.weights[..., removed].double()
    taps, gone = gone.shape[1], gone.flatten(0, 1)
    error = taps * ((gone @ left.to(gone)) * gone).sum()
    return max(0.0, float(error)) / consumer.scale


def pivot_order(consumers: Sequence[Consumer], at_most: int) -> list[int]:
    """Return the order of removal, if each is replaced by the best sum of all kept ones."""
    # The reverse of the pivots of a Cholesky decomposition: the first leave the smallest residuals.
    # Of a wide layer the last `at_most` are ordered by their residuals.
    importance = torch.stack([c.importance() for c in consumers]).sum(0)
    second = torch.zeros(consumers[0].moments.shape, device=importance.device)
    for consumer in consumers:  # fp32 is enough for an order
        second.add_(consumer.moments, alpha=1 / float(consumer.moments.diagonal().sum() + 1e-300))
    root = importance.sqrt().float()
    second = second.mul_(root[:, None]).mul_(root).cpu()
    left = second.diagonal().clone()
    width = len(second)
    steps = width if width <= _ALL else width - at_most
    factor = second.new_zeros(width, steps)
    pivots: list[int] = []
    floor = float(left.sum()) * _ROUNDING
    is_open = torch.ones(width, dtype=torch.bool)
    for step in range(steps):
        at = int(torch.where(is_open, left, left.new_tensor(-1.0)).argmax())
        if left[at] <= floor:
            break
        column = second[at] - factor[:, :step] @ factor[at, :step]
        factor[:, step] = column / column[at].sqrt()
        left -= factor[:, step].square()
        is_open[at] = False
        pivots.append(at)
    rest = is_open.nonzero().flatten()
    return rest[left[rest].argsort()].tolist() + pivots[::-1]


def removal_order(consumers: Sequence[Consumer], at_most: int, *, merges: bool = True) -> list[int]:
    """Return the order of removal, if others make up for what goes, or if nothing does."""
    if merges:
        return pivot_order(consumers, at_most)
    costs = torch.stack([c.importance() * c.moments.diagonal() for c in consumers]).sum(0)
    return costs.argsort().tolist()


def errors_of(
    consumers: Sequence[Consumer],
    order: Sequence[int],
    counts: Sequence[int],
    *,
    merges: bool = True,
) -> list[float]:
    """Return the joint error without the first neurons of an order, by their number.

    Mean square errors over the variance of outputs, corrected for the fit; for several consumers
    the largest.
    """
    largest = [0.0] * len(counts)
    for consumer in consumers:
        merge = _merge(consumer, order, merges=merges)
        for number, count in enumerate(counts):
            kept, removed = split(order, count)
            if len(consumer.second) == 1 or consumer.sums_taps:
                error = merge.error(kept, removed)
            else:
                error = joint_error(consumer, kept, removed, merge.fold(kept, removed))
            error *= _correction(merge.coefficients(len(kept)), consumer.samples)
            largest[number] = max(largest[number], error)
    return largest


def folds_of(
    consumers: Sequence[Consumer], order: Sequence[int], count: int, *, merges: bool = True
) -> list[Tensor]:
    """Return by consumer the shares of the removed neurons that go to those kept.

    Shape `(k, r)`, or `(taps, k, taps, r)` where there are samples enough for all taps.
    """
    return [_merge(each, order, merges=merges).fold(*split(order, count)) for each in consumers]


def split(order: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Return the indices that are kept and those that are removed, both ascending."""
    removed = torch.tensor(sorted(order[:count]), dtype=torch.long)
    return removed_of(len(order), removed), removed


def _merge(consumer: Consumer, order: Sequence[int], *, merges: bool) -> "_LeastSquares | _Removal":
    return _LeastSquares(consumer, order) if merges else _Removal(consumer)


class _Removal:
    """Merges nothing: a constant and the gains of a norm make up for what goes."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer, self.second = consumer, consumer.moments.cpu()

    def coefficients(self, kept: int) -> int:
        """Return how many coefficients replace one input."""
        return 1

    def fold(self, kept: Tensor, removed: Tensor) -> Tensor:
        """Shape `(k, r)`."""
        return self.second.new_zeros(len(kept), len(removed))

    def error(self, kept: Tensor, removed: Tensor) -> float:
        """Return the joint error where each neuron has one second moment."""
        return _error_of_one_tap(self.consumer, removed, self.second[removed][:, removed])


class _LeastSquares:
    """Merges each neuron into all kept ones: one Cholesky decomposition gives all errors.

    Where there are samples enough, each tap of a neuron is replaced by all taps of the kept ones.
    """

    def __init__(self, consumer: Consumer, order: Sequence[int]) -> None:
        self.consumer = consumer
        self.order = torch.tensor(order[::-1])  # the last to be removed comes first
        self.taps = len(consumer.second) if consumer.sums_taps else 1
        if consumer.sums_taps:
            second = consumer.second.cpu()[:, self.order][..., self.order].permute(1, 0, 3, 2)
            second = second.flatten(2).flatten(0, 1)  # by neuron, then by tap
        else:
            second = consumer.moments.cpu()[self.order[:, None], self.order]
        jitter = 1e-10 if second.dtype is torch.float64 else 1e-6
        jitter = jitter * float(second.diagonal().mean()) + 1e-30
        self.factor, failed = torch.linalg.cholesky_ex(_add_to_diagonal(second, jitter))
        while int(failed):
            self.factor, failed = torch.linalg.cholesky_ex(_add_to_diagonal(second, 9 * jitter))
            jitter *= 10

    def coefficients(self, kept: int) -> int:
        """Return how many coefficients replace one input."""
        return kept * self.taps

    def fold(self, kept: Tensor, removed: Tensor) -> Tensor:
        """Shape `(k, r)` or `(taps, k, taps, r)`."""
        k, taps = len(kept), self.taps
        size = k * taps
        solved = torch.linalg.solve_triangular(
            self.factor[:size, :size].T, self.factor[size:, :size].T, upper=True
        )
        solved = solved.view(k, taps, -1, taps)
        solved = solved[self.order[:k].argsort()][:, :, self.order[k:].argsort()]
        return solved.permute(1, 0, 3, 2) if self.consumer.sums_taps else solved[:, 0, :, 0]

    def error(self, kept: Tensor, removed: Tensor) -> float:
        """Return the joint error of all that is not kept."""
        return float(self._errors[len(kept) * self.taps])

    @cached_property
    def _errors(self) -> Tensor:
        """By the number of inputs kept: `V_R L_RR` is the columns of `V L` beyond them."""
        weights = self.consumer.weights.to(self.factor)[..., self.order]
        taps = 1 if self.consumer.sums_taps else weights.shape[1]
        rows = weights.mT.flatten(1) if self.consumer.sums_taps else weights.flatten(0, 1)
        columns = (rows @ self.factor).double().square().sum(0)
        shares = columns * taps / self.consumer.scale
        return F.pad(shares.flip(0).cumsum(0).flip(0), (0, 1))


def _add_to_diagonal(second: Tensor, amount: float) -> Tensor:
    second.diagonal().add_(amount)
    return second


def _correction(coefficients: int, samples: float) -> float:
    """Return the correction of a fit's error on its own sample: Akaike's final prediction error."""
    # On its own sample the error is smaller than on another.
    if coefficients >= samples:
        return torch.inf
    return (samples + coefficients) / (samples - coefficients)
