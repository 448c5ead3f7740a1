"""Backbones: how weights are mixed around an optimizer's update, by neighbour communication alone.

All of them are instances of `X' = A (C X - U) - B Y; Y' = Y + B X'` with `A`, `B^2` and `C`
polynomials of the weights `W`, and `U` what the optimizer subtracts; see `_reference`, rule N.
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
"""Names of what is exchanged at once, in one message a partner."""

MIXED, DIRECTIONS = "mixed", "directions"


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A backbone by its polynomials of `W`, each from the constant term up.

    It is run in the form without duals, one tensor an exchange, on weights that stay the same:
    `X'' = (I - B^2 + A C) X' - A C X - A (U'' - U')`.

    Attributes:
        a: Of A; sums to 1.
        b2: Of B squared; sums to 0.
        c: Of C; sums to 1.

    Raises:
        ValueError: The coefficients have other sums: a consensus would not stay one.

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
        """Of A C."""
        return _trimmed(poly.polymul(self.a, self.c))

    @property
    def carried(self) -> tuple[float, ...]:
        """Of I - B^2 + A C."""
        return _trimmed(poly.polyadd(poly.polysub((1.0,), self.b2), self.product))

    def radius(self, eigenvalue: float) -> float:
        """How a disagreement along an eigenvector of `W` grows from a step to the next.

        The larger root of `z^2 - (1 - b^2 + a c) z + a c`; infinite where B would not be real.
        """
        if poly.polyval(eigenvalue, self.b2) < -1e-9:
            return float("inf")
        p, q = (float(poly.polyval(eigenvalue, each)) for each in (self.carried, self.product))
        if not any(self.b2):  # nothing is carried over
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
"""By name, as polynomials of `W`; those of `"paper-ed"` and `"paper-extra"` are the manuscript's.

References:
    Alghunaim, Yuan, arXiv:2110.09993, section 2; SUDA-Muon, arXiv:2604.23980, section 3.2.
"""

ROTATING = ("semi-atc-gt", "atc-gt", "non-atc-gt", "demuon", "paper-extra")
"""Those that converge when partners rotate."""


class Backbone(ABC):
    """The rule of one session, and what it keeps between steps: flat tensors, one a bucket.

    Attributes:
        held: By name; `MIXED` and `DIRECTIONS` are those that travel.
        starts_early: Whether what it exchanges first does not depend on the step's update.
        exchanges: How many it makes in a step, one after the other.
    """

    starts_early: bool
    exchanges: int

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.held = {name: [torch.zeros_like(x) for x in like] for name in self.names}

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What it keeps."""

    @property
    def travels(self) -> Sent:
        """Which of it travels."""
        return tuple(name for name in self.names if name in (MIXED, DIRECTIONS))

    def begin(self, x: Flats) -> None:
        """Begins anew from weights, whether they are equal on all ranks or not."""
        for name, flats in self.held.items():
            if name in (MIXED, "previous"):
                _copy(flats, x)
            else:
                torch._foreach_zero_(flats)

    def before(self, x: Flats) -> Iterable[Sent]:
        """What is exchanged before the update, from the weights; the caller does it in between."""
        return ()

    @abstractmethod
    def after(self, x: Flats, u: Flats) -> Generator[Sent, None, Flats]:
        """What is exchanged after the update; returns the new weights.

        Args:
            x: The weights before the update.
            u: What it subtracts.
        """

    def duals(self, x: Flats) -> Flats:
        """What sums to zero over the ranks."""
        return []


class Differences(Backbone):
    """A `Polynomial`, in the form without duals."""

    def __init__(self, like: Sequence[Tensor], of: Polynomial) -> None:
        self._late = len(_trimmed(of.a))  # powers of W that the update is multiplied by
        # By power: what the weights, those before, and the update are multiplied by.
        self._powers = list(zip_longest(of.carried, of.product, _trimmed(of.a), fillvalue=0.0))
        self.exchanges = len(self._powers) - 1
        self.starts_early = self.exchanges >= self._late
        super().__init__(like)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Backbone`."""
        return (MIXED, "previous", "last_update")

    def before(self, x: Flats) -> Generator[Sent, None, None]:
        """The powers of `W` that the update is not multiplied by."""
        for power in range(self.exchanges, self._late - 1, -1):
            self._next(power, x)
            yield (MIXED,)

    def after(self, x: Flats, u: Flats) -> Generator[Sent, None, Flats]:
        """The others: Horner's rule."""
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
    """Gradient tracking: `Z` tracks the mean of the updates.

    Args:
        like: The weights.
        is_atc: Whether weights are mixed after Z is subtracted, and not before.
        mixes_change: Whether the change of the update is mixed with Z, and not added after.
    """

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
        """The weights; with them Z, where nothing is added to it before."""
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
    """Weights are mixed after the update; no duals."""

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
    """A backbone that there is.

    Raises:
        ValueError: It is none.
    """
    if isinstance(backbone, Polynomial) or backbone in BACKBONES:
        return backbone
    raise ValueError(
        f"backbone={backbone!r} is none of {', '.join(map(repr, BACKBONES))}, and no "
        "gg.Polynomial(a, b2, c)"
    )


def make_backbone(backbone: str | Polynomial, like: Sequence[Tensor]) -> Backbone:
    """The rule by its name or polynomials, for weights that look like these."""
    if backbone == "demuon":
        return DeMuon(like)
    if isinstance(backbone, str) and backbone.endswith("-gt"):
        return Tracking(like, is_atc=backbone == "atc-gt", mixes_change=backbone != "non-atc-gt")
    return Differences(like, BACKBONES[backbone] if isinstance(backbone, str) else backbone)


def _copy(into: Flats, values: Flats) -> None:
    torch._foreach_copy_(into, values)


def _trimmed(coefficients: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Without powers whose coefficient is zero, or rounding."""
    return tuple(poly.polytrim(coefficients, 1e-12).tolist())
