"""Local steps with an outer optimizer: the change of a period is one outer step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gossipgrad.engine import Bucket

__all__ = ["Nesterov", "OuterOptimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Nesterov:
    """The outer optimizer of `gossip(local_steps=...)`: SGD with Nesterov momentum, as in DiLoCo.

    With `y` the outer weights at the beginning of a period of local steps, and `x` the weights at
    its end: `d = y - x`, `m = momentum * m + d`, `y = y - lr * (d + momentum * m)`.

    Attributes:
        lr: Above 0. 1 without momentum keeps the local steps unchanged.
        momentum: From 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, rule, fits in (
            ("lr", "it must be above 0 and finite, such as 0.7", lambda v: 0 < v < math.inf),
            ("momentum", "it must be from 0 to below 1, such as 0.9", lambda v: 0 <= v < 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not fits(float(value)):
                raise ValueError(f"{name} of the outer optimizer is {value!r}: {rule}")
            object.__setattr__(self, name, float(value))


class OuterOptimizer:
    """Makes the outer steps of one session; local."""

    # The outer weights are the `anchor` of each bucket: mixing within a period changes them by as
    # much as the local weights, and the pseudo-gradient has local steps alone.

    def __init__(self, settings: Nesterov) -> None:
        self.momentum: list[Tensor] = []
        self._lr, self._beta = settings.lr, settings.momentum

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Begin a period from the current weights, unless one has begun."""
        for bucket in buckets:
            if bucket.anchor is None:
                bucket.anchor = bucket.total()

    @torch.no_grad()
    def step(self, buckets: Sequence[Bucket]) -> None:
        """End a period: set the weights to the outer weights after one step."""
        if self._beta and not self.momentum:
            self.momentum = [torch.zeros_like(bucket.total()) for bucket in buckets]
        for index, bucket in enumerate(buckets):
            x, y, bucket.anchor = bucket.total(), bucket.anchor, None
            assert y is not None  # `begin` precedes every step
            d = y.sub_(x)
            # y - lr (d + beta m), written from x: with lr 1 and no momentum it is x, bit for bit.
            x.add_(d, alpha=1.0 - self._lr)
            if self._beta:
                m = self.momentum[index].mul_(self._beta).add_(d)
                x.add_(m, alpha=-self._lr * self._beta)
            bucket.load(x)

    def reset(self) -> None:
        """Clear the momentum, when all replicas start again."""
        self.momentum = []

    @property
    def memory_bytes(self) -> int:
        """Memory of the momentum."""
        return sum(m.nbytes for m in self.momentum)

    def state_dict(self, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Return momentum and the outer weights of the current period, in host memory."""
        return {
            "momentum": [m.to("cpu", copy=True) for m in self.momentum],
            "weights": [b.anchor.to("cpu", copy=True) for b in buckets if b.anchor is not None],
        }

    def load_state_dict(self, state: Mapping[str, Any], buckets: Sequence[Bucket]) -> None:
        """Load the result of `state_dict`."""
        momentum, weights = state["momentum"], state["weights"]
        self.momentum = [m.to(buckets[i].device, copy=True) for i, m in enumerate(momentum)]
        for i, bucket in enumerate(buckets):
            bucket.anchor = weights[i].to(bucket.device, copy=True) if weights else None
