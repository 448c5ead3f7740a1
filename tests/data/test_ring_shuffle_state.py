"""When a ring shuffle's state can be had."""

import threading

import pytest
import torch

import gossipgrad as gg
from support.links import make_transports
from support.ranks import run_ranks


def test_a_state_is_refused_while_rows_are_due_although_all_that_went_has_arrived():
    ends, barrier = make_transports("in-process", 2), threading.Barrier(2, timeout=60)

    def main(rank, group):
        with gg.RingShuffle(
            torch.arange(12) + 12 * rank,
            batch_size=4,
            process_group=group,
            transport=lambda group: ends[rank],
        ) as shuffle:
            if rank == 0:
                next(iter(shuffle))
                barrier.wait()
                barrier.wait()
                shuffle._ring.poll()
                assert shuffle.stats().rows_in_flight == 0
                with pytest.raises(ValueError, match=r"^4 rows are in flight: call settle\(\)"):
                    shuffle.state_dict()
            else:
                barrier.wait()
                shuffle._ring.poll()
                barrier.wait()
            shuffle.settle()
            return int(shuffle.state_dict()["held"].sum())

    assert run_ranks(2, main) == [12, 12]


def test_after_a_settlement_the_state_can_be_had_without_what_a_leaver_took():
    ends, barrier = make_transports("in-process", 3), threading.Barrier(3, timeout=60)

    def main(rank, group):
        with gg.RingShuffle(
            torch.arange(12) + 12 * rank,
            batch_size=4,
            process_group=group,
            transport=lambda group: ends[rank],
        ) as shuffle:
            if rank == 0:
                next(iter(shuffle))
            barrier.wait()
            if rank == 2:
                return 0
            shuffle.settle()
            state = shuffle.state_dict()
            return int(state["held"].sum()) + len(state["unplaced"][0])

    assert run_ranks(3, main) == [8, 12, 0]  # rank 2 left with the four rows of the first step
