"""Predicting step times: strategies stepped through on all ranks at once."""

import math
from dataclasses import dataclass

import numpy as np

from gossipgrad.planning import Profile

from ._collective_steps import AllReduce, Local, Sparse
from ._gossip_steps import Gossip, Suda
from ._model import INSIDE_BITS_PER_SECOND, Setting, Strategy, Workers
from ._network import Network

__all__ = ["STRATEGIES", "Prediction", "predict"]

_LARGEST_WORLD = 1_000_000
_RANK_STEPS = 4_000_000  # stepped through where the number of steps is left open
_FEWEST_STEPS, _MOST_STEPS = 48, 400
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Gossip(),
        Gossip(name="gossip-sync", mode="sync"),
        Gossip(name="gossip-stale", mode="stale"),
        Gossip(name="gossip-mask", density=0.1),
        Gossip(name="local-steps", mode="sync", every=32),
        AllReduce(),
        Sparse(),
        Suda(),
        Local(),
    )
}
"""The strategies that `predict` knows by name, each with its default settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Step time and bytes of a strategy, in the steady state.

    Attributes:
        strategy: Its name.
        world_size: The number of ranks.
        step_seconds: Mean over steps and ranks.
        compute_seconds: Of it, what a rank computes.
        bytes_sent_per_step: By each rank, on average.
    """

    strategy: str
    world_size: int
    step_seconds: float
    compute_seconds: float
    bytes_sent_per_step: float

    @property
    def efficiency(self) -> float:
        """The share of a step that is compute."""
        return self.compute_seconds / self.step_seconds

    @property
    def exposed_seconds(self) -> float:
        """The rest: waiting for messages and for other ranks."""
        return self.step_seconds - self.compute_seconds


def predict(
    profile: Profile | str,
    network: Network,
    strategy: Strategy | str,
    *,
    world_size: int,
    workers: Workers | None = None,
    steps: int | None = None,
    island: int = 1,
    inside: Network | None = None,
) -> Prediction:
    """How long a step of that model takes, with that strategy, on so many ranks.

    A model of time: nothing is trained and nothing sent. All ranks are stepped through their
    schedule of computing, sending and waiting, as arrays, in memory of a few numbers a rank. The
    first steps, in which ranks do not wait for each other yet, do not count. Equal arguments give
    equal figures.

    Args:
        profile: Compute of a step, and the tensors that travel: a `Profile`, or the name of a
            built-in one.
        network: Cost of messages.
        strategy: A name from `gossipgrad.simulate.STRATEGIES`, or a value with other settings.
        world_size: The number of ranks, up to a million.
        workers: Jitter and stragglers; None: every rank computes as the profile says.
        steps: How many to step through; None: as many as take a second or a few. Rounded up to
            whole periods of local steps.
        island: Ranks of a node, which share its link. Gossip is then that of islands; an all-reduce
            sends over that link what one rank sends.
        inside: Cost of messages inside a node; None: 100 Gbit/s.

    Returns:
        The means.

    Raises:
        ValueError: A value is out of range, or a step takes more seconds than a float holds.

    Example:
        >>> network = Network.from_rate(1e9)
        >>> found = [
        ...     predict("resnet50", network, name, world_size=64).efficiency
        ...     for name in ("gossip", "allreduce")
        ... ]
        >>> found[0] > found[1]
        True
    """
    if not 1 <= world_size <= _LARGEST_WORLD:
        raise ValueError(
            f"world_size is {world_size}: there are 1 to {_LARGEST_WORLD:,} ranks in a prediction"
        )
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}: step through 1 or more")
    if island < 1 or world_size % island:
        raise ValueError(
            f"island is {island}: give a number of ranks of which world_size={world_size} is a "
            "multiple"
        )
    profile = Profile.load(profile) if isinstance(profile, str) else profile
    inside = inside or Network.from_rate(INSIDE_BITS_PER_SECOND)
    setting = Setting(
        profile=profile, network=network, world_size=world_size, island=island, inside=inside
    )
    strategy, workers = _resolve(strategy), workers or Workers()
    with np.errstate(over="ignore", invalid="ignore"):  # a ValueError below
        running = strategy.begin(setting)
        counted = steps or min(_MOST_STEPS, max(_FEWEST_STEPS, _RANK_STEPS // world_size))
        cycle = running.cycle
        warm_up = math.ceil(max(8, 2 * (world_size - 1).bit_length()) / cycle) * cycle
        counted = math.ceil(counted / cycle) * cycle
        constant, time = workers.constant(world_size), np.zeros(world_size)
        began_seconds, compute_seconds, bytes_before = 0.0, 0.0, 0.0
        for number in range(warm_up + counted):
            pace = workers.pace(constant, number)
            if number == warm_up:
                began_seconds, bytes_before = float(time.mean()), running.bytes_sent
            if number >= warm_up:
                compute_seconds += profile.compute_seconds * float(pace.mean())
            time = running.step(number, time, pace)
        step_seconds = (float(time.mean()) - began_seconds) / counted
    if not math.isfinite(step_seconds):
        raise ValueError(
            f"a step of {strategy.name} on {world_size:,} ranks takes more seconds than a float "
            "holds: give faster links, and shorter times"
        )
    return Prediction(
        strategy=strategy.name,
        world_size=world_size,
        step_seconds=step_seconds,
        compute_seconds=compute_seconds / counted,
        bytes_sent_per_step=(running.bytes_sent - bytes_before) / counted,
    )


def _resolve(strategy: Strategy | str) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise ValueError(
            f"no strategy {strategy!r} is modelled: choose among {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[strategy]
