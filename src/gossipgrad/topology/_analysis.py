"""How well a schedule mixes: contraction of the consensus distance, spread of information.

Up to 256 ranks every number is exact. Above, no matrix of world size squared is made: rounds are
applied to a block of random vectors, or to the spread from a sample of the ranks, and the numbers
are estimates from those (seeded: the same every time).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from jaxtyping import Float, UInt8

from ._schedule import NOBODY, Ranks, Schedule, check_weight

EXACT_UP_TO = 256
"""The largest world size whose analysis is exact."""
_RANDOM_VECTORS = 16
_SAMPLED_SOURCES = 256
_MOST_ROUNDS_FOR_THE_GAP = 512
_ROUNDING = 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """The result of `analyse`; a number of rounds is None if it exceeds `max_rounds`."""

    exact: bool
    """Whether the figures are exact; estimates otherwise."""
    doubly_stochastic: bool
    """Whether every mixing matrix of the first period keeps the mean."""
    spectral_gap: float
    """See `spectral_gap`; of one period."""
    rounds_to_contract_10x: int | None
    r"""Rounds until the consensus distance is a tenth of that at the start.

    For replicas that start independent and alike in spread, so that after t rounds it is
    $\|W_{t-1} \cdots W_0 - J\|_F / \|I - J\|_F$, with $J$ the matrix of all $1/p$.
    """
    rounds_to_contract_1000x: int | None
    """Rounds until the consensus distance is a thousandth."""
    rounds_until_all_know_all: int | None
    """See `rounds_until_all_know_all`."""


def analyse(schedule: Schedule, *, weight: float = 0.5, max_rounds: int = 1_000) -> Analysis:
    """Compute figures to compare schedules, from round 0 on.

    Args:
        schedule: any; 100,000 ranks take seconds.
        weight: the weight of the delta; a schedule from a matrix has its own.
        max_rounds: the most rounds to try.

    Raises:
        ValueError: when the weight is outside 0 to 1.

    Example:
        >>> from gossipgrad.topology import dissemination
        >>> analyse(dissemination(8)).rounds_to_contract_1000x
        3
    """
    check_weight(weight)
    tenth = thousandth = None
    for t, left in zip(range(max_rounds + 1), _contractions(schedule, weight), strict=False):
        if tenth is None and left <= 0.1:
            tenth = t
        if left <= 1e-3:
            thousandth = t
            break
    return Analysis(
        exact=schedule.world_size <= EXACT_UP_TO,
        doubly_stochastic=all(
            _keeps_the_mean(schedule, t, weight) for t in range(min(schedule.period, max_rounds))
        ),
        spectral_gap=spectral_gap(schedule, weight=weight),
        rounds_to_contract_10x=tenth,
        rounds_to_contract_1000x=thousandth,
        rounds_until_all_know_all=rounds_until_all_know_all(schedule, max_rounds=max_rounds),
    )


def mixing_product(
    schedule: Schedule, rounds: int, *, weight: float = 0.5
) -> Float[np.ndarray, "rank rank"]:
    """Return the product of the mixing matrices of rounds 0 to `rounds - 1`.

    Returns:
        Shape `(world_size, world_size)`: row i says how rank i's value is made of the first ones.
    """
    check_weight(weight)
    product = np.eye(schedule.world_size)
    for t in range(rounds):
        product = _mix(product, schedule, t, weight)
    return product


def spectral_gap(schedule: Schedule, *, weight: float = 0.5, periods: int = 4) -> float:
    r"""Return the spectral gap of one period: 1 is the exact average, 0 is no mixing.

    With $L$ the period, $m$ = `periods` consecutive ones from round 0 on, each on its own
    relabelling, and the spectral norm,

    .. math:: 1 - \| W_{mL-1} \cdots W_0 - J \|_2^{1/m}.

    The norm is the worst contraction of the consensus distance over these periods, for whatever
    the replicas hold; its root averages over the relabellings. For one period it is the same on
    every relabelling: what rotation adds shows from two on.

    Above 256 ranks the contraction of random vectors over at most 512 rounds, scaled to one
    period, replaces the worst one. The result is then an upper bound: close where mixing is
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
        block = _mix(block, schedule, t, weight)
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
    """Return the share of ranks that have reached each rank, after 0 to `rounds` rounds.

    Args:
        schedule: any; above 256 ranks the share is that of 256 evenly spaced ranks.
        rounds: the number of rounds.

    Returns:
        Shape `(rounds + 1, world_size)`, from about `1 / world_size` up to 1.
    """
    return np.stack([share for _, share in zip(range(rounds + 1), _shares(schedule), strict=False)])


def rounds_until_all_know_all(schedule: Schedule, *, max_rounds: int = 1_000) -> int | None:
    """Return the first number of rounds after which every rank has reached every other.

    Args:
        schedule: any; above 256 ranks "every other" are 256 evenly spaced ranks, so the answer
            may be too small.
        max_rounds: the most rounds to try.

    Returns:
        The number of rounds, or None when `max_rounds` are not enough.
    """
    shares = zip(range(max_rounds + 1), _shares(schedule), strict=False)
    return next((t for t, share in shares if share.min() == 1.0), None)


def _start(schedule: Schedule) -> Float[np.ndarray, "rank column"]:
    """Columns without a mean: the identity's up to `EXACT_UP_TO` ranks, else random vectors."""
    p = schedule.world_size
    exact = p <= EXACT_UP_TO
    block = np.eye(p) if exact else np.random.default_rng(0).normal(size=(p, _RANDOM_VECTORS))
    return block - block.mean(axis=0)


def _mix(
    block: Float[np.ndarray, "rank column"], schedule: Schedule, round: int, weight: float
) -> Float[np.ndarray, "rank column"]:
    recv_from, taken = _received(schedule, round, weight)
    return block + taken[:, None] * (block[recv_from] - block)


def _contractions(schedule: Schedule, weight: float) -> Iterator[float]:
    block = _start(schedule)
    at_start = max(float(np.linalg.norm(block)), _ROUNDING)
    for t in count():
        yield float(np.linalg.norm(block)) / at_start
        block = _mix(block, schedule, t, weight)


def _keeps_the_mean(schedule: Schedule, round: int, weight: float) -> bool:
    recv_from, taken = _received(schedule, round, weight)
    given = np.bincount(recv_from, weights=taken, minlength=schedule.world_size)
    return bool((taken >= 0.0).all() and (taken <= 1.0).all() and np.allclose(given, taken))


def _received(
    schedule: Schedule, round: int, weight: float
) -> tuple[Ranks, Float[np.ndarray, " rank"]]:
    """The rank that each receives from, itself where it sits out, and the weight that it takes."""
    recv_from = schedule.round_peers(round).recv_from
    takes_part = recv_from != NOBODY
    taken = np.where(takes_part, schedule.round_weights(round, weight), 0.0)
    return np.where(takes_part, recv_from, np.arange(schedule.world_size)), taken


def _shares(schedule: Schedule) -> Iterator[Float[np.ndarray, " rank"]]:
    """Yield the share of sources that have reached each rank, after 0, 1, 2, ... rounds."""
    p = schedule.world_size
    sources = np.unique(np.linspace(0, p - 1, min(p, _SAMPLED_SOURCES)).astype(np.int64))
    bits = np.zeros((p, sources.size), np.bool_)
    bits[sources, np.arange(sources.size)] = True
    known: UInt8[np.ndarray, "rank byte"] = np.packbits(bits, axis=1)
    for t in count():
        yield np.unpackbits(known, axis=1, count=sources.size).sum(axis=1) / sources.size
        recv_from, _ = _received(schedule, t, 0.5)
        known = np.bitwise_or(known, known[recv_from])
