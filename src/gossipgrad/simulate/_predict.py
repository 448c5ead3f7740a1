"""Predicting step times: strategies stepped through on all ranks at once."""

import math
from dataclasses import dataclass

import numpy as np

from gossipgrad.planning import Profile

from ._collective_steps import AllReduce, Local, Merged, PeriodicAverage
from ._gossip_steps import Gossip, Suda
from ._model import Setting, Strategy, Workers
from ._network import Network

__all__ = ["STRATEGIES", "Prediction", "predict", "strategy_by_name"]

_LARGEST_WORLD = 1_000_000
_RANK_STEPS = 4_000_000  # stepped through where the number of steps is left open
_FEWEST_STEPS, _MOST_STEPS = 48, 400
_STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Gossip(),
        Gossip(name="gossip-sync", mode="sync"),
        Gossip(name="gossip-stale", mode="stale", topology="matching"),
        Gossip(name="gossip-mask", density=0.1),
        Gossip(name="local-steps", every=32),
        AllReduce(),
        AllReduce(name="agd", buckets="layer"),
        PeriodicAverage(name="every-log-p", every="log_p", state_copies=None),
        PeriodicAverage(),
        Local(),
        Suda(),
        *(Merged(name=rule, rule=rule) for rule in ("omgs", "topk", "lags", "wfbp", "mg-wfbp")),
    )
}

STRATEGIES = tuple(_STRATEGIES)
"""The names that `strategy_by_name` knows."""


def strategy_by_name(name: str) -> Strategy:
    """The strategy of that name as `gossipgrad train` has it by default, for `predict`.

    `gossip` overlaps, `gossip-sync` hides behind the next forward pass, `gossip-stale` never
    waits, `gossip-mask` sends a tenth of the weights a round, `local-steps` one round in 32;
    `post-local-sgd` is its second part, local steps with an average every 16. Sparse gradients
    have density 0.01.

    Raises:
        ValueError: There is none of that name.

    Example:
        >>> strategy_by_name("agd").buckets
        'layer'
    """
    if name not in _STRATEGIES:
        raise ValueError(f"no strategy {name!r} is modelled: choose among {', '.join(STRATEGIES)}")
    return _STRATEGIES[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Step time and bytes of a strategy, in the steady state.

    Attributes:
        strategy: Its name.
        profile: Name of the model's profile.
        world_size: The number of ranks.
        step_seconds: Mean over steps and ranks.
        compute_seconds: Of it, what a rank computes, stalls included.
        bytes_sent_per_step: By each rank, on average.
        samples_per_second: Of all ranks together.
        steps: That were stepped through for these means.
    """

    strategy: str
    profile: str
    world_size: int
    step_seconds: float
    compute_seconds: float
    bytes_sent_per_step: float
    samples_per_second: float
    steps: int

    @property
    def efficiency(self) -> float:
        """The share of a step that is compute."""
        return self.compute_seconds / self.step_seconds

    @property
    def exposed_seconds(self) -> float:
        """The rest: waiting for messages and for other ranks, copying and mixing of gossip."""
        return self.step_seconds - self.compute_seconds


def predict(
    profile: Profile,
    network: Network,
    strategy: Strategy | str,
    *,
    world_size: int,
    workers: Workers | None = None,
    steps: int | None = None,
) -> Prediction:
    """How long a step of that model takes, with that strategy, on so many ranks.

    A model of time: nothing is trained and nothing sent. All ranks are stepped through their
    schedule of computing, sending and waiting, as arrays, in memory of a few numbers a rank. The
    first steps, in which ranks do not wait for each other yet, do not count. The flows on a shared
    uplink are computed one after another: racks of thousands take long. Equal arguments give equal
    figures.

    Args:
        profile: Compute of a step, and the tensors that travel.
        network: Cost of messages and collectives.
        strategy: A name from `STRATEGIES`, or a value with other settings.
        world_size: The number of ranks, up to a million.
        workers: Jitter and stragglers; None: every rank computes as the profile says.
        steps: How many to step through; None: as many as take a second or a few. Rounded up to
            whole cycles of what is sent, and, unless that takes too many, of the partners. Averages
            more than 128 steps apart are not stepped through: each step gets its share of one.

    Returns:
        The means.

    Raises:
        ValueError: A value is out of range, the network names ranks that do not exist, or a step
            takes more seconds than a float holds.

    Example:
        >>> from gossipgrad.planning import AffineCost, Profile
        >>> network = Network(
        ...     exchange=AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=5e-5)
        ... )
        >>> profile = Profile.load("resnet50")
        >>> found = [predict(profile, network, name, world_size=64).efficiency
        ...          for name in ("gossip", "allreduce")]
        >>> found[0] > found[1]
        True
    """
    if not 1 <= world_size <= _LARGEST_WORLD:
        raise ValueError(
            f"world size {world_size} is out of range: from 1 to {_LARGEST_WORLD:,} ranks"
        )
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}: step through 1 or more")
    network.check(world_size)
    workers = workers or Workers()
    if isinstance(strategy, str):
        strategy = strategy_by_name(strategy)
    with np.errstate(over="ignore", invalid="ignore"):  # a ValueError below
        running = strategy.begin(Setting(profile=profile, network=network, world_size=world_size))
        at_most = _RANK_STEPS // world_size
        counted = steps or min(_MOST_STEPS, max(_FEWEST_STEPS, at_most))
        warm_up = max(8, 2 * (world_size - 1).bit_length())
        cycle = running.cycle
        if cycle * running.rotation <= max(counted, at_most):
            cycle *= running.rotation
        if cycle <= counted:  # a long cycle may begin anywhere
            warm_up = math.ceil(warm_up / cycle) * cycle
        counted = math.ceil(counted / cycle) * cycle
        constant = workers.constant(world_size)
        time, no_time = np.zeros(world_size), np.zeros(world_size)
        began_seconds, compute_seconds, bytes_before = 0.0, 0.0, 0.0
        for number in range(warm_up + counted):
            pace = workers.pace(constant, number)
            if number == warm_up:
                began_seconds, bytes_before = float(time.mean()), running.bytes_sent
            if number >= warm_up:
                compute_seconds += float(pace.after(no_time, profile.compute_seconds).mean())
            time = running.step(number, time, pace)
        seldom_seconds, seldom_bytes = running.seldom(time)
        step_seconds = (float(time.mean()) - began_seconds) / counted + seldom_seconds
    if not math.isfinite(step_seconds):
        raise ValueError(
            f"a step of {strategy.name} on {world_size:,} ranks takes more seconds than a float "
            "holds: give faster links, and shorter times"
        )
    return Prediction(
        strategy=strategy.name,
        profile=profile.name,
        world_size=world_size,
        step_seconds=step_seconds,
        compute_seconds=compute_seconds / counted,
        bytes_sent_per_step=(running.bytes_sent - bytes_before) / counted + seldom_bytes,
        samples_per_second=world_size * profile.batch_size / step_seconds,
        steps=counted,
    )
