"""A ring shuffle alone and in step: what is handed out, what it refuses, and how it resumes."""

import math
import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import gossipgrad as gg
from support.links import make_transports
from support.ranks import run_ranks

IN_STEP = {"deadline_seconds": 30.0}


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


def epoch(shuffle, stop=None):
    """The batches of an epoch, or so many of them."""
    batches = []
    for x, y in shuffle:
        assert torch.equal(x, y.float().reshape(-1, 1, 1).expand(-1, 2, 3))
        batches.append(y.tolist())
        if len(batches) == stop:
            break
    return batches


def test_alone_it_is_a_plain_shuffle():
    with gg.RingShuffle(torch.arange(10), batch_size=4, seed=3) as shuffle:
        first, second = ([y.tolist() for (y,) in shuffle] for _ in range(2))
        shuffle.set_epoch(0)
        again = [y.tolist() for (y,) in shuffle]
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(10))
    assert first == again != second


def test_batches_are_the_users_own():
    with gg.RingShuffle(torch.ones(6, 2), batch_size=3) as shuffle:
        for (x,) in shuffle:
            x.zero_()
        assert shuffle.rows()[0].sum() == 12


@pytest.mark.parametrize("kind", ["in-process", "zeromq"])
def test_every_rank_sees_everything_in_as_many_epochs_as_there_are_ranks(kind):
    p = 3

    def seen(shuffle):
        return [sorted(flat(epoch(shuffle))) for _ in range(p)]

    for rank, epochs in enumerate(run([8] * p, seen, kind=kind, **IN_STEP)):
        for number, rows in enumerate(epochs):
            assert rows == ids_of([8] * p, (rank + number) % p).tolist()


def test_what_a_user_writes_into_a_batch_does_not_travel():
    def seen(rank, group):
        with gg.RingShuffle(
            torch.arange(8) + 8 * rank,
            batch_size=4,
            process_group=group,
            transport=lambda group: ends[rank],
            **IN_STEP,
        ) as shuffle:
            for _ in range(2):
                for (ids,) in shuffle:
                    ids.zero_()
            shuffle.drain()
            return shuffle.rows()[0].tolist()

    ends = make_transports("in-process", 2)
    assert sorted(flat(run_ranks(2, seen))) == list(range(16))


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_uneven_shards_keep_their_sizes(p):
    sizes = [5 + 3 * (rank % 4) for rank in range(p)]

    def train(shuffle):
        for _ in range(3 + shuffle.rank % 2):
            epoch(shuffle)
        shuffle.drain()
        return shuffle.rows()[1].tolist(), shuffle.stats()

    held, stats = zip(*run(sizes, train), strict=True)
    assert [len(rows) for rows in held] == sizes
    assert sorted(flat(held)) == list(range(sum(sizes)))
    assert all(s.rows_in_flight == 0 and s.rows_sent == s.rows_received for s in stats)
    assert p == 1 or min(s.rows_sent for s in stats) > 0


@pytest.mark.parametrize(
    ("stop", "sizes"),
    [
        (lambda rank, epoch: 1, [10, 7, 13]),
        (lambda rank, epoch: 1 + epoch % 3, [4, 11, 5, 9]),
        (lambda rank, epoch: 1 + (rank + epoch) % 2, [10, 7, 13]),
        (lambda rank, epoch: 2 if rank else 3, [10, 10]),
    ],
)
def test_with_a_deadline_epochs_that_are_left_early_repeat_bit_for_bit(stop, sizes):
    """Every rank gives as many rows in a step, whatever is left of its epoch."""

    def train(shuffle):
        sent, batches = [], []
        for number in range(12):
            for made, (_, y) in enumerate(shuffle, start=1):
                batches.append(y.tolist())
                sent.append(shuffle.stats().rows_sent)
                if made == stop(shuffle.rank, number):
                    break
        shuffle.drain()
        return sent, batches, shuffle.rows()[1].tolist()

    runs = [run(sizes, train, **IN_STEP) for _ in range(2)]
    assert [seen[:2] for seen in runs[0]] == [seen[:2] for seen in runs[1]]
    sent, batches, held = zip(*runs[0], strict=True)
    steps = min(map(len, sent))
    assert {tuple(counts[:steps]) for counts in sent} == {tuple(sent[0][:steps])}
    assert [len(rows) for rows in held] == sizes
    assert sorted(flat(held)) == list(range(sum(sizes)))
    assert all(len(set(batch)) == len(batch) for batch in chain(*batches))


def test_stats_count_bytes_and_rows():
    def train(shuffle):
        epoch(shuffle)
        shuffle.drain()
        return shuffle.stats()

    for stats in run([8, 8], train, **IN_STEP):
        row_bytes = 2 * 3 * 4 + 8
        assert (stats.steps, stats.rows_held, stats.rows_sent) == (2, 8, 8)
        assert stats.bytes_sent == stats.bytes_received == 8 * row_bytes
        assert stats.late_rounds == stats.rows_stale == stats.rows_lost == 0


def test_a_data_loader_takes_it_without_worker_processes():
    with gg.RingShuffle(torch.randn(10, 3), torch.arange(10), batch_size=4) as shuffle:
        loader = DataLoader(shuffle, batch_size=None)
        assert len(loader) == 3
        assert sorted(int(label) for x, y in loader for label in y) == list(range(10))
        with pytest.raises(ValueError, match="num_workers=0"):
            next(iter(DataLoader(shuffle, batch_size=None, num_workers=1)))
        with pytest.raises(ValueError, match="num_workers=0"):
            pickle.dumps(shuffle)


def test_a_newer_iteration_ends_the_one_before():
    with gg.RingShuffle(torch.arange(10), batch_size=4) as shuffle:
        old, new = iter(shuffle), iter(shuffle)
        next(old)
        assert len(list(new)) == 3
        assert list(old) == []


@pytest.mark.parametrize("stop", [None, 2, 5])
@pytest.mark.parametrize("sizes", [[20] * 3, [19, 18, 20]])
def test_resumes_as_if_nothing_had_been(stop, sizes):
    """Saved after some batches of an epoch, loaded into new shuffles; the next one breaks off."""

    def whole(shuffle):
        return [epoch(shuffle), epoch(shuffle), epoch(shuffle, stop=2), epoch(shuffle)]

    def begun(shuffle):
        batches = [epoch(shuffle), *([epoch(shuffle, stop)] if stop else [])]
        shuffle.drain()
        return batches, shuffle.state_dict()

    def resumed(shuffle):
        batches, state = parts[shuffle.rank]
        shuffle.load_state_dict(pickle.loads(pickle.dumps(state)))
        if stop is None or stop < len(shuffle):
            batches = [batches[0], (batches[1] if stop else []) + epoch(shuffle)]
        return [*batches, epoch(shuffle, stop=2), epoch(shuffle)]

    parts = run(sizes, begun, **IN_STEP)
    assert run(sizes, resumed, **IN_STEP) == run(sizes, whole, **IN_STEP)


@pytest.mark.usefixtures("unchecked_types")
def test_a_state_that_does_not_fit_is_refused():
    def save(shuffle):
        next(iter(shuffle))
        with pytest.raises(ValueError, match="in flight"):
            shuffle.state_dict()
        shuffle.drain()
        state = shuffle.state_dict()
        with pytest.raises(ValueError, match="before the first"):
            shuffle.load_state_dict(state)
        without_order = {name: state[name] for name in state if name != "order"}
        for other, named in [(None, "None"), (without_order, "order"), ({**state, "rank": 7}, "7")]:
            with pytest.raises(ValueError, match=named):
                shuffle.load_state_dict(other)
        with (
            gg.RingShuffle(torch.arange(9.0), batch_size=4) as alone,
            pytest.raises(ValueError, match="world_size"),
        ):
            alone.load_state_dict({**state, "rank": 0})

    run([8, 8], save)


@pytest.mark.usefixtures("unchecked_types")
def test_numbers_of_numpy_leave_a_state_that_torch_reads_back(tmp_path):
    shuffle = gg.RingShuffle(torch.arange(10), batch_size=np.int64(4), seed=np.int64(3))
    shuffle.set_epoch(np.int64(0))
    with shuffle:
        first = [y.tolist() for (y,) in shuffle]
        torch.save(shuffle.state_dict(), tmp_path / "state.pt")
        second = [y.tolist() for (y,) in shuffle]
    with gg.RingShuffle(torch.arange(10), batch_size=4, seed=3) as other:
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert [y.tolist() for (y,) in other] == second != first


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
        ((torch.ones(3),), {"deadline_seconds": -1.0}, "deadline_seconds"),
        ((torch.ones(3),), {"deadline_seconds": math.nan}, "deadline_seconds"),
        ((torch.ones(3),), {"deadline_seconds": math.inf}, "deadline_seconds"),
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


def test_a_closed_shuffle_still_has_its_rows():
    shuffle = gg.RingShuffle(torch.arange(5), batch_size=2)
    shuffle.close()
    shuffle.close()
    assert shuffle.rows()[0].tolist() == list(range(5))
    with pytest.raises(ValueError, match="closed"):
        next(iter(shuffle))


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


def test_a_single_row_joins_the_batch_before_it():
    sizes = [9, 7]

    def two_epochs(shuffle):
        assert len(shuffle) == 2
        return [epoch(shuffle) for _ in range(2)]

    for rank, epochs in enumerate(run(sizes, two_epochs, **IN_STEP)):
        expected = [4, 5] if rank == 0 else [4, 3]
        assert [[len(batch) for batch in batches] for batches in epochs] == [expected] * 2
        assert all(len(set(flat(batches))) == sizes[rank] for batches in epochs)
