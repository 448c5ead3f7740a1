"""How the samples of an epoch are dealt to the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ._samples import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedBatches:
    """Shuffled batches of one rank's share, drawn anew each epoch.

    Every epoch has one permutation of all samples, made from `(seed, epoch)` and so the same on
    every rank. Its first `world_size * (n // world_size)` positions are dealt like cards: rank r
    gets positions r, r + p, r + 2p, ... So in an epoch every rank gets equally many samples, no
    sample goes to two ranks, and at most `world_size - 1` sit out, others in each epoch. The last
    batch of an epoch may be smaller. The samples are augmented, by `(seed, epoch)` as well, where
    the data set has an augmentation. Nothing is communicated.

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

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, but must be at least 1.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in 0..{self.world_size - 1}.")
        if len(self.samples) < self.world_size:
            raise ValueError(
                f"{len(self.samples)} samples do not give one to each of {self.world_size} ranks; "
                "start fewer."
            )

    @property
    def samples_per_epoch(self) -> int:
        """Samples that this rank, like every other, sees in an epoch."""
        return len(self.samples) // self.world_size

    def __len__(self) -> int:
        """Batches an epoch."""
        return -(-self.samples_per_epoch // self.batch_size)

    def epoch(
        self, epoch: int, *, start_batch: int = 0
    ) -> Iterator[tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]]:
        """The batches of an epoch, from batch `start_batch` on."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.samples))
        mine = torch.from_numpy(order[self.rank :: self.world_size][: self.samples_per_epoch])
        for start in range(start_batch * self.batch_size, len(mine), self.batch_size):
            chosen = mine[start : start + self.batch_size]
            yield self.samples.batch(chosen, augment=(self.seed, epoch))


def shard_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous share; shares differ by at most one sample.

    Example:
        >>> [shard_bounds(10, rank, 4) for rank in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return rank * num_samples // world_size, (rank + 1) * num_samples // world_size
