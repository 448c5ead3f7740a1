"""Costs fitted to measurements, with no rate that the messages do not show."""

from collections.abc import Sequence
from statistics import median

from gossipgrad.planning import AffineCost

__all__ = ["OUTWEIGHS", "fit_exchange", "fit_pair", "fit_ring", "shows_rate"]

OUTWEIGHS = 5
"""Start-ups in the largest message: its rate is then at most a quarter above what it reached."""

Points = Sequence[tuple[int, float]]


def shows_rate(points: Points) -> bool:
    """Whether the largest message takes so many start-ups that a rate follows from its bytes.

    Args:
        points: Bytes and seconds of messages, of two sizes or more.
    """
    size, seconds = _largest(points)
    return size > 0 and seconds >= OUTWEIGHS * _fit(points).alpha_seconds


def fit_exchange(points: Points, ring: Points, world_size: int) -> AffineCost:
    """The cost of an exchange, by its times and those of ring all-reduces.

    Where the exchanges show no rate, it is not above the best that a message of either kind
    reached, start-ups included.

    Args:
        points: Bytes and seconds of exchanges.
        ring: Bytes and seconds of all-reduces.
        world_size: Ranks in the ring.
    """
    if shows_rate(points):
        return _bounded(points)
    size, seconds = _largest(points)
    return _bounded(points, min(seconds / size, _reached_by_ring(ring, world_size)))


def fit_pair(points: Points, usual: AffineCost) -> AffineCost:
    """The cost of an exchange of one pair: where it shows no rate, none above that of `usual`."""
    return _bounded(points, 0.0 if shows_rate(points) else usual.beta_seconds_per_byte)


def fit_ring(points: Points, world_size: int, exchange: AffineCost) -> AffineCost:
    """The cost of an all-reduce, as one line.

    A hop takes no less for a byte than an exchange, unless rings reached that with their start-ups
    included: many start-ups differ by more than the bytes of small tensors take. Where the rings do
    not show a rate, it is that of exchanges.

    Args:
        points: Bytes and seconds of all-reduces.
        world_size: Ranks in the ring.
        exchange: The cost of an exchange.
    """
    least = min(exchange.beta_seconds_per_byte, _reached_by_ring(points, world_size))
    least *= _sent_per_byte(world_size)
    return _bounded(points, least) if shows_rate(points) else _with_rate(points, least)


def _sent_per_byte(world_size: int) -> float:
    """Bytes that each rank of a ring sends for each byte that is reduced."""
    return 2 * (world_size - 1) / world_size


def _reached_by_ring(points: Points, world_size: int) -> float:
    """Seconds a byte of the largest all-reduce, start-ups included."""
    size, seconds = _largest(points)
    return seconds / (_sent_per_byte(world_size) * size)


def _bounded(points: Points, least_seconds_per_byte: float = 0.0) -> AffineCost:
    """The best line that is not below the time of the largest messages."""
    cost = _fit(points)
    size, seconds = _largest(points)
    needed = (seconds - cost.alpha_seconds) / size
    beta = max(cost.beta_seconds_per_byte, needed, least_seconds_per_byte)
    return cost if beta == cost.beta_seconds_per_byte else _with_rate(points, beta)


def _with_rate(points: Points, seconds_per_byte: float) -> AffineCost:
    """The start-up time that fits a rate best, in squares of relative errors."""
    weights = [1 / seconds**2 for _, seconds in points]
    left = sum(
        weight * (seconds - seconds_per_byte * size)
        for weight, (size, seconds) in zip(weights, points, strict=True)
    )
    return AffineCost(
        alpha_seconds=max(0.0, left / sum(weights)), beta_seconds_per_byte=seconds_per_byte
    )


def _fit(points: Points) -> AffineCost:
    return AffineCost.fit([size for size, _ in points], [seconds for _, seconds in points])


def _largest(points: Points) -> tuple[int, float]:
    largest = max(size for size, _ in points)
    return largest, median(seconds for size, seconds in points if size == largest)
