"""When a ring shuffle's state can be had."""

import threading

import numpy as np
import pytest
import torch

import gossipgrad as gg
from support.links import make_transports
from support.ranks import run_ranks


def a_shuffle(end, rank, group):
    """Twelve rows a rank, in batches of four, over the given end of a transport."""
    return gg.RingShuffle(
        torch.arange(12) + 12 * rank,
        batch_size=4,
        process_group=group,
        transport=lambda group: end,
    )


def test_a_state_is_refused_while_rows_are_due_although_all_that_went_has_arrived():
    ends, barrier = make_transports("in-process", 2), threading.Barrier(2, timeout=60)

    def main(rank, group):
        with a_shuffle(ends[rank], rank, group) as shuffle:
            if rank == 0:
                next(iter(shuffle))
                barrier.wait()
                barrier.wait()
                shuffle._ring.poll()
                assert shuffle.stats().rows_in_flight == 0
                with pytest.raises(ValueError, match=r"^4 rows are in flight: call drain\(\)"):
                    shuffle.state_dict()
            else:
                barrier.wait()
                shuffle._ring.poll()
                barrier.wait()
            shuffle.drain()
            return int(shuffle.state_dict()["held"].sum())

    assert run_ranks(2, main) == [12, 12]


def test_after_a_settlement_the_state_can_be_had_without_what_a_leaver_took():
    ends, barrier = make_transports("in-process", 3), threading.Barrier(3, timeout=60)

    def main(rank, group):
        with a_shuffle(ends[rank], rank, group) as shuffle:
            if rank == 0:
                next(iter(shuffle))
            barrier.wait()
            if rank == 2:
                return 0
            shuffle.drain()
            state = shuffle.state_dict()
            return int(state["held"].sum()) + len(state["unplaced"][0])

    assert run_ranks(3, main) == [8, 12, 0]  # rank 2 left with the four rows of the first step


@pytest.mark.usefixtures("unchecked_types")
def test_numbers_of_numpy_leave_a_state_that_torch_reads_back(tmp_path):
    path = tmp_path / "state.pt"
    with gg.RingShuffle(torch.arange(10), batch_size=4, seed=3) as shuffle:
        plain = [y.tolist() for (y,) in shuffle]
    shuffle = gg.RingShuffle(torch.arange(10), batch_size=np.int64(4), seed=np.int64(3))
    shuffle.set_epoch(np.int64(0))
    with shuffle:
        assert [y.tolist() for (y,) in shuffle] == plain
        torch.save(shuffle.state_dict(), path)
    with gg.RingShuffle(torch.arange(10), batch_size=4, seed=3) as other:
        other.load_state_dict(torch.load(path))


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_no_state_is_refused():
    told = "the state is None, but must be what state_dict"
    with (
        gg.RingShuffle(torch.arange(10), batch_size=4) as shuffle,
        pytest.raises(ValueError, match=told),
    ):
        shuffle.load_state_dict(None)


def test_rows_without_a_slot_are_loaded_in_parcels_that_a_neighbour_takes():
    ends, barrier = make_transports("in-process", 2), threading.Barrier(2, timeout=60)

    def main(rank, group):
        with a_shuffle(ends[rank], rank, group) as shuffle:
            shuffle.drain()
            state = shuffle.state_dict()
            state["unplaced"] = (torch.arange(100, 110),)
            shuffle.load_state_dict(state)
            assert [parcel.count for parcel in shuffle._rows.unplaced] == [4, 4, 2]
            held = sorted(shuffle.rows()[0].tolist())
            barrier.wait()
            return held

    assert run_ranks(2, main)[0] == [*range(12), *range(100, 110)]
