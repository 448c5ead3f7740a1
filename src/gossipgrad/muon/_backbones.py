"""Backbones: mixing of weights around an optimizer's update, only between neighbours.

All of them are instances of `X' = A (C X - U) - B Y; Y' = Y + B X'` with `A`, `B^2` and `C`
polynomials of the weights `W`, and `U` the optimizer's update, which is subtracted; see
`_reference`, rule N.

Each keeps its dual as the sum of what its exchanges have added: `C <- C + (W - I) (C + base)`. What
an exchange adds sums to zero over the ranks, whatever was rounded before, so the duals do, and the
mean of the weights moves by the mean of the updates alone. A dual that is a difference of weights
adds up their rounding instead, step after step.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from numpy.polynomial import polynomial as poly
from torch import Tensor

__all__ = ["BACKBONES", "ROTATING", "Backbone", "dual_dtype", "make_backbone", "resolve_backbone"]

Flats = list[Tensor]
Sent = tuple[str, ...]
"""Names of tensors that are exchanged together, in one message per partner."""

MIXED, DUAL, BASE = "mixed", "dual", "base"


class Polynomials(NamedTuple):
    """A backbone: coefficients of A, B squared and C in `W`, each from the constant term up."""

    a: tuple[float, ...]
    b2: tuple[float, ...]
    c: tuple[float, ...]

    def radius(self, eigenvalue: float) -> float:
        """Return the growth per step of a disagreement along an eigenvector of `W`.

        The larger root of `z^2 - (1 - b^2 + a c) z + a c`; infinite if B would not be real.
        """
        a, b2, c = (float(poly.polyval(eigenvalue, each)) for each in self)
        if b2 < -1e-9:
            return float("inf")
        if not any(self.b2):  # there is no dual
            return abs(a * c)
        p = 1 - b2 + a * c
        root = complex(p * p - 4 * a * c) ** 0.5
        return max(abs(p + root), abs(p - root)) / 2


_GT = (1, -2, 1)
BACKBONES: dict[str, Polynomials] = {
    "ed": Polynomials((0, 1), (1, -1), (1,)),
    "extra": Polynomials((1,), (1, -1), (0, 1)),
    "atc-gt": Polynomials((0, 0, 1), _GT, (1,)),
    "semi-atc-gt": Polynomials((0, 1), _GT, (0, 1)),
    "non-atc-gt": Polynomials((1,), _GT, (0, 0, 1)),
    "demuon": Polynomials((0, 1), (0,), (1,)),
}
"""Backbones by name, as polynomials of `W`.

References:
    Alghunaim, Yuan, arXiv:2110.09993, section 2; SUDA-Muon, arXiv:2604.23980, section 3.2.
"""

ROTATING = ("semi-atc-gt", "atc-gt", "non-atc-gt", "demuon")
"""Backbones that converge with rotating partners."""


class Backbone(ABC):
    """The rule of one session, and its state between steps: flat tensors, one per bucket.

    An exchanged tensor gets what is to be sent added before its exchange, and subtracted after it.
    What is left is what exchanges have added, late ones included: the dual, or for weights nothing,
    since they take it over.
    """

    names: tuple[str, ...]  # of its tensors
    travels: Sent  # names of exchanged tensors
    starts_early: bool  # whether its first exchange does not depend on the step's update
    exchanges: int  # number of exchanges in a step, one after the other

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.held = {
            name: [torch.zeros_like(x, dtype=dual_dtype(x) if name == DUAL else None) for x in like]
            for name in self.names
        }

    def begin(self, x: Flats) -> None:
        """Restart from weights, equal on all ranks or not."""
        for flats in self.held.values():
            torch._foreach_zero_(flats)

    def before(self, x: Flats) -> Sent:
        """Prepare the exchange that does not depend on the update, and return what it sends."""
        return ()

    @abstractmethod
    def after(self, x: Flats, updated: Flats) -> Generator[Sent, None, Flats]:
        """Yield the exchanges after the update `x - updated`; return the new weights."""

    @property
    def duals(self) -> Flats:
        """The tensors that sum to zero over the ranks, except around their own exchange."""
        return self.held.get(DUAL, [])

    def duals_behind(self) -> Flats:
        """Return the duals after `before`, less what it has added."""
        if BASE not in self.held:
            return self.duals
        return list(torch._foreach_sub(self.duals, self.held[BASE]))

    def _take_weights(self) -> Flats:
        """Return the mixed weights, and leave zeros."""
        mixed = [flat.clone() for flat in self.held[MIXED]]
        torch._foreach_zero_(self.held[MIXED])
        return mixed


class ExactDiffusion(Backbone):
    """`C <- C + (W - I) (X - U + C); X <- X - U + C`."""

    names = travels = (DUAL,)
    starts_early, exchanges = False, 1

    def after(self, x: Flats, updated: Flats) -> Generator[Sent, None, Flats]:
        """See `Backbone`."""
        torch._foreach_add_(self.duals, updated)
        yield (DUAL,)
        new = _narrow(self.duals, updated)
        torch._foreach_sub_(self.duals, updated)
        return new


class Extra(Backbone):
    """`C <- C + (W - I) (X - U_before + C); X <- X - U + C`."""

    names, travels = (DUAL, BASE), (DUAL,)
    starts_early, exchanges = True, 1

    def begin(self, x: Flats) -> None:
        """See `Backbone`."""
        super().begin(x)
        torch._foreach_copy_(self.held[BASE], x)

    def before(self, x: Flats) -> Sent:
        """See `Backbone`."""
        torch._foreach_add_(self.duals, self.held[BASE])
        return (DUAL,)

    def after(self, x: Flats, updated: Flats) -> Generator[Sent, None, Flats]:
        """See `Backbone`."""
        torch._foreach_sub_(self.duals, self.held[BASE])
        new = _narrow(torch._foreach_add(self.duals, updated), updated)
        update = torch._foreach_sub(x, updated)
        torch._foreach_copy_(self.held[BASE], torch._foreach_sub(new, update))
        yield from ()
        return new


class Tracking(Backbone):
    """Gradient tracking: `C + U` tracks the mean of the updates.

    `C <- C + (W - I) (C + U)`, with the update before that in `non-atc-gt`; `X <- W X - (C + U)`,
    in `atc-gt` `W (X - (C + U))`.
    """

    travels = (MIXED, DUAL)

    def __init__(self, like: Sequence[Tensor], *, is_atc: bool, is_behind: bool) -> None:
        self._is_atc, self._is_behind = is_atc, is_behind
        self.names = (MIXED, DUAL, BASE) if is_behind else (MIXED, DUAL)
        self.starts_early = not is_atc
        self.exchanges = 1 if is_behind else 2
        super().__init__(like)

    def before(self, x: Flats) -> Sent:
        """Send the weights, together with the dual if the update before goes with it."""
        if self._is_atc:
            return ()
        torch._foreach_add_(self.held[MIXED], x)
        if not self._is_behind:
            return (MIXED,)
        torch._foreach_add_(self.duals, self.held[BASE])
        return (MIXED, DUAL)

    def after(self, x: Flats, updated: Flats) -> Generator[Sent, None, Flats]:
        """See `Backbone`."""
        weights, duals = self.held[MIXED], self.duals
        update = torch._foreach_sub(x, updated)
        if self._is_behind:
            torch._foreach_sub_(duals, self.held[BASE])
            torch._foreach_copy_(self.held[BASE], update)
            torch._foreach_add_(duals, update)
        else:
            torch._foreach_add_(duals, update)
            yield (DUAL,)
        if self._is_atc:
            torch._foreach_add_(weights, x)
        torch._foreach_sub_(weights, duals)
        torch._foreach_sub_(duals, update)
        if self._is_atc:
            yield (MIXED,)
        return self._take_weights()


class DeMuon(Backbone):
    """Mixes weights after the update, without duals."""

    names = travels = (MIXED,)
    starts_early, exchanges = False, 1

    def after(self, x: Flats, updated: Flats) -> Generator[Sent, None, Flats]:
        """See `Backbone`."""
        torch._foreach_add_(self.held[MIXED], updated)
        yield (MIXED,)
        return self._take_weights()


def dual_dtype(x: Tensor) -> torch.dtype:
    """Return the type of sums that must stay zero over all ranks: float64 where there is one."""
    return x.dtype if x.device.type == "mps" else torch.float64


def resolve_backbone(backbone: str) -> str:
    """Check the name of a backbone."""
    if backbone in BACKBONES:
        return backbone
    raise ValueError(f"backbone={backbone!r} is none of {', '.join(map(repr, BACKBONES))}")


def make_backbone(backbone: str, like: Sequence[Tensor]) -> Backbone:
    """Create the rule by its name, for flat weights like these, in at least fp32."""
    if backbone.endswith("-gt"):
        return Tracking(like, is_atc=backbone == "atc-gt", is_behind=backbone == "non-atc-gt")
    return {"ed": ExactDiffusion, "extra": Extra, "demuon": DeMuon}[backbone](like)


def _narrow(wide: Sequence[Tensor], like: Flats) -> Flats:
    return [flat.to(x.dtype, copy=True) for flat, x in zip(wide, like, strict=True)]
