"""Backbones: mixing of weights around an optimizer's update, only between neighbours.

All of them are instances of `X' = A (C X - U) - B Y; Y' = Y + B X'` with `A`, `B^2` and `C`
polynomials of the weights `W`, and `U` the optimizer's update, which is subtracted; see
`_reference`, rule N.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from numpy.polynomial import polynomial as poly
from torch import Tensor

__all__ = ["BACKBONES", "Backbone", "Polynomial", "Sent", "make_backbone", "resolve_backbone"]

Flats = list[Tensor]
Sent = tuple[str, ...]
"""Names of tensors that are exchanged together, in one message per partner."""

MIXED, DIRECTIONS = "mixed", "directions"


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A backbone by its polynomials of `W`, each from the constant term up.

    It runs in the form without duals, one tensor per exchange, with constant mixing weights: `X'' =
    (I - B^2 + A C) X' - A C X - A (U'' - U')`.

    Attributes:
        a: Coefficients of A; sum to 1.
        b2: Coefficients of B squared; sum to 0.
        c: Coefficients of C; sum to 1.

    Raises:
        ValueError: The coefficients have other sums: a consensus would not be kept.

    Example:
        >>> Polynomial(a=(0, 1), b2=(1, -1), c=(1,))  # exact diffusion
        Polynomial(a=(0.0, 1.0), b2=(1.0, -1.0), c=(1.0,))
    """

    a: tuple[float | int, ...]
    b2: tuple[float | int, ...]
    c: tuple[float | int, ...]

    def __post_init__(self) -> None:
        for name, total in (("a", 1.0), ("b2", 0.0), ("c", 1.0)):
            plain = tuple(float(each) for each in getattr(self, name))
            if not plain or abs(sum(plain) - total) > 1e-9:
                raise ValueError(
                    f"{name}={plain} sums to {sum(plain):g} and must to {total:g}, or a consensus "
                    "would not stay one: A and C are doubly stochastic, and B is zero on it"
                )
            object.__setattr__(self, name, plain)

    @property
    def product(self) -> tuple[float, ...]:
        """Coefficients of A C."""
        return _trimmed(poly.polymul(self.a, self.c))

    @property
    def carried(self) -> tuple[float, ...]:
        """Coefficients of I - B^2 + A C."""
        return _trimmed(poly.polyadd(poly.polysub((1.0,), self.b2), self.product))

    def radius(self, eigenvalue: float) -> float:
        """Return the growth per step of a disagreement along an eigenvector of `W`.

        The larger root of `z^2 - (1 - b^2 + a c) z + a c`; infinite if B would not be real.
        """
        if poly.polyval(eigenvalue, self.b2) < -1e-9:
            return float("inf")
        p, q = (float(poly.polyval(eigenvalue, each)) for each in (self.carried, self.product))
        if not any(self.b2):  # no state is carried over
            return abs(q)
        root = complex(p * p - 4 * q) ** 0.5
        return max(abs(p + root), abs(p - root)) / 2


_GT = (1.0, -2.0, 1.0)
BACKBONES: dict[str, Polynomial] = {
    "ed": Polynomial((0, 1), (1, -1), (1,)),
    "extra": Polynomial((1,), (1, -1), (0, 1)),
    "atc-gt": Polynomial((0, 0, 1), _GT, (1,)),
    "semi-atc-gt": Polynomial((0, 1), _GT, (0, 1)),
    "non-atc-gt": Polynomial((1,), _GT, (0, 0, 1)),
    "demuon": Polynomial((0, 1), (0,), (1,)),
    "paper-ed": Polynomial((0, 1), (1, 0, -1), (0, 1)),
    "paper-extra": Polynomial((0.5, 0.5), (0.5, -0.5), (0.5, 0.5)),
}
"""Backbones by name, as polynomials of `W`; those of `"paper-ed"` and `"paper-extra"` are the
manuscript's.

References:
    Alghunaim, Yuan, arXiv:2110.09993, section 2; SUDA-Muon, arXiv:2604.23980, section 3.2.
"""

ROTATING = ("semi-atc-gt", "atc-gt", "non-atc-gt", "demuon", "paper-extra")
"""Backbones that converge with rotating partners."""


class Backbone(ABC):
    """The rule of one session, and its state between steps: flat tensors, one per bucket."""

    starts_early: bool  # whether its first exchange does not depend on the step's update
    exchanges: int  # number of exchanges in a step, one after the other

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.held = {name: [torch.zeros_like(x) for x in like] for name in self.names}

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of its tensors."""

    @property
    def travels(self) -> Sent:
        """Return the names of exchanged tensors."""
        return tuple(name for name in self.names if name in (MIXED, DIRECTIONS))

    def begin(self, x: Flats) -> None:
        """Restart from weights, equal on all ranks or not."""
        for name, flats in self.held.items():
            if name in (MIXED, "previous"):
                _copy(flats, x)
            else:
                torch._foreach_zero_(flats)

    def before(self, x: Flats) -> Iterable[Sent]:
        """Yield the exchanges before the update, which the caller makes."""
        return ()

    @abstractmethod
    def after(self, x: Flats, u: Flats) -> Generator[Sent, None, Flats]:
        """Yield the exchanges after the update; return the new weights."""

    def duals(self, x: Flats) -> Flats:
        """Return the tensors that sum to zero over the ranks."""
        return []


class Differences(Backbone):
    """A `Polynomial`, in the form without duals."""

    def __init__(self, like: Sequence[Tensor], of: Polynomial) -> None:
        self._late = len(_trimmed(of.a))  # powers of W that multiply the update
        # By power: factors of the weights, the weights before, and the update.
        self._powers = list(zip_longest(of.carried, of.product, _trimmed(of.a), fillvalue=0.0))
        self.exchanges = len(self._powers) - 1
        self.starts_early = self.exchanges >= self._late
        super().__init__(like)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Backbone`."""
        return (MIXED, "previous", "last_update")

    def before(self, x: Flats) -> Generator[Sent, None, None]:
        """Apply the powers of `W` that do not multiply the update."""
        for power in range(self.exchanges, self._late - 1, -1):
            self._next(power, x)
            yield (MIXED,)

    def after(self, x: Flats, u: Flats) -> Generator[Sent, None, Flats]:
        """Apply the other powers, by Horner's rule."""
        change = torch._foreach_sub(u, self.held["last_update"])
        mixed = self.held[MIXED]
        for power in range(self._late - 1, -1, -1):
            self._next(power, x)
            torch._foreach_add_(mixed, change, alpha=-self._powers[power][2])
            if power:
                yield (MIXED,)
        _copy(self.held["previous"], x)
        _copy(self.held["last_update"], u)
        return mixed

    def duals(self, x: Flats) -> Flats:
        """`X - X_prev + U_prev`."""
        away = torch._foreach_sub(x, self.held["previous"])
        return list(torch._foreach_add(away, self.held["last_update"]))

    def _next(self, power: int, x: Flats) -> None:
        mixed, (carried, product, _) = self.held[MIXED], self._powers[power]
        if power == self.exchanges:
            torch._foreach_zero_(mixed)
        torch._foreach_add_(mixed, x, alpha=carried)
        torch._foreach_add_(mixed, self.held["previous"], alpha=-product)


class Tracking(Backbone):
    """Gradient tracking: `Z` tracks the mean of the updates."""

    def __init__(self, like: Sequence[Tensor], *, is_atc: bool, mixes_change: bool) -> None:
        self._is_atc, self._mixes_change = is_atc, mixes_change
        self.starts_early = not is_atc
        self.exchanges = 2 if mixes_change else 1
        super().__init__(like)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Backbone`."""
        return (MIXED, DIRECTIONS, "last_update")

    def before(self, x: Flats) -> Generator[Sent, None, None]:
        """Exchange the weights, together with Z if nothing is added to it before."""
        if not self._is_atc:
            _copy(self.held[MIXED], x)
            yield (MIXED,) if self._mixes_change else (MIXED, DIRECTIONS)

    def after(self, x: Flats, u: Flats) -> Generator[Sent, None, Flats]:
        """See `Backbone`."""
        mixed, z = self.held[MIXED], self.held[DIRECTIONS]
        torch._foreach_add_(z, torch._foreach_sub(u, self.held["last_update"]))
        _copy(self.held["last_update"], u)
        if self._mixes_change:
            yield (DIRECTIONS,)
        if self._is_atc:
            _copy(mixed, x)
        torch._foreach_sub_(mixed, z)
        if self._is_atc:
            yield (MIXED,)
        return mixed

    def duals(self, x: Flats) -> Flats:
        """`Z - U_prev`."""
        return list(torch._foreach_sub(self.held[DIRECTIONS], self.held["last_update"]))


class DeMuon(Backbone):
    """Mixes weights after the update, without duals."""

    starts_early, exchanges = False, 1

    @property
    def names(self) -> tuple[str, ...]:
        """See `Backbone`."""
        return (MIXED,)

    def after(self, x: Flats, u: Flats) -> Generator[Sent, None, Flats]:
        """See `Backbone`."""
        _copy(self.held[MIXED], list(torch._foreach_sub(x, u)))
        yield (MIXED,)
        return self.held[MIXED]


def resolve_backbone(backbone: str | Polynomial) -> str | Polynomial:
    """Check the name of a backbone."""
    if isinstance(backbone, Polynomial) or backbone in BACKBONES:
        return backbone
    raise ValueError(
        f"backbone={backbone!r} is none of {', '.join(map(repr, BACKBONES))}, and no "
        "gg.Polynomial(a, b2, c)"
    )


def make_backbone(backbone: str | Polynomial, like: Sequence[Tensor]) -> Backbone:
    """Create the rule by its name or polynomials, for weights like these."""
    if backbone == "demuon":
        return DeMuon(like)
    if isinstance(backbone, str) and backbone.endswith("-gt"):
        return Tracking(like, is_atc=backbone == "atc-gt", mixes_change=backbone != "non-atc-gt")
    return Differences(like, BACKBONES[backbone] if isinstance(backbone, str) else backbone)


def _copy(into: Flats, values: Flats) -> None:
    torch._foreach_copy_(into, values)


def _trimmed(coefficients: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Return the coefficients without trailing zeros, up to rounding."""
    return tuple(poly.polytrim(coefficients, 1e-12).tolist())
