import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.data import ShardedBatches, TensorSamples, shard_bounds


def shards(num_samples, world_size, *, batch_size=3, seed=0):
    numbers = torch.arange(num_samples)
    return [
        ShardedBatches(
            samples=TensorSamples(numbers.float(), numbers),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
        )
        for rank in range(world_size)
    ]


def seen(shard, epoch, **options):
    return [int(label) for _, y in shard.epoch(epoch, **options) for label in y]


@given(st.integers(1, 40), st.integers(1, 50))
def test_len_counts_the_batches(num_samples, batch_size):
    (shard,) = shards(num_samples, 1, batch_size=batch_size)
    sizes = [len(y) for _, y in shard.epoch(0)]
    assert len(sizes) == len(shard)
    assert set(sizes[:-1]) <= {batch_size}
    assert sizes[-1] <= batch_size + 1
    assert sum(sizes) == num_samples
    assert sizes[-1] > 1 or 1 in (batch_size, num_samples)


def test_augments_by_seed_and_epoch():
    told = []

    def augmentation(rows, indices, augment):
        told.append((indices.tolist(), augment))
        return -rows

    samples = TensorSamples(torch.arange(4.0), torch.arange(4), augmentation)
    batches = ShardedBatches(samples=samples, batch_size=3, rank=0, world_size=1, seed=7)
    for x, y in batches.epoch(2):
        assert x.tolist() == (-y.float()).tolist()
        assert told.pop() == (y.tolist(), (7, 2))


def test_threads_change_nothing():
    (shard,) = shards(50, 1)
    threaded = dataclasses.replace(shard, threads=3)
    assert seen(threaded, 1) == seen(shard, 1)
    assert seen(threaded, 1, start_batch=4) == seen(shard, 1)[12:]


@given(st.integers(0, 100), st.integers(1, 12))
def test_shard_bounds_cover_everything_once(num_samples, world_size):
    bounds = [shard_bounds(num_samples, rank, world_size) for rank in range(world_size)]
    assert [index for start, end in bounds for index in range(start, end)] == list(
        range(num_samples)
    )
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1
