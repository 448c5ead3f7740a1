"""A ring shuffle alone and in step: what is handed out, and what it refuses."""

import pickle
import threading
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import gossipgrad as gg
from gossipgrad.data._reference import RingReference
from support.links import make_transports
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS


def ids_of(sizes, rank):
    return torch.arange(sizes[rank]) + sum(sizes[:rank])


def run(sizes, function, *, batch_size=4, kind="in-process", **options):
    """`function(shuffle)` on every rank."""
    ends = make_transports(kind, len(sizes)) if len(sizes) > 1 else None

    def main(rank, group):
        ids = ids_of(sizes, rank)
        with gg.RingShuffle(
            ids.float().reshape(-1, 1, 1).expand(-1, 2, 3),
            ids,
            batch_size=batch_size,
            process_group=group,
            transport=lambda group: ends[group.rank],
            **options,
        ) as shuffle:
            return function(shuffle)

    return run_ranks(len(sizes), main)


def flat(parts):
    return list(chain.from_iterable(parts))


def batches_of(shuffle):
    """The batches through all epochs."""
    for x, y in chain.from_iterable(iter(lambda: iter(shuffle), None)):
        assert torch.equal(x, y.float().reshape(-1, 1, 1).expand(-1, 2, 3))
        yield y.tolist()


def run_in_step(sizes, steps, **options):
    """Batches and figures of each rank; no rank begins a step before all ended theirs."""
    together = threading.Barrier(len(sizes))

    def train(shuffle):
        batches = []
        for batch in islice(batches_of(shuffle), steps):
            batches.append(batch)
            together.wait(HANG_SECONDS)
        return batches, shuffle.stats()

    return zip(*run(sizes, train, **options), strict=True)


def test_alone_it_is_a_plain_shuffle():
    with gg.RingShuffle(torch.arange(10), batch_size=4, seed=3) as shuffle:
        first, second = ([y.tolist() for (y,) in shuffle] for _ in range(2))
        shuffle.set_epoch(0)
        again = [y.tolist() for (y,) in shuffle]
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(10))
    assert first == again != second


@pytest.mark.parametrize("sizes", [[8] * 3, [9, 7], [10, 7, 13, 8]])
def test_in_step_it_is_the_reference(sizes):
    shards = [ids_of(sizes, rank).tolist() for rank in range(len(sizes))]
    reference = RingReference(shards, batch_size=4, seed=5)
    found, stats = run_in_step(sizes, 14, seed=5)
    assert [*zip(*found, strict=True)] == [tuple(reference.step()) for _ in range(14)]
    assert all(s.late_rounds == s.rows_stale == s.rows_lost == 0 for s in stats)


def test_every_rank_sees_everything_in_as_many_epochs_as_there_are_ranks():
    p, size = 3, 8
    found, stats = run_in_step([size] * p, 2 * p)
    for rank, batches in enumerate(found):
        for number in range(p):
            rows = sorted(flat(batches[2 * number : 2 * number + 2]))
            assert rows == ids_of([size] * p, (rank + number) % p).tolist()
    row_bytes = 2 * 3 * 4 + 8
    for one in stats:
        assert one.steps == 2 * p
        assert one.bytes_sent == one.rows_sent * row_bytes
        assert one.rows_sent == p * size


def test_what_a_user_writes_into_a_batch_does_not_travel():
    def seen(rank, group):
        with gg.RingShuffle(
            torch.arange(8) + 8 * rank,
            batch_size=4,
            process_group=group,
            transport=lambda group: ends[rank],
        ) as shuffle:
            for _ in range(2):
                for (ids,) in shuffle:
                    ids.zero_()
            shuffle.close(HANG_SECONDS)
            return shuffle.rows()[0].tolist()

    ends = make_transports("in-process", 2)
    assert sorted(flat(run_ranks(2, seen))) == list(range(16))


def test_a_data_loader_takes_it_without_worker_processes():
    with gg.RingShuffle(torch.randn(10, 3), torch.arange(10), batch_size=4) as shuffle:
        loader = DataLoader(shuffle, batch_size=None)
        assert len(loader) == 3
        assert sorted(int(label) for x, y in loader for label in y) == list(range(10))
        with pytest.raises(ValueError, match="num_workers=0"):
            next(iter(DataLoader(shuffle, batch_size=None, num_workers=1)))
        with pytest.raises(ValueError, match="num_workers=0"):
            pickle.dumps(shuffle)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("tensors", "options", "named"),
    [
        ((), {}, "no tensors"),
        ((torch.ones(0, 4),), {}, "0"),
        ((torch.ones(3), torch.ones(4)), {}, "3, 4"),
        ((torch.ones(3, device="meta"),), {}, "meta"),
        ((torch.ones(3),), {"batch_size": 0}, "batch_size"),
        ((torch.ones(3),), {"batch_size": True}, "batch_size"),
        ((torch.ones(3),), {"credits": 0}, "credits"),
        ((torch.ones(3),), {"seed": -1}, "seed"),
        ((torch.ones(3),), {"drop_last": True}, "drop_last"),
    ],
)
def test_bad_arguments_are_named(tensors, options, named):
    with pytest.raises(ValueError, match=named):
        gg.RingShuffle(*tensors, **{"batch_size": 4, **options})


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ([torch.ones(4), torch.ones(4, dtype=torch.int32)], gg.AgreementError),
        ([torch.ones(4), torch.ones(4, 2)], gg.AgreementError),
        ([torch.ones(4), torch.ones(1)], ValueError),
    ],
)
def test_shards_that_do_not_go_together_are_refused_on_every_rank(tensors, error):
    def main(rank, group):
        with pytest.raises(error, match="rank 1"):
            gg.RingShuffle(tensors[rank], batch_size=2, process_group=group)

    run_ranks(2, main)


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))))
def test_rows_of_any_dtype_and_shape_come_out_as_they_went_in(parts):
    """Packed and unpacked, as rows travel."""
    tensors = [torch.arange(7), *(torch.randint(0, 2, (7, *s)).to(d) for d, s in parts)]
    with gg.RingShuffle(*tensors, batch_size=3) as shuffle:
        for index, *batch in shuffle:
            for tensor, part in zip(tensors[1:], batch, strict=True):
                assert part.dtype == tensor.dtype
                assert torch.equal(part, tensor[index])
