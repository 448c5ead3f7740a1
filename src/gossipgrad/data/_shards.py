"""How ranks share the samples of an epoch, and make batches of them ahead of training."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ._dataset import Samples

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedBatches:
    """Shuffled batches of one rank's share, drawn for each epoch.

    Every epoch has one permutation of all samples, made from `(seed, epoch)` and so the same on
    every rank. Its first `world_size * (n // world_size)` positions go to the ranks in turn: rank r
    gets positions r, r + p, r + 2p, ... So in an epoch every rank gets equally many samples, no
    sample goes to two ranks, and at most `world_size - 1` sit out, others in each epoch. The last
    batch of an epoch may be smaller, but is never a single sample: that one joins the batch before
    it, since batch normalisation may have nothing to average over in it. So only with a
    `batch_size` of 1, or one sample a rank, are there batches of one. The samples are augmented, by
    `(seed, epoch)` as well, where the data set has an augmentation. Nothing is communicated.

    An epoch depends on nothing but the fields and its number, and can be entered at any batch:
    `(epoch, batch)` is all that a resumed run needs.

    Example:
        >>> from gossipgrad.data import TensorSamples
        >>> samples = TensorSamples(torch.arange(5.0), torch.arange(5))
        >>> shards = [
        ...     ShardedBatches(samples=samples, batch_size=2, rank=rank, world_size=2, seed=0)
        ...     for rank in range(2)
        ... ]
        >>> [[y.tolist() for _, y in shard.epoch(0)] for shard in shards]
        [[[2, 3]], [[4, 0]]]
    """

    samples: Samples
    batch_size: int
    rank: int
    world_size: int
    seed: int
    threads: int = 0
    """How many make batches ahead; worth it where samples are decoded."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, but must be at least 1.")
        check_place(len(self.samples), self.rank, self.world_size)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that this rank, like every other, sees in an epoch."""
        return len(self.samples) // self.world_size

    def __len__(self) -> int:
        """Batches an epoch."""
        return num_batches(self.samples_per_epoch, self.batch_size)

    def epoch(
        self, epoch: int, *, start_batch: int = 0
    ) -> Iterator[tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]]:
        """The batches of an epoch, from batch `start_batch` on."""
        share = epoch_share(
            num_samples=len(self.samples),
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            epoch=epoch,
        )
        chosen = split_batches(torch.from_numpy(share), self.batch_size)[start_batch:]
        make = partial(self.samples.batch, augment=(self.seed, epoch))
        return made_ahead(make, chosen, threads=self.threads)


def num_batches(num_samples: int, batch_size: int) -> int:
    """How many batches `split_batches` makes."""
    whole, rest = divmod(num_samples, batch_size)
    return whole + (rest > 1 or (rest == 1 and not whole))


def split_batches(
    indices: Int[Tensor, " sample"], batch_size: int
) -> tuple[Int[Tensor, " batch"], ...]:
    """Indices in batches; a last one of a single sample joins the batch before it.

    Example:
        >>> [batch.tolist() for batch in split_batches(torch.arange(7), 3)]
        [[0, 1, 2], [3, 4, 5, 6]]
    """
    starts = range(batch_size, num_batches(len(indices), batch_size) * batch_size, batch_size)
    return indices.tensor_split(list(starts))


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> Int[np.ndarray, " sample"]:
    """The permutation of all samples in an epoch, the same on every rank."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def epoch_share(
    *,
    num_samples: int,
    rank: int,
    world_size: int,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    uneven: Literal["drop", "keep"] = "drop",
) -> Int[np.ndarray, " sample"]:
    """Indices of the samples that a rank gets in an epoch, in their order."""
    order = epoch_order(num_samples, seed=seed, epoch=epoch) if shuffle else np.arange(num_samples)
    mine = order[rank::world_size]
    return mine[: num_samples // world_size] if uneven == "drop" else mine


def check_place(num_samples: int, rank: int, world_size: int) -> None:
    """Raise `ValueError` for a rank out of its world, or fewer samples than ranks."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0..{world_size - 1}.")
    if num_samples < world_size:
        raise ValueError(
            f"{num_samples} samples do not give one to each of {world_size} ranks; start fewer."
        )


def shard_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous share; shares differ by at most one sample.

    Example:
        >>> [shard_bounds(10, rank, 4) for rank in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return rank * num_samples // world_size, (rank + 1) * num_samples // world_size


def made_ahead(
    make: Callable[[Item], Result], items: Iterable[Item], *, threads: int
) -> Iterator[Result]:
    """`make(item)` of every item, in their order; the same results whatever `threads` is.

    Args:
        make: Must bear being called from several threads at once.
        items: Gone through as results are taken, up to `threads` items ahead.
        threads: How many work ahead; 0: each result is made when it is asked for. They end with
            the iterator, after what they are at.
    """
    if threads == 0:
        yield from map(make, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="gossipgrad-data")
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(make, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def check_whole(least: int, **values: object) -> None:
    """Raise `ValueError` for a value that is no whole number, or less than `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise ValueError(
                f"{name} is {value!r}, but must be a whole number of at least {least}."
            )
