"""The density of sparse gradients: a number, a function of the step, or one per tensor."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from gossipgrad._messages import warn
from gossipgrad.comm import Group
from gossipgrad.compression import check_density
from gossipgrad.errors import GossipError

__all__ = [
    "DEFAULT_DENSITY",
    "AgreedDensity",
    "Density",
    "Warmup",
    "counts_of",
    "densities_at",
    "describe_density",
    "final_density",
    "resolve_density",
    "warn_of_loss",
]

_ASKED_ROUNDS = 100  # number of rounds for which a density function is evaluated together


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """Densities that fall in stages to a final density.

    While weights change fast, a large residual is stale before it is sent: Deep Gradient
    Compression divides by four in each of its first epochs. Stages are counted in steps here: 250
    are about an epoch of Fashion-MNIST in batches of 256.

    Attributes:
        densities: Densities of the stages, each above 0 and at most 1; one below `then` sends
            `then`.
        steps: Number of steps in a stage, 1 or more.
        then: The density after the last stage.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> [Warmup()(step) for step in (0, 249, 250, 500, 750)]
        [0.25, 0.25, 0.0625, 0.015625, 0.01]
        >>> [Warmup(steps=1, then=0.001)(step) for step in range(5)]
        [0.25, 0.0625, 0.015625, 0.004, 0.001]

    References:
        Lin et al., Deep Gradient Compression, arXiv:1712.01887, section 3.3.
    """

    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    steps: int = 250
    then: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.densities, Sequence) or isinstance(self.densities, str):
            raise ValueError(
                f"densities are those of the stages, such as (0.25, 0.05), got {self.densities!r}"
            )
        object.__setattr__(self, "densities", tuple(self.densities))
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(
                f"steps counts those of a stage, a whole number from 1, got {self.steps!r}"
            )
        if not self.densities:
            raise ValueError("a warm-up without densities is none: give density=... as a number")
        for value in (*self.densities, self.then):
            check_density(value, "a warm-up")

    def __call__(self, step: int) -> float:
        """Return the density in a step, counted from 0."""
        stage = step // self.steps
        return max(self.then, self.densities[stage]) if stage < len(self.densities) else self.then


DEFAULT_DENSITY = Warmup(densities=(1.0, 0.25, 0.0625, 0.015625))

Density = float | int | Callable[[int], float] | Mapping[str, float]
"""A share, a function from the step to it, or shares by name of the parameter.

A function is asked on rank 0, for all ranks and up to a hundred steps at once: it goes by the step
alone.
Names may be patterns such as `"*.bias"`; the first that fits a parameter counts. A mapping needs an
entry `"*"` for all others, the last.
"""


def resolve_density(density: object, names: Sequence[str]) -> Density:
    """Return a valid density for these parameters."""
    if isinstance(density, Mapping):
        for pattern, value in density.items():
            if not isinstance(pattern, str):
                raise ValueError(
                    f"density has the key {pattern!r}: keys are names of parameters, or patterns "
                    'such as "*.bias"'
                )
            check_density(value, f"density of {pattern!r}")
        if "*" not in density:
            raise ValueError('density by names needs an entry "*" for all other parameters')
        _check_all_count(list(density), names)
        return dict(density)
    if callable(density):
        check_density(density(0), "density at step 0")
        return density
    check_density(density, "density")
    return float(density)  # pyrefly: ignore[bad-argument-type]


def _check_all_count(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise `ValueError` for a pattern, except `"*"`, that is no parameter's first fit."""
    used = {_first_fit(patterns, name) for name in names} | {"*"}
    for pattern in patterns:
        if pattern not in used:
            raise ValueError(
                f"density of {pattern!r} never counts: the first pattern that fits a parameter "
                f"does, which this is for none of {', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}. Put narrow patterns before wide ones"
            )


def _first_fit(patterns: Iterable[str], name: str) -> str:
    return next(pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern))


def warn_of_loss(density: Density) -> None:
    """Warn of a density at which training lost accuracy in measurements."""
    if isinstance(density, Warmup):
        low = density.then < DEFAULT_DENSITY.then
    else:
        low = isinstance(density, float) and density <= DEFAULT_DENSITY.then
    if low:
        warn(
            f"density={density} sends less than was measured to be safe: without a warm-up "
            "networks lost 1 to 8 points of accuracy at 0.01 and 4 to 25 at 0.001, and with one "
            "still 1 to 7 at 0.001. Leave density out, or give a Warmup(then=...) of 0.01 or more"
        )


def densities_at(density: Density, names: Sequence[str], step: int) -> tuple[float, ...]:
    """Return each parameter's density in a step."""
    if isinstance(density, Mapping):
        return tuple(density[_first_fit(density, name)] for name in names)
    if callable(density):
        value = density(step)
        check_density(value, f"density at step {step}")
        return (float(value),) * len(names)
    return (float(density),) * len(names)


def final_density(density: Density, names: Sequence[str], step: int) -> tuple[float, ...]:
    """Return each parameter's density after a `Warmup`; of another function in this step."""
    if isinstance(density, Warmup):
        return (density.then,) * len(names)
    return densities_at(density, names, step)


def counts_of(
    sizes: Sequence[int], densities: Sequence[float], *, per_tensor: bool
) -> tuple[int, ...]:
    """Return the number of coordinates to send, of each tensor or of all together; at least 1.

    Example:
        >>> counts_of([1000, 10], [0.01, 0.01], per_tensor=True)
        (10, 1)
        >>> counts_of([1000, 10], [0.01, 0.01], per_tensor=False)
        (10,)
    """
    if per_tensor:
        return tuple(_count(n, rho * n) for n, rho in zip(sizes, densities, strict=True))
    if len(set(densities)) == 1:  # a product, since a sum rounds differently
        return (_count(sum(sizes), densities[0] * sum(sizes)),)
    share = math.fsum(n * rho for n, rho in zip(sizes, densities, strict=True))
    return (_count(sum(sizes), share),)


def describe_density(density: Density) -> str:
    """Describe a density by text, to compare ranks; a function by its first value."""
    return f"{density(0)!r} at step 0" if _is_function(density) else repr(density)


def _is_function(density: Density) -> TypeGuard[Callable[[int], float]]:
    """Whether it is a function other than a `Warmup`, so that only its values can be compared."""
    return callable(density) and not isinstance(density, Warmup)


def _count(size: int, share: float) -> int:
    return min(size, max(1, int(share)))


class AgreedDensity:
    """A density by round; rank 0 evaluates a function ahead for many rounds, for all ranks."""

    # Messages of unequal sizes would crash the process instead of raising an error.

    def __init__(self, density: Density, group: Group) -> None:
        self._density = density
        self._group = group
        self._known: dict[int, float] = {}

    def at(self, names: Sequence[str], round: int) -> tuple[float, ...]:
        """Return each parameter's density; for a function a collective, in one round of many."""
        if not _is_function(self._density):
            return densities_at(self._density, names, round)
        if round not in self._known:
            self._ask(round)
        return (self._known[round],) * len(names)

    def _ask(self, first: int) -> None:
        values: list[float] = []
        failure: Exception | None = None
        if self._group.rank == self._group.members[0]:
            for at in range(first, first + _ASKED_ROUNDS):
                try:
                    values.append(densities_at(self._density, [""], at)[0])
                except Exception as error:
                    failure = error
                    break
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        values, problem = self._group.broadcast_object((values, problem))
        if not values:
            raise GossipError(
                f"the function that density is has failed, asked about round {first}: {problem}. "
                "It has to give a density for every round from 0 on; a round is a backward pass "
                "outside no_sync(), or a step without one"
            ) from failure
        self._known = dict(enumerate(values, first))
