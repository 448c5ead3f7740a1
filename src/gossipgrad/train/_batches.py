"""Which samples a rank trains on: all of them in turn, its own shard, or one that moves on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from gossipgrad.comm import Group
from gossipgrad.data import (
    ElasticBatches,
    RingShuffle,
    Samples,
    ShardedBatches,
    ShardedSampler,
    TensorSamples,
    made_ahead,
    num_batches,
    split_batches,
)
from gossipgrad.engine import Session

from ._config import TrainConfig
from ._signals import blocking_stops

# A private group by its name, the same on all ranks.
Groups = Callable[[str], Group]

Batch = tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]

# Sets the draw of the shards apart from those of an epoch's order.
_STREAM = 2


@runtime_checkable
class Batches(Protocol):
    """The batches of one rank."""

    def __len__(self) -> int:
        """Batches an epoch, equally many on every rank."""
        ...

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start_batch` on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardBatches:
    """Batches of one shard, in another order each epoch; a last one is never a single sample."""

    samples: Samples
    shard: Int[np.ndarray, " sample"]
    batch_size: int
    rank: int
    seed: int
    threads: int = 0

    def __len__(self) -> int:
        return num_batches(len(self.shard), self.batch_size)

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        rng = np.random.default_rng((self.seed, epoch, self.rank))
        order = torch.from_numpy(rng.permutation(self.shard))
        chosen = split_batches(order, self.batch_size)[start_batch:]
        make = partial(self.samples.batch, augment=(self.seed, epoch))
        return made_ahead(make, chosen, threads=self.threads)


class RingBatches:
    """Batches of a shard whose rows move on to the next rank; a collective when made."""

    def __init__(
        self,
        samples: TensorSamples,
        shard: Int[np.ndarray, " sample"],
        *,
        batch_size: int,
        seed: int,
        group: Group | None = None,
    ) -> None:
        index = torch.from_numpy(shard)
        self._samples = samples
        self._seed = seed
        self._shuffle = RingShuffle(
            samples.x[index],
            samples.y[index],
            index,
            batch_size=batch_size,
            seed=seed,
            process_group=group,
        )

    def __len__(self) -> int:
        return len(self._shuffle)

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, as many fewer as were used before a resume."""
        self._shuffle.set_epoch(epoch)
        for x, y, index in islice(self._shuffle, max(0, len(self) - start_batch)):
            yield self._samples.inputs(x, index, augment=(self._seed, epoch)), y

    def figures(self) -> dict[str, int]:
        """What the shuffle has cost so far, by the names of the metrics."""
        stats = self._shuffle.stats()
        late = stats.late_rounds
        return {"shuffle_bytes_sent": stats.bytes_sent, "shuffle_late_rounds": late}

    def notes(self) -> list[str]:
        """What the user should know."""
        lost = self._shuffle.stats().rows_lost
        return [f"{lost} samples were on their way to a rank that died, and are lost"] * bool(lost)

    def close(self) -> None:
        """Leave the ring; local."""
        self._shuffle.close()


class LoaderBatches:
    """Batches of a loader of the user's own, of fixed shares."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        sampler = getattr(self._loader, "sampler", None)
        if isinstance(sampler, ShardedSampler):  # skips samples before they are loaded
            sampler.set_epoch(epoch, start=start_batch * self._loader.batch_size)
            start_batch = 0
        elif hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with blocking_stops():  # a loader starts its workers here, or for its first batch
            batches = islice(self._loader, start_batch, None)
            first = list(islice(batches, 1))
        yield from first
        yield from batches


def make_batches(
    config: TrainConfig,
    samples: Samples,
    *,
    rank: int,
    world_size: int,
    groups: Groups | None = None,
    session: Session | None = None,
) -> Batches:
    """The batches that `config` asks for; a collective with `shuffle` ring."""
    if config.shuffle == "global":
        common = {
            "samples": samples,
            "batch_size": config.step_samples,
            "world_size": world_size,
            "seed": config.seed,
            "threads": config.data_threads,
        }
        is_elastic = not config.needs_every_rank and config.island_size == 1
        if is_elastic and session is not None and session.world_size > 1:
            return ElasticBatches(**common, member=session, store=session.group.store)
        return ShardedBatches(**common, rank=rank)
    shard = assign(
        samples.labels if config.shards == "by-label" else None,
        num_samples=len(samples),
        rank=rank,
        world_size=world_size,
        seed=config.seed,
    )
    if config.shuffle == "local":
        return ShardBatches(
            samples=samples,
            shard=shard,
            batch_size=config.step_samples,
            rank=rank,
            seed=config.seed,
            threads=config.data_threads,
        )
    assert isinstance(samples, TensorSamples), "refused before the start"
    return RingBatches(
        samples,
        shard,
        batch_size=config.step_samples,
        seed=config.seed,
        group=None if groups is None else groups("ring"),
    )


def assign(
    labels: Int[Tensor, " sample"] | None,
    *,
    num_samples: int,
    rank: int,
    world_size: int,
    seed: int,
) -> Int[np.ndarray, " share"]:
    """A rank's shard for the whole run: equally many samples each, at most p - 1 in none."""
    if labels is None:
        order = np.random.default_rng((seed, 0, 0, _STREAM)).permutation(num_samples)
    else:
        order = np.argsort(labels.numpy(), kind="stable")
    start = rank * num_samples // world_size
    return order[start : start + num_samples // world_size]
