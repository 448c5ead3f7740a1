from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from gossipgrad.data import ShardedSampler


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


def dealt(num_samples, world_size, *, epoch=0, **options):
    samplers = [
        ShardedSampler(num_samples, rank, world_size, **options) for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    return shares


sizes = st.integers(1, 9).flatmap(lambda p: st.tuples(st.integers(p, 80), st.just(p)))


@given(sizes, st.integers(0, 3), st.booleans())
def test_drop_gives_every_rank_equally_many(sizes, epoch, shuffle):
    num_samples, world_size = sizes
    shares = dealt(*sizes, epoch=epoch, shuffle=shuffle)
    assert {len(share) for share in shares} == {num_samples // world_size}
    everything = list(chain(*shares))
    assert len(set(everything)) == len(everything) > num_samples - world_size


@given(sizes, st.integers(0, 3), st.booleans())
def test_keep_deals_every_sample_once(sizes, epoch, shuffle):
    shares = dealt(*sizes, epoch=epoch, shuffle=shuffle, uneven="keep")
    assert sorted(chain(*shares)) == list(range(sizes[0]))
    assert {len(share) - sizes[0] // sizes[1] for share in shares} <= {0, 1}


def test_other_samples_sit_out_in_other_epochs():
    sat_out = {
        frozenset(set(range(11)) - set(chain(*dealt(11, 4, epoch=epoch)))) for epoch in range(5)
    }
    assert len(sat_out) > 1
    assert set(range(11)) - set(chain(*dealt(11, 4, shuffle=False))) == {8, 9, 10}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_by_epoch_and_batch_whatever_workers_drew_ahead(workers, drop_last):
    def loader(sampler):
        return DataLoader(
            Numbers(41),
            batch_size=4,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    def batches(first_step, last_step):
        """Those of some steps, in a process of its own as it were."""
        sampler = ShardedSampler(41, 1, 2, uneven="keep")
        batches, step = loader(sampler), first_step
        first, done = divmod(first_step, len(batches))
        for epoch in range(first, 3):
            sampler.set_epoch(epoch, start=4 * done if epoch == first else 0)
            assert sampler.epoch == epoch
            for batch in batches:
                if step == last_step:
                    return
                yield batch.tolist()
                step += 1

    whole = list(batches(0, 100))
    assert [len(batch) for batch in whole] == [4] * 15
    for stop in (0, 3, 5, 7, 14):
        assert [*batches(0, stop), *batches(stop, 100)] == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank 2"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 0}, "world_size is 0"),
        ({"num_samples": 1}, "1 samples .* 2 ranks"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    good = {"num_samples": 10, "rank": 0, "world_size": 2}
    with pytest.raises(ValueError, match=message):
        ShardedSampler(**{**good, **options})
    sampler = ShardedSampler(**good)
    for call in ({"epoch": -1}, {"epoch": 0, "start": -1}):
        with pytest.raises(ValueError, match="is -1"):
            sampler.set_epoch(**call)
