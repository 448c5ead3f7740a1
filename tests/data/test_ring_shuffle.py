"""A ring shuffle as its user sees it, alone and in step with others."""

import math
import pickle
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import gossipgrad as gg
from gossipgrad.data import split_batches
from gossipgrad.data._ring_shuffle_rows import Flow, Parcel, Rows
from support.links import make_transports
from support.ranks import run_ranks


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


def epoch(shuffle):
    batches = []
    for x, y in shuffle:
        assert torch.equal(x, y.float().reshape(-1, 1, 1).expand(-1, 2, 3))
        batches.append(y.tolist())
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

    for rank, epochs in enumerate(run([8] * p, seen, kind=kind, deadline_seconds=30.0)):
        for number, rows in enumerate(epochs):
            assert rows == ids_of([8] * p, (rank + number) % p).tolist()


def test_with_a_deadline_a_run_repeats_bit_for_bit():
    def seen(shuffle):
        return [epoch(shuffle) for _ in range(6)]

    runs = [run([13] * 4, seen, seed=5, deadline_seconds=30.0) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != run([13] * 4, seen, seed=6, deadline_seconds=30.0)


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


def test_stats_count_bytes_and_rows():
    def train(shuffle):
        epoch(shuffle)
        shuffle.drain()
        return shuffle.stats()

    for stats in run([8, 8], train, deadline_seconds=30.0):
        row_bytes = 2 * 3 * 4 + 8
        assert (stats.steps, stats.rows_held, stats.rows_sent) == (2, 8, 8)
        assert stats.bytes_sent == stats.bytes_received == 8 * row_bytes
        assert stats.late_rounds == stats.rows_stale == stats.rows_lost == 0
        assert stats.ranks_gone == () or stats.rows_in_flight == 0


def test_a_data_loader_takes_it_as_it_is():
    with gg.RingShuffle(torch.randn(10, 3), torch.arange(10), batch_size=4) as shuffle:
        loader = DataLoader(shuffle, batch_size=None)
        assert len(loader) == 3
        assert sorted(int(label) for x, y in loader for label in y) == list(range(10))


def test_worker_processes_are_refused():
    with gg.RingShuffle(torch.arange(10), batch_size=4) as shuffle:
        why = "lives in one process, with its rows and its links to other ranks: use DataLoader"
        with pytest.raises(ValueError, match=why):
            next(iter(DataLoader(shuffle, batch_size=None, num_workers=1)))
        with pytest.raises(ValueError, match=why):
            pickle.dumps(shuffle)


def test_a_newer_iteration_ends_the_one_before():
    with gg.RingShuffle(torch.arange(10), batch_size=4) as shuffle:
        old, new = iter(shuffle), iter(shuffle)
        next(old)
        assert len(list(new)) == 3
        assert list(old) == []


@pytest.mark.parametrize("stop", [0, 2, 5])
def test_resumes_as_if_nothing_had_been(stop):
    """Saved after some batches of an epoch, loaded into new shuffles."""
    sizes = [20, 20, 20]

    def whole(shuffle):
        return [epoch(shuffle) for _ in range(3)]

    def begun(shuffle):
        batches, first = epoch(shuffle), []
        if stop:
            for _, y in shuffle:
                first.append(y.tolist())
                if len(first) == stop:
                    break
        shuffle.drain()
        return batches, first, shuffle.state_dict()

    def resumed(shuffle):
        batches, first, state = parts[shuffle.rank]
        shuffle.load_state_dict(pickle.loads(pickle.dumps(state)))
        if stop in (0, 5):
            return [batches, *([first] if stop else []), *(epoch(shuffle) for _ in range(2))][:3]
        return [batches, first + epoch(shuffle), epoch(shuffle)]

    parts = run(sizes, begun, deadline_seconds=30.0)
    assert run(sizes, resumed, deadline_seconds=30.0) == run(sizes, whole, deadline_seconds=30.0)


def test_a_state_with_rows_in_flight_is_refused():
    def save(shuffle):
        next(iter(shuffle))
        with pytest.raises(ValueError, match="4 rows are in flight: call drain"):
            shuffle.state_dict()
        shuffle.drain()
        state = shuffle.state_dict()
        with pytest.raises(ValueError, match="1 batches were handed out already"):
            shuffle.load_state_dict(state)
        with pytest.raises(ValueError, match="the state has no order: load what state_dict"):
            shuffle.load_state_dict({name: state[name] for name in state if name != "order"})
        state["rank"] = 7
        with pytest.raises(ValueError, match="the state has rank=7, this shuffle has"):
            shuffle.load_state_dict(state)

    run([8, 8], save)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((), {}, "no tensors"),
        ((torch.ones(0, 4),), {}, r"tensors have \[0\] rows"),
        ((torch.ones(3, device="meta"),), {}, "keep the shard in host memory"),
        ((torch.ones(3),), {"batch_size": 0}, "batch_size is 0, but must be a whole number of at"),
        ((torch.ones(3),), {"batch_size": True}, "batch_size is True, but must be a whole number"),
        ((torch.ones(3),), {"credits": 0}, "credits is 0, but must be a whole number of at least"),
        ((torch.ones(3),), {"seed": -1}, "seed is -1, but must be a whole number of at least 0"),
        (
            (torch.ones(3),),
            {"deadline_seconds": -1.0},
            "deadline_seconds is -1.0, but must be a number of seconds, at least 0 and finite; 0:",
        ),
        ((torch.ones(3),), {"deadline_seconds": math.nan}, "deadline_seconds is nan, but must be"),
        ((torch.ones(3),), {"deadline_seconds": math.inf}, "deadline_seconds is inf, but must be"),
        ((torch.ones(3),), {"drop_last": True}, "3 rows make no batch of 4 with drop_last"),
    ],
)
def test_bad_arguments_are_named(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        gg.RingShuffle(*tensors, **{"batch_size": 4, **options})


def test_ranks_that_differ_are_told_so():
    def main(rank, group):
        with pytest.raises(gg.AgreementError, match=r"rank 1 has dtypes=\['torch.int32'\], rank 0"):
            gg.RingShuffle(
                torch.ones(4, dtype=[torch.int64, torch.int32][rank]),
                batch_size=2,
                process_group=group,
            )

    run_ranks(2, main)


def test_a_shard_of_one_row_cannot_travel():
    def main(rank, group):
        with pytest.raises(ValueError, match="rank 1 has 1 rows, but every rank needs two"):
            gg.RingShuffle(torch.ones(4 - 3 * rank), batch_size=2, process_group=group)

    run_ranks(2, main)


def test_a_closed_shuffle_still_tells_its_rows():
    shuffle = gg.RingShuffle(torch.arange(5), batch_size=2)
    shuffle.close()
    shuffle.close()
    assert shuffle.rows()[0].tolist() == list(range(5))
    with pytest.raises(ValueError, match="the shuffle is closed: its rows are in rows"):
        next(iter(shuffle))


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))),
    st.integers(1, 5),
)
def test_rows_of_any_dtype_and_shape_travel(parts, count):
    tensors = [torch.arange(7)]
    for dtype, shape in parts:
        tensors.append((torch.randint(0, 2, (7, *shape))).to(dtype))
    rows, others = Rows(tensors), Rows([torch.full_like(t, 0) for t in tensors])
    slots = torch.arange(count).flip(0).numpy()
    payload = rows.take_out(slots, rows.read(slots)).payload
    others.take_out(slots, others.read(slots))
    others.put_in(Parcel(payload, count))
    for ours, theirs in zip(rows.tensors, others.tensors, strict=True):
        assert torch.equal(ours[:count], theirs[:count])


def test_a_single_row_joins_the_batch_before_it():
    sizes = [9, 7]

    def two_epochs(shuffle):
        assert len(shuffle) == 2
        return [epoch(shuffle) for _ in range(2)]

    for rank, epochs in enumerate(run(sizes, two_epochs, deadline_seconds=30.0)):
        expected = [4, 5] if rank == 0 else [4, 3]
        assert [[len(batch) for batch in batches] for batches in epochs] == [expected] * 2
        assert all(len(set(flat(batches))) == sizes[rank] for batches in epochs)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=6), st.integers(1, 9), st.booleans())
def test_a_step_moves_what_every_rank_can_give(sizes, batch_size, drop_last):
    sizes = [max(size, batch_size) for size in sizes]
    if min(sizes) < 2:
        return
    flow = Flow(sizes, batch_size=batch_size, drop_last=drop_last)
    for step in range(30):
        own = []
        for size in sizes:
            parts = split_batches(torch.arange(size), batch_size)
            if drop_last:
                parts = torch.arange(size // batch_size * batch_size).split(batch_size)
            own.append(min(len(parts[step % len(parts)]), batch_size, size - 1))
        assert flow.rows(step) == min(own) <= flow.most_rows
