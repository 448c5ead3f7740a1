"""The density of sparse gradients: a number, or one that falls over the first steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from gossipgrad._messages import warn
from gossipgrad.compression import check_density

__all__ = ["DEFAULT_DENSITY", "Density", "Warmup", "density_at", "final_density", "warn_of_loss"]


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

Density = float | Warmup
"""A share, or shares that fall in stages."""


def density_at(density: Density, step: int) -> float:
    """Return the share that is sent in a step."""
    return density(step) if isinstance(density, Warmup) else density


def final_density(density: Density) -> float:
    """Return the share that is sent after a warm-up."""
    return density.then if isinstance(density, Warmup) else density


def warn_of_loss(density: Density) -> None:
    """Warn of a density at which training lost accuracy in measurements."""
    least = DEFAULT_DENSITY.then
    if density.then < least if isinstance(density, Warmup) else density <= least:
        warn(
            f"density={density} sends less than was measured to be safe: without a warm-up "
            "networks lost 1 to 8 points of accuracy at 0.01 and 4 to 25 at 0.001, and with one "
            "still 1 to 7 at 0.001. Leave density out, or give a Warmup(then=...) of 0.01 or more"
        )
