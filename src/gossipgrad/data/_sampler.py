"""A sampler for a user's own `DataLoader`: one rank's share, resumed where training stopped."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from jaxtyping import Int
from torch.utils.data import Sampler

from ._shards import check_place, check_whole, epoch_share


class ShardedSampler(Sampler[int]):
    """Indices of one rank's share of an epoch, in an order that seed and epoch decide.

    Every epoch has one permutation of all samples, the same on every rank, and deals it like
    cards: rank r gets positions r, r + p, r + 2p, ... Where the number of samples is no multiple
    of the number of ranks, `uneven` decides:

    * `"drop"`: the last few of the permutation, at most `world_size - 1`, sit out this epoch, and
      every rank gets equally many. In another epoch others sit out, unless `shuffle` is off.
      Right for all-reduce, which needs as many steps of every rank.
    * `"keep"`: every sample is dealt, and some ranks get one more than others. Gossip bears that
      ranks make unequal numbers of steps.

    No sample is repeated or goes to two ranks, unlike with torch's `DistributedSampler`, which
    repeats some where it does not drop. Nothing is communicated.

    To save in the middle of an epoch, tell `state_dict` how many samples training has used: the
    workers of a `DataLoader` draw ahead, so the sampler itself cannot know. One with `drop_last`
    leaves samples over at the end of an epoch; tell its `batch_size` as well, so that the epoch
    counts as over then. After `load_state_dict` the first pass begins behind what was used;
    `set_epoch` of the same epoch changes nothing, of another one starts at its beginning.

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
        >>> resumed = ShardedSampler(10, rank=0, world_size=2, seed=0)
        >>> resumed.load_state_dict(sampler.state_dict(used=4))
        >>> list(resumed)
        [8]
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
        # Numbers of numpy would be refused by torch.load, which takes plain ones alone.
        self._deal: dict[str, Any] = {
            "rank": int(rank),
            "num_samples": int(num_samples),
            "world_size": int(world_size),
            "seed": int(seed),
            "shuffle": bool(shuffle),
            "uneven": uneven,
        }
        self._epoch = 0
        self._start = 0
        self._begun_at = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next pass goes through."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; its own number leaves a resumed one as it is.

        Raises:
            ValueError: `epoch` is negative.
        """
        check_whole(0, epoch=epoch)
        if epoch != self._epoch:
            self._epoch, self._start, self._begun_at = int(epoch), 0, 0

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank in this epoch; once after a resumption, what is left of them.

        A second pass without `set_epoch` goes through the same epoch from its beginning.
        """
        self._begun_at, self._start = self._start, 0
        return iter(self._share()[self._begun_at :].tolist())

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, also when it was resumed."""
        return len(self._share())

    def state_dict(self, *, used: int, batch_size: int | None = None) -> dict[str, Any]:
        """What `load_state_dict` needs to go on behind the samples that training has used.

        Args:
            used: Samples that this rank has trained on since the pass was begun, or resumed, in
                this process: full batches times their size. More than were left count as all.
            batch_size: Of a `DataLoader` with `drop_last=True`: where fewer samples are left, it
                makes no batch of them, and the state is the start of the next epoch. None: the
                last, smaller batch is used.

        Raises:
            ValueError: `used` is negative, or `batch_size` below 1.
        """
        check_whole(0, used=used)
        least = 1
        if batch_size is not None:
            check_whole(1, batch_size=batch_size)
            least = batch_size
        epoch, position = self._epoch, self._begun_at + int(used)
        if len(self) - position < least:
            epoch, position = epoch + 1, 0
        return {**self._deal, "epoch": epoch, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` of the same rank gave, in a sampler made alike.

        Raises:
            ValueError: It is no state of a sampler, or the other sampler dealt otherwise, so that
                its position means nothing here. This one stays as it was.
        """
        if not isinstance(state, dict):
            raise ValueError(
                f"the state is {state!r}, but must be what state_dict() of a ShardedSampler gave."
            )
        for name in (*self._deal, "epoch", "position"):
            if name not in state:
                raise ValueError(
                    f"the state has no {name!r}, only {sorted(map(str, state))}: load what "
                    "state_dict() of a ShardedSampler gave."
                )
        check_whole(0, epoch=state["epoch"], position=state["position"])
        for name, mine in self._deal.items():
            if state[name] != mine:
                which = "load this rank's own" if name == "rank" else "make it alike"
                raise ValueError(
                    f"the state was saved with {name}={state[name]!r}, but this sampler has "
                    f"{mine!r}: {which}, or begin the epoch anew with "
                    f"set_epoch({state['epoch']})."
                )
        if state["position"] >= len(self):
            raise ValueError(
                f"the state has position {state['position']}, but this rank has {len(self)} "
                "samples in an epoch: load what state_dict() gave, or begin the epoch anew with "
                f"set_epoch({state['epoch']})."
            )
        self._epoch = int(state["epoch"])
        self._start = self._begun_at = int(state["position"])

    def _share(self) -> Int[np.ndarray, " sample"]:
        return epoch_share(epoch=self._epoch, **self._deal)
