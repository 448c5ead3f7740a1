"""How well a schedule mixes: contraction of the consensus distance, spread of information.

Up to 256 ranks every number is exact. Above, no matrix of world size squared is made: rounds are
applied to a block of random vectors, or to the spread from a sample of the ranks, and the numbers
are estimates from those (seeded: the same every time).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from jaxtyping import Bool, Float, UInt8

from ._schedule import NOBODY, Schedule, check_weight

EXACT_UP_TO = 256
"""The largest world size whose analysis is exact."""
_RANDOM_VECTORS = 16
_SAMPLED_SOURCES = 256
_MOST_ROUNDS_FOR_THE_GAP = 512
_ROUNDING = 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """What `analyse` found; None where more rounds were needed than it looked at."""

    exact: bool
    """Whether the figures are exact; estimates otherwise."""
    doubly_stochastic: bool
    """Whether every mixing matrix of the first period keeps the mean."""
    spectral_gap: float
    """See `spectral_gap`; of one period."""
    rounds_to_contract_10x: int | None
    """Rounds until the consensus distance is a tenth; see `contraction`."""
    rounds_to_contract_1000x: int | None
    """Rounds until the consensus distance is a thousandth."""
    rounds_until_all_know_all: int | None
    """See `rounds_until_all_know_all`."""


def analyse(schedule: Schedule, *, weight: float = 0.5, max_rounds: int = 1_000) -> Analysis:
    """The figures by which schedules are compared, from round 0 on.

    Args:
        schedule: any; 100,000 ranks take seconds.
        weight: how much of the delta is taken; a schedule from a matrix has its own.
        max_rounds: where to give up.

    Raises:
        ValueError: when the weight is outside 0 to 1.

    Example:
        >>> from gossipgrad.topology import dissemination
        >>> analyse(dissemination(8)).rounds_to_contract_1000x
        3
    """
    ratios = list(_until(_contractions(schedule, weight), 1e-3, max_rounds))
    return Analysis(
        exact=schedule.world_size <= EXACT_UP_TO,
        doubly_stochastic=all(
            _keeps_the_mean(schedule, t, weight) for t in range(min(schedule.period, max_rounds))
        ),
        spectral_gap=spectral_gap(schedule, weight=weight),
        rounds_to_contract_10x=_first_within(ratios, 0.1),
        rounds_to_contract_1000x=_first_within(ratios, 1e-3),
        rounds_until_all_know_all=rounds_until_all_know_all(schedule, max_rounds=max_rounds),
    )


def is_doubly_stochastic(
    matrix: Float[np.ndarray, "rank rank"], *, tolerance: float = 1e-9
) -> bool:
    """Whether no entry is negative and all rows and columns sum to 1: mixing keeps the mean."""
    sums = np.concatenate([matrix.sum(axis=0), matrix.sum(axis=1)])
    return bool(matrix.min() >= -tolerance and np.abs(sums - 1.0).max() <= tolerance)


def mixing_product(
    schedule: Schedule, rounds: int, *, weight: float = 0.5
) -> Float[np.ndarray, "rank rank"]:
    """The mixing of rounds 0 to `rounds - 1` together: the product of their matrices.

    Returns:
        Shape `(world_size, world_size)`: row i says how rank i's value is made of the first ones.
    """
    check_weight(weight)
    product = np.eye(schedule.world_size)
    for t in range(rounds):
        product = _mixed(product, schedule, t, weight)
    return product


def contraction(
    schedule: Schedule, rounds: int, *, weight: float = 0.5
) -> Float[np.ndarray, " time"]:
    r"""What is left of the consensus distance after 0 to `rounds` rounds.

    For replicas that start independent and alike in spread, with $D_t = W_{t-1} \cdots W_0 - J$
    and $J$ the matrix of all $1/p$,

    .. math:: c_t = \|D_t\|_F / \|D_0\|_F,

    the root of the expected squared consensus distance relative to that at the start.

    Args:
        schedule: any; above 256 ranks the expectation is estimated from random vectors.
        rounds: how far to go.
        weight: how much of the delta is taken; a schedule from a matrix has its own.

    Returns:
        Shape `(rounds + 1,)`, the first entry 1; all 0 for a single rank, which has no distance.
    """
    return np.array(list(islice(_contractions(schedule, weight), rounds + 1)))


def spectral_gap(schedule: Schedule, *, weight: float = 0.5, periods: int = 4) -> float:
    r"""How far one period is from not mixing at all: 1 is the exact average, 0 is nothing.

    With $L$ the period, $m$ = `periods` consecutive ones from round 0 on, each on its own
    relabelling, and the spectral norm,

    .. math:: 1 - \| W_{mL-1} \cdots W_0 - J \|_2^{1/m}.

    The norm is the worst contraction of the consensus distance over these periods, for whatever
    the replicas hold; its root averages over the relabellings. For one period it is the same on
    every relabelling: what rotation adds shows from two on.

    Above 256 ranks the contraction of random vectors over at most 512 rounds, scaled to one
    period, stands for the worst one. The result is then an upper bound: close where mixing is
    fast, far too good where it is slow (a ring).
    """
    period = schedule.period
    exact = schedule.world_size <= EXACT_UP_TO
    rounds = periods * period if exact else min(periods * period, _MOST_ROUNDS_FOR_THE_GAP)
    check_weight(weight)
    block = _start(schedule)
    block /= max(np.linalg.norm(block), _ROUNDING)
    shrunk = 0.0
    for t in range(rounds):
        block = _mixed(block, schedule, t, weight)
        left = float(np.linalg.norm(block))
        if left < _ROUNDING:
            return 1.0
        # Kept at norm 1, with the mean taken out, or rounding errors would outgrow what is left.
        block = (block - block.mean(axis=0)) / left
        shrunk += float(np.log(left))
    if exact:
        shrunk += float(np.log(np.linalg.norm(block, 2) * np.sqrt(schedule.world_size - 1)))
    return float(1.0 - np.exp(shrunk * period / rounds))


def diffusion(schedule: Schedule, rounds: int) -> Float[np.ndarray, "time rank"]:
    """The share of ranks of which each rank holds something, after 0 to `rounds` rounds.

    Args:
        schedule: any; above 256 ranks the share is that of 256 evenly spaced ranks.
        rounds: how far to go.

    Returns:
        Shape `(rounds + 1, world_size)`, from about `1 / world_size` up to 1.
    """
    known, sources = _sources(schedule)
    shares = [_share(known, sources)]
    for t in range(rounds):
        known = _spread(known, schedule, t)
        shares.append(_share(known, sources))
    return np.stack(shares)


def rounds_until_all_know_all(schedule: Schedule, *, max_rounds: int = 1_000) -> int | None:
    """The first number of rounds after which every rank holds something of every other.

    Args:
        schedule: any; above 256 ranks "every other" are 256 evenly spaced ranks, so the answer
            may be too small.
        max_rounds: where to give up.

    Returns:
        The number of rounds, or None when `max_rounds` are not enough.
    """
    known, sources = _sources(schedule)
    for t in range(max_rounds + 1):
        if _share(known, sources).min() == 1.0:
            return t
        known = _spread(known, schedule, t)
    return None


def _start(schedule: Schedule) -> Float[np.ndarray, "rank column"]:
    """Columns without a mean: the identity's up to `EXACT_UP_TO` ranks, else random vectors."""
    p = schedule.world_size
    exact = p <= EXACT_UP_TO
    block = np.eye(p) if exact else np.random.default_rng(0).normal(size=(p, _RANDOM_VECTORS))
    return block - block.mean(axis=0)


def _mixed(
    block: Float[np.ndarray, "rank column"], schedule: Schedule, round: int, weight: float
) -> Float[np.ndarray, "rank column"]:
    recv_from, taking_part = _receivers(schedule, round)
    taken = np.where(taking_part, schedule.round_weights(round, weight), 0.0)
    return block + taken[:, None] * (block[recv_from] - block)


def _contractions(schedule: Schedule, weight: float) -> Iterator[float]:
    check_weight(weight)
    block = _start(schedule)
    at_start = max(float(np.linalg.norm(block)), _ROUNDING)
    for t in count():
        yield float(np.linalg.norm(block)) / at_start
        block = _mixed(block, schedule, t, weight)


def _until(ratios: Iterator[float], enough: float, max_rounds: int) -> Iterator[float]:
    for ratio in islice(ratios, max_rounds + 1):
        yield ratio
        if ratio <= enough:
            return


def _first_within(ratios: list[float], enough: float) -> int | None:
    return next((t for t, ratio in enumerate(ratios) if ratio <= enough), None)


def _keeps_the_mean(schedule: Schedule, round: int, weight: float) -> bool:
    recv_from, taking_part = _receivers(schedule, round)
    taken = np.where(taking_part, schedule.round_weights(round, weight), 0.0)
    given = np.bincount(recv_from, weights=taken, minlength=schedule.world_size)
    return bool((taken >= 0.0).all() and (taken <= 1.0).all() and np.allclose(given, taken))


def _receivers(schedule: Schedule, round: int) -> tuple[np.ndarray, Bool[np.ndarray, " rank"]]:
    """Whom each rank receives from, itself where it sits out, and who takes part."""
    recv_from = schedule.round_peers(round).recv_from
    taking_part = recv_from != NOBODY
    return np.where(taking_part, recv_from, np.arange(schedule.world_size)), taking_part


def _sources(schedule: Schedule) -> tuple[UInt8[np.ndarray, "rank byte"], int]:
    """One bit for each rank and source, set where the rank is the source; and how many sources."""
    p = schedule.world_size
    sources = np.unique(np.linspace(0, p - 1, min(p, _SAMPLED_SOURCES)).astype(np.int64))
    bits = np.zeros((p, sources.size), np.bool_)
    bits[sources, np.arange(sources.size)] = True
    return np.packbits(bits, axis=1), sources.size


def _spread(
    known: UInt8[np.ndarray, "rank byte"], schedule: Schedule, round: int
) -> UInt8[np.ndarray, "rank byte"]:
    recv_from, _ = _receivers(schedule, round)
    return known | known[recv_from]


def _share(known: UInt8[np.ndarray, "rank byte"], sources: int) -> Float[np.ndarray, " rank"]:
    return np.unpackbits(known, axis=1, count=sources).sum(axis=1) / sources
