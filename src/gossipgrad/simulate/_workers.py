"""How long compute takes on each rank: jitter, slow ranks, stalls; the same for all strategies."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

__all__ = ["Pace", "Workers"]

Times = Float[np.ndarray, " rank"]


@dataclass(frozen=True, slots=True)
class Pace:
    """One step of every rank: how many times longer compute takes, and stalls at its start.

    Attributes:
        factor: Shape `(world_size,)`.
        stall_seconds: Shape `(world_size,)`.
    """

    factor: Times
    stall_seconds: Times

    def after(self, start: Times, seconds: float) -> Times:
        """When each rank has computed what takes `seconds` alone, stall included."""
        return start + self.stall_seconds + seconds * self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The ranks as computers.

    What a step takes is drawn by step and rank, so that strategies meet the same luck.

    Attributes:
        jitter: Standard deviation of the logarithm of a step's compute time; its mean stays.
        stragglers: Ranks that are slow all the time, spread by `seed`.
        straggler_factor: How many times longer they compute.
        stall_probability: Of a rank to stall at the start of a step.
        stall_seconds: How long it does.
        seed: Of the draws.

    Raises:
        ValueError: A value is out of range.
    """

    jitter: float = 0.0
    stragglers: int = 0
    straggler_factor: float = 1.0
    stall_probability: float = 0.0
    stall_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 3:
            raise ValueError(
                f"jitter is {self.jitter}: it is the spread of a step's compute relative to "
                "itself, from 0 to 3 (0.1 is 10 %)"
            )
        if self.stragglers < 0:
            raise ValueError(f"{self.stragglers} stragglers: give 0 or more")
        if not (math.isfinite(self.straggler_factor) and self.straggler_factor > 0):
            raise ValueError(
                f"straggler_factor is {self.straggler_factor}: it is how many times longer a "
                "straggler computes, above 0"
            )
        if not 0 <= self.stall_probability <= 1:
            raise ValueError(
                f"stall_probability is {self.stall_probability}: it is a share of the steps, from "
                "0 to 1"
            )
        if not (math.isfinite(self.stall_seconds) and self.stall_seconds >= 0):
            raise ValueError(f"stall_seconds is {self.stall_seconds}: give a time, 0 or more")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} is out of range: from 0 to 2**63 - 1")

    def constant(self, world_size: int) -> Times:
        """The part that stays from step to step: who is slow, and how much.

        Raises:
            ValueError: There are more stragglers than ranks.
        """
        if self.stragglers > world_size:
            raise ValueError(f"{self.stragglers} stragglers among {world_size} ranks")
        factor = np.ones(world_size)
        chosen = np.random.default_rng((self.seed, 0)).permutation(world_size)
        factor[chosen[: self.stragglers]] = self.straggler_factor
        return factor

    def pace(self, constant: Times, step: int) -> Pace:
        """Step number `step` of all ranks, which `constant()` tells apart."""
        generator = np.random.default_rng((self.seed, 1, step))
        factor, stall = constant, np.zeros_like(constant)
        if self.jitter:
            normal = generator.standard_normal(constant.size)
            factor = constant * np.exp(self.jitter * normal - self.jitter**2 / 2)
        if self.stall_probability and self.stall_seconds:
            stall[generator.random(constant.size) < self.stall_probability] = self.stall_seconds
        return Pace(factor, stall)
