import json
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from gossipgrad.data import ShardedBatches, ShardedSampler, TensorSamples


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


def test_deals_as_the_training_job_does():
    samples = TensorSamples(torch.arange(20.0), torch.arange(20))
    batches = ShardedBatches(samples=samples, batch_size=3, rank=1, world_size=3, seed=5)
    sampler = ShardedSampler(20, 1, 3, seed=5)
    sampler.set_epoch(4)
    assert [int(label) for _, y in batches.epoch(4) for label in y] == list(sampler)


def test_order_follows_seed_and_epoch():
    first = dealt(30, 2)
    assert first == dealt(30, 2)
    assert first != dealt(30, 2, seed=1)
    assert first != dealt(30, 2, epoch=1)
    assert dealt(30, 2, shuffle=False)[1] == list(range(1, 30, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_behind_what_was_used_whatever_workers_drew_ahead(workers):
    def loader(sampler):
        return DataLoader(Numbers(41), batch_size=4, sampler=sampler, num_workers=workers)

    def batches(sampler, epochs, stop_after=None):
        """All batches of the epochs, or those before the stop and the state there."""
        found = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            for number, batch in enumerate(loader(sampler), start=1):
                found.append(batch.tolist())
                if len(found) == stop_after:
                    return found, sampler.state_dict(used=4 * number)
        return found

    whole = batches(ShardedSampler(41, 1, 2, uneven="keep"), range(3))
    assert [len(batch) for batch in whole] == [4] * 15
    begun, state = batches(ShardedSampler(41, 1, 2, uneven="keep"), range(3), stop_after=7)
    resumed = ShardedSampler(41, 1, 2, uneven="keep")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.epoch == 1
    assert begun + batches(resumed, range(resumed.epoch, 3)) == whole


def test_a_second_stop_in_the_same_epoch_counts_on():
    whole = list(ShardedSampler(30, 0, 2))
    state = ShardedSampler(30, 0, 2).state_dict(used=4)
    second = ShardedSampler(30, 0, 2)
    second.load_state_dict(state)
    assert second.state_dict(used=0)["position"] == 4
    taken = iter(second)
    assert [next(taken) for _ in range(5)] == whole[4:9]
    third = ShardedSampler(30, 0, 2)
    third.load_state_dict(second.state_dict(used=5))
    assert list(third) == whole[9:]


def test_end_of_an_epoch_is_the_start_of_the_next():
    sampler = ShardedSampler(10, 0, 2)
    for used in (5, 6):  # a last batch may be smaller than those before
        state = sampler.state_dict(used=used)
        assert (state["epoch"], state["position"]) == (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_whose_rest_is_dropped_is_over(workers):
    """11 samples in batches of 4: 3 are never used, and no resumed epoch is made of them."""

    def epochs(sampler, first, stop_at=None):
        """The batches by epoch; with a stop (epoch, batch) those up to it, and the state there."""
        loader = DataLoader(
            Numbers(22), batch_size=4, sampler=sampler, drop_last=True, num_workers=workers
        )
        found = {}
        for epoch in range(first, 3):
            sampler.set_epoch(epoch)
            found[epoch] = []
            for number, batch in enumerate(loader, start=1):
                found[epoch].append(batch.tolist())
                if (epoch, number) == stop_at:
                    return found, sampler.state_dict(used=4 * number, batch_size=4)
        return found

    whole = epochs(ShardedSampler(22, 1, 2), 0)
    assert [len(batches) for batches in whole.values()] == [2, 2, 2]
    for number, next_epoch in ((1, 1), (2, 2)):
        begun, state = epochs(ShardedSampler(22, 1, 2), 0, stop_at=(1, number))
        resumed = ShardedSampler(22, 1, 2)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.epoch == next_epoch
        for epoch, batches in epochs(resumed, resumed.epoch).items():
            begun[epoch] = begun.get(epoch, []) + batches
        assert begun == whole


def test_a_whole_batch_that_is_left_is_not_dropped():
    sampler = ShardedSampler(16, 0, 2)
    for used, batch_size, place in ((4, 4, (0, 4)), (5, 4, (1, 0)), (5, None, (0, 5))):
        state = sampler.state_dict(used=used, batch_size=batch_size)
        assert (state["epoch"], state["position"]) == place


def test_passes_after_a_resumed_one_are_whole():
    sampler = ShardedSampler(10, 0, 2)
    sampler.load_state_dict(ShardedSampler(10, 0, 2).state_dict(used=3))
    assert len(list(sampler)) == 2
    assert len(list(sampler)) == 5
    sampler.load_state_dict(ShardedSampler(10, 0, 2).state_dict(used=3))
    sampler.set_epoch(1)
    assert len(list(sampler)) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"world_size": 3},
            r"saved with world_size=3, but this sampler has 2: make it alike, or begin .*"
            r"set_epoch\(0\)\.",
        ),
        ({"rank": 1}, r"saved with rank=1, but this sampler has 0: load this rank's own, or begin"),
        ({"epoch": -1}, "epoch is -1, but must be a whole number of at least 0"),
        ({"position": -1}, "position is -1, but must be a whole number of at least 0"),
        (
            {"position": 5},
            r"position 5, but this rank has 5 samples in an epoch: load .* set_epoch\(0\)\.",
        ),
        (
            {"position": None},
            r"no 'position', only \['epoch', 'num_samples', .*\]: load what state_dict\(\) of a",
        ),
        ({"rank": None}, "the state has no 'rank'"),
    ],
)
def test_refuses_a_state_that_means_nothing_here_and_stays_as_it_was(change, message):
    state = {**ShardedSampler(10, 0, 2).state_dict(used=3), **change}
    state = {name: value for name, value in state.items() if value is not None}
    sampler = ShardedSampler(10, 0, 2)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict(used=0) == ShardedSampler(10, 0, 2).state_dict(used=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardedSampler(10, 2, 2), r"rank 2 is not in 0\.\.1"),
        (lambda: ShardedSampler(1, 0, 2), "1 samples do not give one to each of 2 ranks"),
        (
            lambda: ShardedSampler(10, 0, 2).state_dict(used=-1),
            "used is -1, but must be a whole number of at least 0",
        ),
        (
            lambda: ShardedSampler(10, 0, 2).state_dict(used=0, batch_size=0),
            "batch_size is 0, but must be a whole number of at least 1",
        ),
        (lambda: ShardedSampler(10, 0, 2, seed=-1), "seed is -1, but must be a whole number of"),
        (lambda: ShardedSampler(10, 0, 0), "world_size is 0, but must be a whole number of at"),
        (lambda: ShardedSampler(10, 0, 2).set_epoch(-1), "epoch is -1, but must be a whole number"),
    ],
)
def test_refuses_what_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("unchecked_types")
def test_numbers_of_numpy_leave_a_state_that_torch_reads_back(tmp_path):
    path = tmp_path / "state.pt"
    sampler = ShardedSampler(np.int64(41), np.int64(1), np.int64(2), np.int64(3))
    sampler.set_epoch(np.int64(2))
    torch.save(sampler.state_dict(used=np.int64(5), batch_size=np.int64(4)), path)
    state = torch.load(path)
    assert (state["epoch"], state["position"]) == (2, 5)
    resumed = ShardedSampler(41, 1, 2, 3)
    resumed.load_state_dict({**state, "epoch": np.int64(2), "position": np.int64(5)})
    torch.save(resumed.state_dict(used=0), path)
    assert torch.load(path) == state


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="the state is None, but must be what state_dict"):
        ShardedSampler(41, 1, 2).load_state_dict(None)
