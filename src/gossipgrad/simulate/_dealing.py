"""Which tensors travel in one message, by the rules of each strategy."""

from collections.abc import Sequence
from itertools import groupby

from gossipgrad.planning import Profile

__all__ = ["by_layer", "by_size", "pieces"]


def by_size(
    size_bytes: Sequence[int], limit_bytes: int, first_limit_bytes: int | None = None
) -> list[list[int]]:
    """Tensors in their order, a bucket closing as soon as it holds its limit.

    Args:
        size_bytes: Of each tensor, in the order in which backward finishes them.
        limit_bytes: Where a bucket is full.
        first_limit_bytes: Where the first one is, if it differs: DistributedDataParallel begins
            with a small one.

    Returns:
        For each bucket the places of its tensors.

    Example:
        >>> by_size([4, 4, 4, 4], 8, first_limit_bytes=1)
        [[0], [1, 2], [3]]
    """
    buckets: list[list[int]] = []
    held = limit = 0
    for place, size in enumerate(size_bytes):
        if held >= limit:
            limit = first_limit_bytes if first_limit_bytes and not buckets else limit_bytes
            buckets.append([])
            held = 0
        buckets[-1].append(place)
        held += size
    return buckets


def by_layer(profile: Profile) -> list[list[int]]:
    """Tensors of one module together: all but the last part of their names is the same.

    Example:
        >>> by_layer(Profile(name="m", device="", source="", batch_size=1, forward_seconds=0.0,
        ...     optimizer_seconds=1.0, names=("b.bias", "b.weight", "a.weight"),
        ...     elements=(1, 1, 1), backward_seconds=(1.0, 1.0, 1.0)))
        [[0, 1], [2]]
    """
    places = range(len(profile.names))
    return [
        list(group)
        for _, group in groupby(places, key=lambda place: profile.names[place].rpartition(".")[0])
    ]


def pieces(size_bytes: Sequence[int], limit_bytes: int) -> int:
    """How many messages gossip makes of tensors: as `by_size`, and larger ones are cut.

    Example:
        >>> pieces([4, 4, 40], 8)
        6
    """
    cut: list[int] = []
    for size in size_bytes:
        whole, rest = divmod(size, limit_bytes)
        cut += [limit_bytes] * whole + [rest] * (rest > 0)
    return max(1, len(by_size(cut, limit_bytes)))
