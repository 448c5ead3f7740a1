"""A sampler for a user's own `DataLoader`: one rank's share, resumed where training stopped."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from jaxtyping import Int
from torch.utils.data import Sampler

from ._shards import check_place, check_whole, epoch_share


class ShardedSampler(Sampler[int]):
    """Indices of one rank's share of an epoch, in an order that seed and epoch decide.

    Every epoch has one permutation of all samples, the same on every rank: rank r gets positions r,
    r + p, r + 2p, ... Where the number of samples is no multiple of the number of ranks, `uneven`
    decides:

    * `"drop"`: the last few of the permutation, at most `world_size - 1`, sit out this epoch, and
      every rank gets equally many. In another epoch others sit out, unless `shuffle` is off.
      Right for all-reduce, which needs as many steps of every rank.
    * `"keep"`: every sample is used, and some ranks get one more than others. Gossip bears that
      ranks make unequal numbers of steps.

    No sample is repeated or goes to two ranks, unlike with torch's `DistributedSampler`, which
    repeats some where it does not drop. Nothing is communicated.

    **To resume,** save the epoch and the number of batches of it that training has used, and begin
    with `set_epoch(epoch, start=batches * batch_size)`. Only the loop knows that number: workers of
    a `DataLoader` draw ahead. With a step that is counted from the start it is
    `epoch, batches = divmod(step, len(loader))`. Pinned memory and persistent workers are as ever.

    Args:
        num_samples: Size of the data set.
        rank: This rank.
        world_size: How many there are.
        seed: Decides the order; the same on every rank.
        shuffle: Whether to permute; if not, every epoch is alike.
        uneven: What happens to samples that cannot be shared out evenly.

    Raises:
        ValueError: The rank is not in the world, there are fewer samples than ranks, `seed` is
            negative, or `uneven` is neither of the two.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = ShardedSampler(10, rank=0, world_size=2, seed=0)
        >>> loader = DataLoader(range(10), batch_size=2, sampler=sampler)
        >>> [batch.tolist() for batch in loader]
        [[4, 2], [3, 9], [8]]
        >>> sampler.set_epoch(0, start=2 * 2)  # resumed behind two batches of two
        >>> [batch.tolist() for batch in loader]
        [[8]]
    """

    def __init__(
        self,
        num_samples: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        uneven: Literal["drop", "keep"] = "drop",
    ) -> None:
        check_whole(1, world_size=world_size)
        check_whole(0, num_samples=num_samples, rank=rank, seed=seed)
        check_place(num_samples, rank, world_size)
        if uneven not in ("drop", "keep"):
            raise ValueError(f"uneven is {uneven!r}, but must be 'drop' or 'keep'.")
        self._sharing: dict[str, Any] = {
            "rank": int(rank),
            "num_samples": int(num_samples),
            "world_size": int(world_size),
            "seed": int(seed),
            "shuffle": bool(shuffle),
            "uneven": uneven,
        }
        self._epoch = self._start = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next pass goes through."""
        return self._epoch

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch of the next pass, and where it begins.

        Args:
            epoch: Its number.
            start: Samples of this rank that training has used of it; the next pass skips them, and
                one after that does not. More than there are leave none.

        Raises:
            ValueError: `epoch` or `start` is negative.
        """
        check_whole(0, epoch=epoch, start=start)
        self._epoch, self._start = int(epoch), int(start)

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank in this epoch, from `start` on.

        A second pass without `set_epoch` goes through the same epoch from its beginning.
        """
        start, self._start = self._start, 0
        return iter(self._share()[start:].tolist())

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, wherever the next pass begins."""
        return len(self._share())

    def _share(self) -> Int[np.ndarray, " sample"]:
        return epoch_share(epoch=self._epoch, **self._sharing)
